"""Optimizers as the engine steps them: which there are, their rates, their state from the start."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from tpukit.errors import ConfigError, UsageError
from tpukit.hardware.backend import OptimizerSettings, ParameterGroup
from tpukit.hardware.modules import exchange, local

PER_GROUP = "lr_scale"
"""Key of a group's factor on the learning rate of a step."""
ON_HOST = (torch.optim.Adadelta, torch.optim.RAdam)
"""Count their steps on the host: the first has no other form, the second's is exact to 1e-2."""
PACKED = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW",
          "paged_adamw_8bit": "PagedAdamW8bit"}  # fmt: skip
"""Optimizers of bitsandbytes by their names here."""
MASTER_STATE = ("master", "exp_avg", "exp_avg_sq")


def named_optimizer(groups: Sequence[ParameterGroup], settings: OptimizerSettings) -> Optimizer:
    """The optimizer that the settings name, over these groups."""
    options = [group.options() for group in groups]
    if settings.name in PACKED:
        return _packed_adamw(options, settings)
    lr, betas, eps = settings.lr, settings.betas, settings.eps
    made: Optimizer
    match settings.name:
        case "adamw":
            fused = not any(p.is_complex() for group in groups for p in group.parameters)
            made = torch.optim.AdamW(options, lr, betas, eps, fused=fused)
        case "adam":
            made = torch.optim.Adam(options, lr, betas, eps)
        case "sgd":
            made = torch.optim.SGD(options, lr, settings.momentum)
        case "rmsprop":
            made = torch.optim.RMSprop(options, lr, momentum=settings.momentum)
        case "adafactor":
            made = torch.optim.Adafactor(options, lr)
        case "lion":
            from timm.optim.lion import Lion

            made = Lion(options, lr, betas)
    return made


def _packed_adamw(options: list[dict[str, Any]], settings: OptimizerSettings) -> Optimizer:
    """AdamW of bitsandbytes: its state in 8 bits, or in pages that leave a full GPU."""
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise ConfigError(
            f"optimizer={settings.name} needs bitsandbytes: {error}.", "pip install bitsandbytes"
        ) from error
    made: Optimizer = getattr(optim, PACKED[settings.name])(
        options, settings.lr, settings.betas, settings.eps
    )
    return made


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


def steppers(optimizer: Any) -> Iterator[Any]:
    """An optimizer, the one that it steps, the one that this steps, ..."""
    while optimizer is not None:
        yield optimizer
        optimizer = wrapped_in(optimizer)


def wrapped_in(optimizer: Any) -> Any:
    """The optimizer that another one steps, as Lookahead does; None where it steps alone."""
    return next(
        (value for value in vars(optimizer).values() if hasattr(value, "param_groups")), None
    )


def require_whole_matrices(optimizer: Optimizer) -> None:
    """Raises UsageError for an optimizer that a shard of each matrix is not enough for."""
    if type(optimizer).__name__ in ("Adafactor", "Muon") or _is_of_bitsandbytes(optimizer):
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} needs whole matrices, and --shard leaves a"
            " rank a part of each.",
            "Leave --shard out, or use AdamW, SGD or Lion; a TPU shards Adafactor too.",
            id="optimizer",
        )


def require_traceable(optimizer: Optimizer) -> None:
    """Raises UsageError for an optimizer whose step does not consist of operators of torch."""
    if _is_of_bitsandbytes(optimizer):
        raise refused(type(optimizer).__name__, "bitsandbytes has it for GPUs and CPUs")


def _is_of_bitsandbytes(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.")


def choose_capturable(optimizer: Optimizer) -> None:
    """Sets the option with which torch's optimizers count their steps on the device."""
    for group in optimizer.param_groups:
        if "capturable" in group and not isinstance(optimizer, ON_HOST):
            group["capturable"] = True


def refused(name: str, reason: str) -> UsageError:
    """An optimizer that a backend or the engine cannot use."""
    return UsageError(
        f"the optimizer {name} cannot be used: {reason}.",
        "Use AdamW, SGD, Adafactor, Lion or another optimizer that steps from gradients.",
        id="optimizer",
    )


# -- rates and modes -------------------------------------------------------------------------------
def adopt(optimizer: Optimizer, settings: OptimizerSettings) -> None:
    """Makes an optimizer ready for the engine: its groups' `lr_scale`, and its training mode."""
    for group in optimizer.param_groups:
        # As torch's schedulers have it: a group's own rate is scaled by the schedule.
        ratio = float(group["lr"]) / settings.lr if settings.lr else 1.0
        group[PER_GROUP] = group.get(PER_GROUP, 1.0) * ratio
        if isinstance(group["lr"], Tensor):
            # The one that it was built with is that of all groups.
            group["lr"] = group["lr"].detach().clone()
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


def has_modes(optimizer: Any) -> bool:
    """Whether it trains with other weights than those to evaluate, as schedule-free ones do."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def evaluation_mode(optimizer: Any) -> Iterator[None]:
    """Within the context the parameters of an optimizer with modes are those to evaluate."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [parameter.detach().clone() for parameter in parameters]
    exchange(parameters, kept)
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        # There and back again is another value in the last bits.
        exchange(parameters, kept)


def trained_of(group: dict[str, Any]) -> Iterator[nn.Parameter]:
    """The parameters of a group that have gradients."""
    return (parameter for parameter in group["params"] if parameter.requires_grad)


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer is about to use."""
    groups = optimizer.param_groups
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def finite_gradients(optimizer: Optimizer, norms: Tensor) -> Tensor:
    """(parameters,): 0 where a parameter's gradient is not finite, 1 elsewhere.

    norms: a norm of each gradient there is, in the order of `gradients_of`.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    finite = torch.isfinite(norms).float()
    if len(finite) == len(parameters):
        return finite
    found, one = iter(finite.unbind()), torch.ones((), device=finite.device)
    return torch.stack([one if p.grad is None else next(found) for p in parameters])


def set_rates(optimizer: Optimizer, lr: float | Tensor) -> None:
    """Sets each group's learning rate for the next step."""
    for group in optimizer.param_groups:
        rate = lr * group[PER_GROUP]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
