"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Backend


class WeightAverage:
    """average <- decay average + (1 - decay) weights, every `every` steps.

    `averages` mirrors the trained parameters by name; their placement (sharded or not) too.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        averages: dict[str, Tensor],
        decay: float,
        every: int,
    ) -> None:
        self.parameters = dict(parameters)
        self.averages = averages
        self.decay = decay
        self.every = every

    @torch.no_grad()
    def update(self, steps_done: int) -> None:
        """After step `steps_done` on an eager backend: due or nothing."""
        if steps_done % self.every == 0:
            weights: list[Tensor] = list(self.parameters.values())
            torch._foreach_lerp_(list(self.averages.values()), weights, 1 - self.decay)

    @torch.no_grad()
    def update_traced(self, steps_done: Tensor) -> None:
        """The same as arithmetic on the device's step counter (0-d), for a backend that traces.

        Steps that are not due add a weight of exactly 0, so every step is one and the same graph.
        """
        due = torch.remainder(steps_done, self.every) == 0
        weight = due.to(torch.float32) * (1 - self.decay)
        for average, parameter in zip(
            self.averages.values(), self.parameters.values(), strict=True
        ):
            average.lerp_(parameter, weight.to(average.dtype))

    @contextmanager
    def in_place_of_weights(self, backend: Backend) -> Iterator[None]:
        """Within the context the model computes with the averages."""
        weights, averages = list(self.parameters.values()), list(self.averages.values())
        backend.exchange(weights, averages)
        try:
            yield
        finally:
            backend.exchange(weights, averages)


@torch.no_grad()
def start_average(
    parameters: Mapping[str, nn.Parameter], decay: float, every: int
) -> WeightAverage:
    """An average that starts at the parameters' present values."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    averages = {name: p.detach().clone() for name, p in trained.items()}
    return WeightAverage(trained, averages, decay, every)
