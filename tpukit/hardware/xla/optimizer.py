"""AdamW for a traced step: all its state from the start, and no number of a step in the graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import AdamSettings, ParameterGroup


class XlaAdamW(torch.optim.Optimizer):
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
        super().__init__(
            [{"params": list(g.parameters), "weight_decay": g.weight_decay} for g in groups],
            {"lr": 0.0},
        )
        for parameter, _ in self.trained():
            self.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": make_state(parameter),
                "exp_avg_sq": make_state(parameter),
            }

    def trained(self) -> Iterator[tuple[nn.Parameter, float]]:
        """Every parameter with its weight decay."""
        for group in self.param_groups:
            for parameter in group["params"]:
                yield parameter, group["weight_decay"]

    def gradients(self) -> list[Tensor]:
        return [p.grad for p, _ in self.trained() if p.grad is not None]

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
        for parameter, weight_decay in self.trained():
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            gradient = parameter.grad * factor
            if weight_decay:
                parameter.mul_(1.0 - lr * weight_decay)
            state["exp_avg"].mul_(beta1).add_(gradient, alpha=1.0 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
            root = state["exp_avg_sq"].sqrt() * inverse_root + self.settings.eps
            parameter.sub_(state["exp_avg"] / root * rate)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("a backend steps it: see XlaBackend.step")
