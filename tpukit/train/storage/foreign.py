"""Checkpoint files of other code: read as tensors and plain values, or described."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpukit.errors import CheckpointError
from tpukit.io.files import require_regular

SHOWN = 3
"""Entries shown of what a file holds."""


def read_foreign(path: Path) -> Any:
    """What `torch.save` wrote; nothing in it is executed.

    Raises:
        CheckpointError: it is missing, damaged, or holds more than tensors and plain values.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle's protocol
            return torch.load(require_regular(path), map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"Checkpoint {path} does not exist.", "Check the path.") from error
    except Exception as error:  # a damaged pickle raises whatever its first bad byte leads to
        raise CheckpointError(
            f"Checkpoint {path} cannot be read as tensors alone: {_reason(error)}.",
            "Download it again; a file that holds more than tensors is not loaded.",
        ) from error


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(".: ")


def state_dict_of(content: Any, name: str) -> dict[str, Tensor] | None:
    """The tensors by name under `name`, None where there is no such thing."""
    found = content.get(name) if isinstance(content, dict) else None
    if not isinstance(found, Mapping) or not found:
        return None
    whole = all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())
    return dict(found) if whole else None


def describe(content: Any) -> str:
    """What a file holds, in a few words: `a dict with model (dict), epoch (int)`."""
    if isinstance(content, Tensor):
        return f"a tensor {tuple(content.shape)}"
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    entries = [f"{str(k)[:40]} ({type(v).__name__})" for k, v in list(content.items())[:SHOWN]]
    more = f" and {len(content) - SHOWN} more" if len(content) > SHOWN else ""
    return f"a dict with {', '.join(entries)}{more}" if entries else "an empty dict"
