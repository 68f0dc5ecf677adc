"""Checkpoints of the published code: a dict with `model` (a state dict) and `epoch`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from tpukit.errors import CheckpointError
from tpukit.train.weights import describe, read_foreign, state_dict_of

SHOWN = 3
"""Names shown of each kind of difference."""


def read_published(path: Path) -> dict[str, Tensor]:
    """The weights of such a file, which executes nothing. Raises CheckpointError for any other."""
    content = read_foreign(path)
    weights = state_dict_of(content, "model")
    if weights is None:
        raise CheckpointError(
            f"Checkpoint {path} is not one of the published code: it holds {describe(content)}.",
            "Expected a dict with `model` (tensors by name) and `epoch`.",
        )
    return weights


def load_published(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads whole weights strictly. Raises CheckpointError saying what differs."""
    problem = difference(network.state_dict(), weights)
    if problem:
        raise CheckpointError(
            f"The checkpoint is not of this network: {problem}.",
            "Name the size it was trained with (--set size=NAME); the released one is `published`.",
        )
    network.load_state_dict(dict(weights))


def difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """In words: first the size, then the names and the shapes that differ; None where none do."""
    sizes = size_of(expected), size_of(found)
    if None not in sizes and sizes[0] != sizes[1]:
        return f"it has {sizes[1]}, this network {sizes[0]}"
    parts = [
        _listed("lacks", sorted(expected.keys() - found.keys())),
        _listed("has unknown", sorted(found.keys() - expected.keys())),
        _listed(
            "has another shape of",
            [
                f"{name} {tuple(found[name].shape)} (expected {tuple(tensor.shape)})"
                for name, tensor in expected.items()
                if name in found and found[name].shape != tensor.shape
            ],
        ),
    ]
    return "; ".join(part for part in parts if part) or None


def size_of(weights: Mapping[str, Tensor]) -> str | None:
    """Width, levels, patch and input channels of the network that a state dict belongs to."""
    patches = weights.get("x_embedder.proj.weight")
    if patches is None or patches.ndim != 4:
        return None
    width, channels, patch, _ = patches.shape
    levels = {name.split(".")[2] for name in weights if name.startswith("blocks.downs.")}
    return f"width {width}, {len(levels)} levels, patch {patch}, {channels} input channels"


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"it {what} {', '.join(names[:SHOWN])}{more}"
