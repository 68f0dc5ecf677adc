"""Optimizers for a traced step: all state from the start, and no number of a step in the graph."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla
from torch import Tensor, nn
from torch.optim import Optimizer

from tpukit.errors import UsageError
from tpukit.hardware.backend import AdamSettings, ParameterGroup
from tpukit.hardware.optimizers import choose_capturable, set_rates

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

    def trained(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """Every parameter that has gradients, with its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    yield parameter, group

    def numbers(self, lr: float) -> Tensor:
        """Counts a step. (4,) on the host: rate, rate / correction of the mean, 1 / root of the
        correction of the square, and 0."""
        for parameter, _ in self.trained():
            self.state[parameter]["step"] += 1
        step = max((int(state["step"]) for state in self.state.values()), default=1)
        beta1, beta2 = self.settings.betas
        root = math.sqrt(1.0 - beta2**step)
        return torch.tensor([lr, lr / (1.0 - beta1**step), 1.0 / root, 0.0])

    @torch.no_grad()
    def apply(self, numbers: Tensor, factor: Tensor) -> None:
        """One step with the gradients times `factor` (0-d); `numbers` on the device."""
        lr, rate, inverse_root, _ = numbers.unbind()
        beta1, beta2 = self.settings.betas
        for parameter, group in self.trained():
            if parameter.grad is None:
                continue
            state, scale = self.state[parameter], group["lr_scale"]
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

    optimizer: torch's own, whose state exists. send: a host tensor on the device.
    """

    def __init__(self, optimizer: Optimizer, send: Callable[[Tensor], Tensor]) -> None:
        super().__init__(optimizer.param_groups)
        self.state = optimizer.state
        self.send = send

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            for parameter in trained:
                self.state[parameter]["step"] += 1
            step = float(self.state[trained[0]]["step"])
            lr, new = float(group["lr"]), step ** group["beta2_decay"]
            numbers = self.send(torch.tensor([lr, new, min(lr, 1 / math.sqrt(step))]))
            for parameter in trained:
                self._update(parameter, group, *numbers.unbind())

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


def step_in_graph(
    optimizer: Optimizer, lr: float, gradients: Sequence[Tensor], factor: Tensor
) -> None:
    """One step with the gradients times `factor` (0-d), traced into the graph of this step."""
    for gradient in gradients:
        gradient.mul_(factor)
    set_rates(optimizer, lr)
    for group in optimizer.param_groups:
        if group["lr"] in (0.0, 1.0):
            group["lr"] = UNLIKE_ZERO if group["lr"] == 0.0 else math.nextafter(1.0, 2.0)
    with reading_refused(optimizer):
        optimizer.step()


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
