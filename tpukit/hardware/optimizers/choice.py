"""Which optimizers there are: by name, and those that cannot be stepped, with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tpukit.errors import UsageError
from tpukit.hardware.backend import OptimizerSettings, ParameterGroup

ON_HOST = (torch.optim.Adadelta, torch.optim.RAdam)
"""Count their steps on the host: the first has no other form, the second's is exact to 1e-2."""


def named_optimizer(groups: Sequence[ParameterGroup], settings: OptimizerSettings) -> Optimizer:
    """The optimizer that the settings name, over these groups."""
    options = [group.options() for group in groups]
    lr, betas, eps = settings.lr, settings.betas, settings.eps
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(options, lr, betas, eps, fused=True)
        case "adam":
            return torch.optim.Adam(options, lr, betas, eps)
        case "sgd":
            return torch.optim.SGD(options, lr, settings.momentum)
        case "rmsprop":
            return torch.optim.RMSprop(options, lr, momentum=settings.momentum)
        case "adafactor":
            return torch.optim.Adafactor(options, lr)
        case "lion":
            from timm.optim.lion import Lion

            lion: Optimizer = Lion(options, lr, betas)
            return lion


def require_steppable(optimizer: Any) -> None:
    """Raises UsageError where the engine cannot step an optimizer, with the reason."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"`build_optimizer` returned a {name}, not one torch.optim optimizer: a step adds up"
            " the gradients of one loss over micro-batches and devices, clips and steps once.",
            "Give each network its own ParameterGroup (`lr_scale`) of one optimizer and return the"
            " sum of the losses, each reaching its own network alone.",
            id="several-optimizers",
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise _refused(name, "its step evaluates the loss again through a closure")
    if any(not isinstance(g.get("lr"), float | int | torch.Tensor) for g in optimizer.param_groups):
        raise _refused(name, "it has no `lr`, which the engine sets before each step")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise _refused(name, "it takes sparse gradients, which are neither reduced nor clipped")


def require_whole_matrices(optimizer: Optimizer) -> None:
    """Raises UsageError for an optimizer that a shard of each matrix is not enough for."""
    if type(optimizer).__name__ in ("Adafactor", "Muon"):
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} needs whole matrices, and --shard leaves a"
            " rank a part of each.",
            "Leave --shard out, or use AdamW, SGD or Lion; a TPU shards Adafactor too.",
            id="optimizer",
        )


def choose_capturable(optimizer: Optimizer) -> None:
    """Sets the option with which torch's optimizers count their steps on the device."""
    for group in optimizer.param_groups:
        if "capturable" in group and not isinstance(optimizer, ON_HOST):
            group["capturable"] = True


def _refused(name: str, reason: str) -> UsageError:
    return UsageError(
        f"the optimizer {name} cannot be used: {reason}.",
        "Use AdamW, SGD, Adafactor, Lion or another optimizer that steps from gradients.",
        id="optimizer",
    )
