"""Optimizers as the engine steps them: which there are, their rates, their state from the start."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from tpukit.errors import UsageError
from tpukit.hardware.backend import OptimizerSettings, ParameterGroup
from tpukit.hardware.modules import local

PER_GROUP = "lr_scale"
"""Key of a group's factor on the learning rate of a step."""
ON_HOST = (torch.optim.Adadelta, torch.optim.RAdam)
"""Count their steps on the host: the first has no other form, the second's is exact to 1e-2."""
MASTER_STATE = ("master", "exp_avg", "exp_avg_sq")


def named_optimizer(groups: Sequence[ParameterGroup], settings: OptimizerSettings) -> Optimizer:
    """The optimizer that the settings name, over these groups."""
    options = [group.options() for group in groups]
    lr, betas, eps = settings.lr, settings.betas, settings.eps
    match settings.name:
        case "adamw":
            fused = not any(p.is_complex() for group in groups for p in group.parameters)
            return torch.optim.AdamW(options, lr, betas, eps, fused=fused)
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


class MasterAdamW(torch.optim.AdamW):
    """AdamW of half-precision weights, which are rounded from fp32 master copies in its state."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, lr, betas, eps, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            # One after the other: all gradients in fp32 would take as much as the master copies.
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, weight = self._state_of(parameter), local(parameter)
                step = state["step"]
                master, mean, square = (local(state[key]) for key in MASTER_STATE)
                # 0 until the first step; in its own graph, which is every step's.
                master.add_(torch.where(step > 0, 0, weight))
                adamw(
                    [master], [local(parameter.grad).float()], [mean], [square], [], [step],
                    amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
                    eps=group["eps"], weight_decay=group["weight_decay"],
                    foreach=group["foreach"], capturable=group["capturable"], fused=group["fused"],
                )  # fmt: skip
                weight.copy_(master)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for key in MASTER_STATE:
                state[key] = torch.zeros_like(parameter, dtype=torch.float32)
        return state


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
    option = inspect.signature(type(optimizer)).parameters.get("weight_decay")
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    given = optimizer.defaults.get("weight_decay")
    if option is not None and given not in (option.default, *decays):
        raise UsageError(
            f"weight_decay={given} of {name} has no effect: its groups have {decays}.",
            f"Give it as --set weight_decay={given}, or groups by the task's `parameter_groups`.",
            id="optimizer",
        )
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


# -- rates and state -------------------------------------------------------------------------------
def adopt(
    optimizer: Optimizer,
    settings: OptimizerSettings,
    stand_in: Callable[[nn.Parameter], Tensor],
    place: Callable[[Tensor, nn.Parameter], Tensor],
) -> None:
    """Makes an optimizer ready for the engine: its groups' `lr_scale`, its whole state.

    stand_in: zeros of a parameter's shape that one step may be tried on. place: a state tensor of
    such a step, where the parameter's own state lives.
    """
    for group in optimizer.param_groups:
        # As torch's schedulers have it: a group's own rate is scaled by the schedule.
        ratio = float(group["lr"]) / settings.lr if settings.lr else 1.0
        group[PER_GROUP] = group.get(PER_GROUP, 1.0) * ratio
        for parameter in trained_of(group):
            first = optimizer.state.get(parameter) or _first_values(
                optimizer, group, stand_in(parameter)
            )
            on_host = {"step"} if not (group.get("capturable") or group.get("fused")) else set()
            optimizer.state[parameter] = {
                key: place(value, parameter)
                if isinstance(value, Tensor) and key not in on_host
                else value
                for key, value in first.items()
                if not (key == "momentum_buffer" and group.get("dampening"))
            }


def trained_of(group: dict[str, Any]) -> Iterator[nn.Parameter]:
    """The parameters of a group that have gradients."""
    return (parameter for parameter in group["params"] if parameter.requires_grad)


def _first_values(optimizer: Optimizer, group: dict[str, Any], zeros: Tensor) -> dict[str, Any]:
    """The state that a first step starts from: what it assigns before it computes."""
    parameter, kept = nn.Parameter(zeros), optimizer.param_groups
    parameter.grad = torch.zeros_like(zeros)
    forms = {"capturable", "fused", "foreach"} & group.keys()
    plain: dict[str, Any] = dict.fromkeys(forms, False)
    optimizer.param_groups = [{**group, **plain, "lr": float(group["lr"]), "params": [parameter]}]
    values = optimizer.state[parameter] = FirstValues()
    try:
        optimizer.step()
        assigned, values.times = values.times, Counter()
        optimizer.step()
    finally:
        optimizer.param_groups = kept
        del optimizer.state[parameter]
    # Assigned by each step once: the value is what the first step left, unless it is zeros.
    left = {key for key, times in assigned.items() if times == 1 and key in values.times}
    return {key: v for key, v in values.first.items() if key not in left or _is_zeros(v)}


def _is_zeros(value: Any) -> bool:
    return isinstance(value, Tensor) and not bool(value.any())


class FirstValues(dict[str, Any]):
    """A dict that remembers the first value of each key, and how often one was assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.times: Counter[str] = Counter()

    def __setitem__(self, key: str, value: Any) -> None:
        self.times[key] += 1
        self.first.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *mappings: Any, **values: Any) -> None:
        for key, value in dict(*mappings, **values).items():
            self[key] = value


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer is about to use."""
    groups = optimizer.param_groups
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def set_rates(optimizer: Optimizer, lr: float | Tensor) -> None:
    """Sets each group's learning rate for the next step."""
    for group in optimizer.param_groups:
        rate = lr * group[PER_GROUP]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
