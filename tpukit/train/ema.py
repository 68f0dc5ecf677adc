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

    def update(self, backend: Backend, steps_done: int) -> None:
        """After step `steps_done`: the update where one is due, else nothing."""
        weight = 1 - self.decay if steps_done % self.every == 0 else 0.0
        backend.lerp(list(self.averages.values()), list(self.parameters.values()), weight)

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
