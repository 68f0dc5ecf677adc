"""Optimizers for a traced step: all state from the start, and no number of a step in the graph."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from tpukit.errors import UsageError
from tpukit.hardware.backend import AdamSettings, ParameterGroup
from tpukit.hardware.first_state import TriedOptimizer
from tpukit.hardware.optimizers import (
    PER_GROUP,
    choose_capturable,
    set_rates,
    trained_of,
    wrapped_in,
)

UNLIKE_ZERO = 1e-12
"""A rate in place of 0, which would be a constant of another graph, as 1 would be."""
PROVEN = "AdamW, Adam, NAdam, Adamax, SGD, RMSprop, Adagrad, Adadelta, Adafactor, Lion"


class XlaAdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch's AdamW computes it.

    What changes from step to step (the rate, the bias corrections) is computed on the host and
    sent as one small tensor: a Python number in the graph would compile it anew.

    make_state: a zero tensor on the device, with memory of its own, of a parameter's shape.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        settings: AdamSettings,
        make_state: Callable[[nn.Parameter], Tensor],
    ) -> None:
        self.settings = settings
        super().__init__([group.options() for group in groups], {"lr": 0.0})
        for parameter, _ in self.trained():
            self.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": make_state(parameter),
                "exp_avg_sq": make_state(parameter),
            }
        self._count_as_one()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._count_as_one()

    def _count_as_one(self) -> None:
        """Makes the counts of the parameters' steps views of one tensor."""
        counted = [state for state in self.state.values() if "step" in state]
        if counted:
            counts = torch.stack([state["step"] for state in counted])
            for state, count in zip(counted, counts.unbind(), strict=True):
                state["step"] = count

    def trained(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """Every parameter that is not frozen, with its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    yield parameter, group

    def used(self) -> list[nn.Parameter]:
        """Those of them that have gradients in this step: the others make none, as with torch's."""
        return [parameter for parameter, _ in self.trained() if parameter.grad is not None]

    def count(self, used: Sequence[nn.Parameter]) -> None:
        """Counts a step, after it."""
        # Past the counter of writes, by which a change that a program leaves out is found.
        torch._foreach_add_([count.data for count in self._counts(used)], 1)

    def _counts(self, used: Sequence[nn.Parameter]) -> list[Tensor]:
        """Theirs, or the one tensor that they are all views of."""
        steps = [self.state[parameter]["step"] for parameter in used]
        whole = steps[0]._base if steps else None
        views = [step for step in steps if step._base is whole]
        if whole is not None and len(views) == len(steps) == whole.numel():
            return [whole]
        return steps

    def numbers(self, used: Sequence[nn.Parameter], lr: float) -> Tensor:
        """Of the next step: (4,) on the host: rate, rate / correction of the mean, 1 / root of the
        correction of the square, and 0. (counts, 4) where some parameters have made fewer steps:
        they were frozen, or no loss used them."""
        rows = [self._numbers(lr, count + 1) for count in self._distinct_counts(used) or [0]]
        return torch.tensor(rows if rows[1:] else rows[0])

    def _numbers(self, lr: float, step: int) -> list[float]:
        beta1, beta2 = self.settings.betas
        root = math.sqrt(1.0 - beta2**step)
        return [lr, lr / (1.0 - beta1**step), 1.0 / root, 0.0]

    def _distinct_counts(self, used: Sequence[nn.Parameter]) -> list[int]:
        """How many steps they have made, in order."""
        ends = {int(end) for count in self._counts(used) for end in torch.aminmax(count)}
        if len(ends) < 2:
            return [*ends]
        return sorted({int(self.state[parameter]["step"]) for parameter in used})

    @torch.no_grad()
    def apply(self, numbers: Tensor, factor: Tensor) -> None:
        """One step with the gradients times `factor` (0-d); `numbers` on the device."""
        counts = self._distinct_counts(self.used()) if numbers.ndim > 1 else []
        rows = [row.unbind() for row in (numbers.unbind() if counts else [numbers])]
        beta1, beta2 = self.settings.betas
        for parameter, group in self.trained():
            if parameter.grad is None:
                continue
            state, scale = self.state[parameter], group["lr_scale"]
            lr, rate, inverse_root, _ = rows[counts.index(int(state["step"])) if counts else 0]
            gradient = parameter.grad * factor
            if group["weight_decay"]:
                parameter.mul_(1.0 - lr * (group["weight_decay"] * scale))
            state["exp_avg"].mul_(beta1).add_(gradient, alpha=1.0 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
            root = state["exp_avg_sq"].sqrt() * inverse_root + self.settings.eps
            parameter.sub_(state["exp_avg"] / root * (rate if scale == 1.0 else rate * scale))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("a backend steps it: see XlaBackend.step")


class XlaAdafactor(torch.optim.Adafactor):
    """torch's Adafactor (Shazeer and Stern, 2018), which reads two norms a parameter, in one graph.

    optimizer: torch's own, whose state exists.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups)
        self.state = optimizer.state

    def used(self) -> list[nn.Parameter]:
        """What has gradients in this step."""
        trained = (parameter for group in self.param_groups for parameter in trained_of(group))
        return [parameter for parameter in trained if parameter.grad is not None]

    def count(self, used: Sequence[nn.Parameter]) -> None:
        """Counts a step, after it."""
        for parameter in used:
            self.state[parameter]["step"].data.add_(1)

    def numbers(self, used: Sequence[nn.Parameter], lr: float) -> Tensor:
        """Of the next step: (rows, 3) on the host: rate, weight of the gradient, its bound. A row
        for each group, and for each number of steps that its parameters have made."""
        rows = [self._numbers(lr, *row) for row in dict.fromkeys(self._rows(used))]
        return torch.tensor(rows).reshape(-1, 3)

    def _rows(self, used: Sequence[nn.Parameter]) -> list[tuple[int, float]]:
        """The group of each, and which step is its next."""
        groups = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        return [(groups[p], 1 + float(self.state[p]["step"])) for p in used]

    def _numbers(self, lr: float, group: int, step: float) -> list[float]:
        lr *= self.param_groups[group][PER_GROUP]
        return [lr, step ** self.param_groups[group]["beta2_decay"], min(lr, 1 / math.sqrt(step))]

    @torch.no_grad()
    def apply(self, numbers: Tensor, factor: Tensor) -> None:
        """One step with the gradients times `factor` (0-d); `numbers` on the device."""
        used = self.used()
        rows = self._rows(used)
        values = dict(zip(dict.fromkeys(rows), numbers.unbind(), strict=True))
        of_row = {row: value.unbind() for row, value in values.items()}
        for parameter, row in zip(used, rows, strict=True):
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
            self._update(parameter, self.param_groups[row[0]], *of_row[row])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("a backend steps it: see XlaBackend.step")

    def _update(
        self, parameter: nn.Parameter, group: dict[str, Any], lr: Tensor, new: Tensor, rho: Tensor
    ) -> None:
        """One parameter's step: `new` is the weight of the present gradient, `rho` the rate."""
        assert parameter.grad is not None
        gradient = -parameter.grad if group["maximize"] else parameter.grad
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(parameter.dtype).eps if eps1 is None else eps1
        alpha = _root_mean_square(parameter).clamp(min=eps2) * rho
        if group["weight_decay"]:
            parameter.mul_(1 - lr * group["weight_decay"])
        variance = self._variance(self.state[parameter], gradient, new, eps1)
        update = variance.clamp(min=eps1 * eps1).rsqrt() * gradient
        parameter.sub_(update * (alpha / (_root_mean_square(update) / group["d"]).clamp(min=1.0)))

    def _variance(
        self, state: dict[str, Any], gradient: Tensor, new: Tensor, eps1: float
    ) -> Tensor:
        """The estimate after this gradient: an outer product over the last two axes."""
        squared = gradient.square()
        if gradient.ndim < 2:
            return state["variance"].lerp_(squared, new)  # type: ignore[no-any-return]
        rows = state["row_var"].lerp_(squared.mean(-1, keepdim=True), new)
        columns = state["col_var"].lerp_(squared.mean(-2, keepdim=True), new)
        return rows @ columns / rows.mean(-2, keepdim=True).clamp(min=eps1)  # type: ignore[no-any-return]


def _root_mean_square(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()


def choose_traced_form(optimizer: Optimizer) -> None:
    """Sets the options with which torch's optimizers read no value of the device in their step.

    Raises UsageError for options that make the first step another graph than the rest.
    """
    for group in optimizer.param_groups:
        if group.get("dampening"):
            raise UsageError(
                f"{type(optimizer).__name__} with dampening {group['dampening']} is not supported"
                " on XLA: its first step is another graph.",
                "Leave dampening at 0.",
                id="optimizer",
            )
        forms = {"foreach": False, "fused": False}
        group.update({name: value for name, value in forms.items() if name in group})
        group["lr"] = float(group["lr"])
    choose_capturable(optimizer)


def rates_of(optimizer: Optimizer, lr: float) -> Tensor:
    """(groups,): each group's rate."""
    return torch.tensor([lr * group[PER_GROUP] for group in optimizer.param_groups])


def takes_rates(optimizer: Optimizer, send: Callable[[Tensor], Tensor]) -> bool:
    """Whether it steps at rates that are tensors of the device (0-d) without reading one."""
    if wrapped_in(optimizer) is not None:
        return False
    try:
        for group in optimizer.param_groups:
            first = next(trained_of(group), None)
            if first is not None:
                tried = TriedOptimizer(optimizer, group, first, 0, send)
                with reading_refused(optimizer), TensorFactors():
                    tried.step()
    except Exception:  # of whatever an optimizer does with one weight and a tensor
        return False
    return True


def step_in_graph(
    optimizer: Optimizer, lr: float | Tensor, gradients: Sequence[Tensor], factor: Tensor
) -> None:
    """One step with the gradients times `factor` (0-d), traced into the graph of this step.

    lr: the step's rate, or the groups' rates on the device (groups,), as `rates_of` gives them.
    """
    for gradient in gradients:
        gradient.mul_(factor)
    rates = [group["lr"] for group in optimizer.param_groups]
    if isinstance(lr, Tensor):
        for group, rate in zip(optimizer.param_groups, lr.unbind(), strict=True):
            group["lr"] = rate
    else:
        set_rates(optimizer, lr)
        for group in optimizer.param_groups:
            if group["lr"] in (0.0, 1.0):
                group["lr"] = UNLIKE_ZERO if group["lr"] == 0.0 else math.nextafter(1.0, 2.0)
    with reading_refused(optimizer), TensorFactors():
        optimizer.step()
    if isinstance(lr, Tensor):
        for group, kept in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = kept


class TensorFactors(TorchFunctionMode):
    """Within it the factors `alpha` and `value` of torch's sums may be tensors, which torch would
    read."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "").rstrip("_")
        factor = kwargs.get({"add": "alpha", "sub": "alpha"}.get(name, "value"))
        if isinstance(factor, Tensor) and name in ("add", "sub", "addcmul", "addcdiv"):
            kwargs = {k: v for k, v in kwargs.items() if v is not factor}
            args = (args[0], args[1] * factor, *args[2:])
        return function(*args, **kwargs)


@contextmanager
def reading_refused(optimizer: Optimizer) -> Iterator[None]:
    """Turns a value that the optimizer reads in its step into a UsageError that names the class."""
    allowed = torch_xla._XLAC._get_allow_execution()
    torch_xla._XLAC._set_allow_execution(False)
    try:
        yield
    except RuntimeError as error:
        if "Unexpected execution" not in str(error):
            raise
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} reads values of the device in its step,"
            " which XLA would compile and wait for each time.",
            f"On XLA use one of {PROVEN}, or train on a GPU or CPU.",
            id="optimizer",
        ) from error
    finally:
        torch_xla._XLAC._set_allow_execution(allowed)
