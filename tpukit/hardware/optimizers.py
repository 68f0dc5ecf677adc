"""Optimizers as the engine steps them: which there are, their rates, their state from the start."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
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
STEPPED_BY = ("step", "zero_grad", "param_groups", "state", "state_dict", "load_state_dict")
"""Members of an optimizer, or of a class that wraps one."""
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
        if _needs_closure(innermost.step):
            raise _refused(name, "its step evaluates the loss again through a closure")
        if getattr(innermost, "is_second_order", False):
            raise _refused(
                name, "it takes gradients of gradients, whose graph a step does not keep"
            )
    try:
        optimizer.state_dict()
    except Exception as error:
        raise _refused(name, f"its `state_dict` raises {type(error).__name__}: {error}") from error
    if any(not isinstance(g.get("lr"), float | int | torch.Tensor) for g in optimizer.param_groups):
        raise _refused(name, "it has no `lr`, which the engine sets before each step")
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
        raise _refused(name, "it takes sparse gradients, which are neither reduced nor clipped")


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


def _needs_closure(step: Callable[..., Any]) -> bool:
    """Whether a step has no default for its closure, asserts or raises without one, or does with it
    another thing than torch's own: these evaluate the loss once, before all else."""
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None:
        return False
    if closure.default is inspect.Parameter.empty:
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(step))))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(map(_refuses_none, ast.walk(tree))) or _evaluates_again(tree)


def _refuses_none(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return any(isinstance(n, ast.Name) and n.id == "closure" for n in ast.walk(node.test))
    if not isinstance(node, ast.If) or ast.unparse(node.test) != "closure is None":
        return False
    return any(isinstance(line, ast.Raise) for line in node.body)


def _evaluates_again(tree: ast.Module) -> bool:
    """Whether a step evaluates its closure more than once, after a loop or a method of its own that
    may move weights, or does more where there is one.

    A function that it makes of the closure is another step's.
    """
    before: list[ast.AST] = []
    statements = tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else []
    calls = [node for line in statements for node in _own_nodes(line) if _is_call(node, "closure")]
    for inner in statements if calls else ():
        if calls[0] in _own_nodes(inner):
            break
        before += _own_nodes(inner)
    else:
        return False
    while isinstance(inner, ast.If | ast.With) and len(inner.body) == 1:
        if any(not isinstance(line, ast.Assign) for line in getattr(inner, "orelse", ())):
            return True
        inner = inner.body[0]
    moves = any(isinstance(node, ast.For) or _is_call(node, "self") for node in before)
    return len(calls) > 1 or moves or isinstance(inner, ast.If | ast.With | ast.For)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement consists of, but for functions that it defines."""
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)


def _is_call(node: ast.AST, name: str) -> bool:
    """Whether it is `name(...)` or `name.method(...)`."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute) and not function.attr.endswith("_health_check"):
        function = function.value
    return isinstance(function, ast.Name) and function.id == name


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
        raise _refused(type(optimizer).__name__, "bitsandbytes has it for GPUs and CPUs")


def _is_of_bitsandbytes(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.")


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
