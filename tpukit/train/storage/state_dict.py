"""Loading a checkpoint's weights into a model, strictly."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpukit.errors import CheckpointError

LISTED = 5
"""Names of each kind of difference in an error."""


def load_weights(
    model: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    source: str,
    hint: str = "Use the task and the size it was trained with.",
) -> None:
    """Loads whole weights strictly. Raises CheckpointError naming what does not fit."""
    own = {**dict(model.named_parameters()), **persistent_buffers(model)}
    # A whole state dict names tied weights more than once.
    unknown = weights.keys() - own.keys() - model.state_dict().keys()
    other_shapes = [
        f"{name} of shape {tuple(weights[name].shape)}, not {tuple(own[name].shape)}"
        for name in sorted(own.keys() & weights.keys())
        if weights[name].shape != own[name].shape
    ]
    differences = {
        "lacks": sorted(own.keys() - weights.keys()),
        "has an unknown": sorted(unknown),
        "has": other_shapes,
    }
    problems = [f"{verb} {_listed(found)}" for verb, found in differences.items() if found]
    if problems:
        count = sum(map(len, differences.values()))
        raise CheckpointError(
            f"{source} does not fit this model: it {'; '.join(problems)} ({count} differences).",
            hint,
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _listed(found: list[str]) -> str:
    return ", ".join([*found[:LISTED], *(["..."] if len(found) > LISTED else [])])


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds beside the parameters (running statistics), by name."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
