"""Loading a checkpoint's weights into a model, strictly."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpukit.errors import CheckpointError


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Loads whole weights strictly. Raises CheckpointError naming what does not fit."""
    own = {**dict(model.named_parameters()), **persistent_buffers(model)}
    # A whole state dict names tied weights more than once.
    missing = sorted(own.keys() - weights.keys())
    extra = sorted(weights.keys() - own.keys() - model.state_dict().keys())
    wrong = [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(own[name].shape)}"
        for name in sorted(own.keys() & weights.keys())
        if weights[name].shape != own[name].shape
    ]
    problems = [f"lacks {name}" for name in missing[:1]]
    problems += [f"has an unknown {name}" for name in extra[:1]]
    problems += wrong[:1]
    if problems:
        count = len(missing) + len(extra) + len(wrong)
        raise CheckpointError(
            f"{source} does not fit this model: it {'; '.join(problems)} ({count} differences).",
            "Use the task and the size it was trained with.",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds beside the parameters (running statistics), by name."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
