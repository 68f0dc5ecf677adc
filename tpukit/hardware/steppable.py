"""Which optimizers the engine can step: those that need its gradients, and nothing else."""

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tpukit.errors import UsageError
from tpukit.hardware.first_state import TriedOptimizer
from tpukit.hardware.optimizers import refused, steppers, trained_of

STEPPED_BY = ("step", "zero_grad", "param_groups", "state", "state_dict", "load_state_dict")
"""Members of an optimizer, or of a class that wraps one."""


def require_steppable(optimizer: Any) -> None:
    """Raises UsageError where the engine cannot step an optimizer, with the reason."""
    name = type(optimizer).__name__
    if not all(hasattr(optimizer, member) for member in STEPPED_BY):
        raise UsageError(
            f"`build_optimizer` returned a {name}, not one torch.optim optimizer: a step adds up"
            " the gradients of one loss over micro-batches and devices, clips and steps once.",
            "Give each network its own ParameterGroup (`lr_scale`) of one optimizer and return the"
            " sum of the losses, each reaching its own network alone.",
            id="several-optimizers",
        )
    for innermost in steppers(optimizer):
        if _needs_closure(innermost):
            raise refused(name, "its step evaluates the loss again through a closure")
        if getattr(innermost, "is_second_order", False):
            raise refused(name, "it takes gradients of gradients, whose graph a step does not keep")
    try:
        optimizer.state_dict()
    except Exception as error:
        raise refused(name, f"its `state_dict` raises {type(error).__name__}: {error}") from error
    if any(not isinstance(g.get("lr"), float | int | torch.Tensor) for g in optimizer.param_groups):
        raise refused(name, "it has no `lr`, which the engine sets before each step")
    option = inspect.signature(type(innermost)).parameters.get("weight_decay")
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    given = getattr(optimizer, "defaults", {}).get("weight_decay")
    if option is not None and given not in (None, option.default, *decays):
        raise UsageError(
            f"weight_decay={given} of {name} has no effect: its groups have {decays}.",
            f"Give it as --set weight_decay={given}, or groups by the task's `parameter_groups`.",
            id="optimizer",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise refused(name, "it takes sparse gradients, which are neither reduced nor clipped")


def _needs_closure(optimizer: Any) -> bool:
    """Whether a step has no default for its closure, works with one alone, or does with it another
    thing than torch's own: these evaluate the loss once, before all else."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is None:
        return False
    if closure.default is inspect.Parameter.empty:
        return True
    trained = [(group, p) for group in optimizer.param_groups for p in trained_of(group)]
    if not trained:
        return False
    group, like = min(trained, key=lambda each: each[1].numel())
    places: list[Tensor] = []
    works = False

    def evaluated() -> Tensor:
        places.append(tried.weights.detach().clone())
        return tried.weights.sum()

    # On values, within a trace too.
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        with suppress(Exception):
            tried = TriedOptimizer(optimizer, group, like, 0)
            start = tried.weights.detach().clone()
            tried.step(evaluated)
            works = True
            TriedOptimizer(optimizer, group, like, 0).step()
            works = False
        return works or len(places) > 1 or any(not torch.equal(place, start) for place in places)
