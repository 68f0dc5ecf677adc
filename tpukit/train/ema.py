"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Backend


class EMA:
    """EMA weights <- decay EMA weights + (1 - decay) weights, every `every` steps.

    `weights` mirrors the trained parameters by name; their placement (sharded or not) too.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        weights: dict[str, Tensor],
        decay: float,
        every: int,
    ) -> None:
        self.parameters = dict(parameters)
        self.weights = weights
        self.decay = decay
        self.every = every

    def update(self, backend: Backend, steps_done: int) -> None:
        """After step `steps_done`: the update where one is due, else nothing."""
        weight = 1 - self.decay if steps_done % self.every == 0 else 0.0
        backend.lerp(list(self.weights.values()), list(self.parameters.values()), weight)

    @contextmanager
    def in_place_of_weights(self, backend: Backend) -> Iterator[None]:
        """Within the context the model computes with the EMA weights."""
        parameters, weights = list(self.parameters.values()), list(self.weights.values())
        backend.exchange(parameters, weights)
        try:
            yield
        finally:
            backend.exchange(parameters, weights)


@torch.no_grad()
def start_ema(parameters: Mapping[str, nn.Parameter], decay: float, every: int) -> EMA:
    """EMA weights that start at the parameters' present values."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    weights = {name: p.detach().clone() for name, p in trained.items()}
    return EMA(trained, weights, decay, every)
