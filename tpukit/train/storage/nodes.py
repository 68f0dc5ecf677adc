"""Nodes of a run that must be alike."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from tpukit.errors import UsageError
from tpukit.hardware.backend import Backend


def require_same_nodes(backend: Backend, facts: Mapping[str, Any]) -> None:
    """Compares plain values over all ranks; every rank must call it.

    Raises:
        UsageError: naming the nodes and the values that differ from the first rank's.
    """
    (first, expected), *others = backend.all_gather_objects((platform.node(), dict(facts)))
    for rank, (node, found) in enumerate(others, 1):
        differing = [
            f"{name} {found.get(name)} (rank 0: {expected.get(name)})"
            for name in sorted({*expected, *found})
            if found.get(name) != expected.get(name)
        ]
        if differing:
            raise UsageError(
                f"node {node} (rank {rank}) is not like node {first}: {', '.join(differing)}.",
                "Give all nodes the same installation and the same data.",
                id="nodes-differ",
            )
