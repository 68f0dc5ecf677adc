"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Average
from tpukit.hardware.modules import exchange
from tpukit.train.config import EMAUpdates, TrainConfig


@dataclass(frozen=True)
class EMASchedule:
    """When the EMA weights are updated, and with which decay.

    An update is due after steps 1, 1 + `every`, 1 + 2 `every`, ... Until the last update of the
    first 1 + `warmup` steps the EMA weights are the weights; n steps after these d is
    min(decay, 1 - (1 + n)^(-2/3)), as in ema_pytorch (`update_after_step`, inv_gamma 1, power 2/3).
    Without a warm-up d is `decay`, and the EMA keeps the initial weights for about
    `every` / (1 - decay) steps.
    """

    decay: float
    every: int = 1
    warmup: int = 100
    updates: EMAUpdates = "ema_pytorch"

    def weight(self, steps_done: int) -> float:
        """1 - d of the update after step `steps_done` (from 1); 0 where none is due."""
        index = steps_done if self.updates == "multiples" else steps_done - 1
        if self.warmup == 0:
            return 1 - self.decay if index % self.every == 0 else 0.0
        last_copy = self.warmup // self.every * self.every
        if index <= last_copy and self.updates != "multiples":
            return 1.0
        if index % self.every:
            return 0.0
        if self.updates == "ema_pytorch-0.5.2" and index == last_copy + self.every:
            return 1.0
        since = max(index - self.warmup, 0)
        return 1 - min(self.decay, 1 - math.pow(1 + since, -2 / 3))


class EMA:
    """EMA weights <- d EMA weights + (1 - d) weights, by a schedule.

    `weights` mirrors by name the trained parameters, in their placement (sharded or not), and the
    persistent buffers: running statistics are averaged too, integers (counts) are copied.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        weights: dict[str, Tensor],
        schedule: EMASchedule,
    ) -> None:
        self.parameters: dict[str, Tensor] = dict(parameters)
        self.buffers = dict(buffers)
        self.weights = weights
        self.schedule = schedule

    def update(self, weight: float | Tensor) -> Average:
        """An update by this weight of the schedule."""
        sources = {**self.parameters, **self.buffers}
        averages = [self.weights[name] for name in sources]
        return Average(averages, list(sources.values()), weight)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Within the context the model computes with the EMA weights."""
        trained = {**self.parameters, **self.buffers}
        own, weights = list(trained.values()), [self.weights[name] for name in trained]
        exchange(own, weights)
        try:
            yield
        finally:
            exchange(own, weights)


@torch.no_grad()
def start_ema(
    config: TrainConfig, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]
) -> EMA | None:
    """EMA weights that start at the present values; None where the config has none."""
    if config.ema_decay is None:
        return None
    schedule = EMASchedule(
        config.ema_decay, config.ema_every, config.ema_warmup, config.ema_updates
    )
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    weights = {name: t.detach().clone() for name, t in {**trained, **buffers}.items()}
    return EMA(trained, buffers, weights, schedule)
