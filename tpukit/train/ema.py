"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Backend


class EMA:
    """EMA weights <- d EMA weights + (1 - d) weights, every `every` steps.

    For the first `warmup` steps d is 0: the EMA weights copy the weights. n steps later d is
    min(decay, 1 - (1 + n)^(-2/3)), as in ema_pytorch. Without a warm-up d is `decay`, and the EMA
    keeps the initial weights for about `every` / (1 - decay) steps.
    `weights` mirrors by name the trained parameters, in their placement (sharded or not), and the
    persistent buffers: running statistics are averaged too, integers (counts) are copied.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        weights: dict[str, Tensor],
        decay: float,
        every: int,
        warmup: int,
    ) -> None:
        self.parameters: dict[str, Tensor] = dict(parameters)
        self.buffers = dict(buffers)
        self.weights = weights
        self.decay = decay
        self.every = every
        self.warmup = warmup

    def decay_at(self, steps_done: int) -> float:
        """d of the update after step `steps_done`."""
        if self.warmup == 0:
            return self.decay
        since = max(steps_done - self.warmup, 0)
        return min(self.decay, 1 - math.pow(1 + since, -2 / 3))

    def update(self, backend: Backend, steps_done: int) -> None:
        """After step `steps_done`: the update where one is due, else nothing."""
        weight = 1 - self.decay_at(steps_done) if steps_done % self.every == 0 else 0.0
        for sources in (self.parameters, self.buffers):
            averages = [self.weights[name] for name in sources]
            if averages:
                backend.lerp(averages, list(sources.values()), weight)

    @contextmanager
    def in_place_of_weights(self, backend: Backend) -> Iterator[None]:
        """Within the context the model computes with the EMA weights."""
        trained = {**self.parameters, **self.buffers}
        own, weights = list(trained.values()), [self.weights[name] for name in trained]
        backend.exchange(own, weights)
        try:
            yield
        finally:
            backend.exchange(own, weights)


@torch.no_grad()
def start_ema(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    decay: float,
    every: int,
    warmup: int,
) -> EMA:
    """EMA weights that start at the present values."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    weights = {name: t.detach().clone() for name, t in {**trained, **buffers}.items()}
    return EMA(trained, buffers, weights, decay, every, warmup)
