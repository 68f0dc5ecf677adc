"""One optimizer step: what the engine repeats and what a trial measures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Backend, BackendState, Batch
from tpukit.train.batch_sums import MOST_SUMS, BatchSums
from tpukit.train.config import TrainConfig
from tpukit.train.ema import EMA, start_ema
from tpukit.train.optimizer import OptimizerState, build_optimizer
from tpukit.train.storage.checkpoint import Checkpoint
from tpukit.train.storage.initial_weights import initial_model
from tpukit.train.storage.state_dict import persistent_buffers
from tpukit.train.task import Datasets, Task

MASK_63 = 2**63 - 1
SMALLEST = 2
"""Index of the smallest gradient norm among the norms kept on the device."""


@dataclass(frozen=True)
class StepMetrics:
    """Means over the steps since the metrics were last read."""

    means: dict[str, float]
    """`loss` and the task's other entries."""
    steps: int
    gradient_norm: float
    """Before clipping, of the last step."""
    largest_gradient_norm: float
    smallest_gradient_norm: float
    skipped: int
    """Steps whose gradients were not finite (fp16's scaler leaves those out)."""
    first_bad_step: int | None
    """The first step (from 1) whose loss was not finite."""


class Learner:
    """A task's model on a backend, with its optimizer and EMA weights.

    All metrics stay on the device until `read_metrics`: reading one is a stop of the pipeline.
    """

    def __init__(
        self,
        task: Task,
        backend: Backend,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: EMA | None,
        clip_norm: float | None,
    ) -> None:
        self.task = task
        self.backend = backend
        self.model = model
        self.sums = BatchSums(task, backend, model)
        self.optimizer = optimizer
        names = dict(backend.unwrap(model).named_parameters())
        self.optimizer_state = OptimizerState(optimizer, names)
        self.ema = ema
        self.clip_norm = clip_norm or None
        self.steps_done = 0
        self._interrupt: Callable[[int], bool] | None = None
        self._names: list[str] = []
        device = backend.device
        self.window = torch.zeros(MOST_SUMS, device=device)
        self._step_totals = torch.zeros(MOST_SUMS, device=device)
        self._counter = torch.zeros((), dtype=torch.int64, device=device)
        self._first_bad = torch.zeros((), dtype=torch.int64, device=device)
        self._norms = _fresh_norms(device)

    def set_steps_done(self, steps: int) -> None:
        """Sets the number of steps that a resumed run has done."""
        self.steps_done = steps
        self._counter.fill_(steps)

    # -- training ------------------------------------------------------------------------------
    def train_step(
        self,
        batches: Sequence[Batch],
        lr: float,
        interrupt: Callable[[int], bool] | None = None,
    ) -> bool:
        """One optimizer step over its micro-batches (device batches of this rank).

        interrupt: asked after each forward pass, with their number; where it says so the step is
            dropped, and its state is that from before. Returns whether the step was made.
        """
        self._interrupt = interrupt
        weight = self.ema.schedule.weight(self.steps_done + 1) if self.ema else 0.0
        if not self.backend.run(self._step, batches, lr, weight):
            return False
        self.steps_done += 1
        self.backend.finish()
        return True

    def _step(self, batches: Sequence[Batch], lr: float | Tensor, weight: float | Tensor) -> bool:
        """`train_step` at a rate, with the weight of the EMA's update."""
        interrupt = self._interrupt
        before = None if interrupt is None else self._changed_by_passes()
        for index, batch in enumerate(batches):
            first, last = index == 0, index == len(batches) - 1
            with self.backend.micro_batch(self.model, first=first, last=last) as backward:
                self._names, part = self.sums.forward(batch, self._names)
                if before is not None and interrupt is not None and interrupt(index + 1):
                    self._drop_step(before)
                    return False
                backward(part[1])
                # In place, so that every micro-batch is the same graph.
                self._step_totals += part.detach()
        step_totals = self.backend.all_reduce_sum(self._step_totals)
        norm = self.backend.step(
            self.optimizer,
            lr=lr,
            weight=step_totals[0],
            clip_norm=self.clip_norm,
            average=self.ema.update(weight) if self.ema else None,
        )
        self._after(step_totals, norm)
        return True

    def _changed_by_passes(self) -> tuple[BackendState, dict[str, Tensor]]:
        """What a forward pass changes: random generators and buffers."""
        buffers = self.backend.unwrap(self.model).named_buffers()
        return self.backend.state(), {name: tensor.clone() for name, tensor in buffers}

    @torch.no_grad()
    def _drop_step(self, before: tuple[BackendState, dict[str, Tensor]]) -> None:
        state, buffers = before
        self.backend.load_state(state)
        for name, tensor in self.backend.unwrap(self.model).named_buffers():
            tensor.copy_(buffers[name])
        self._step_totals.zero_()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _after(self, totals: Tensor, norm: Tensor) -> None:
        """Updates the latch and the sums for the log in the step's own graph."""
        self._counter += 1
        bad = ~torch.isfinite(totals[1])
        self._first_bad.copy_(
            torch.where(bad & (self._first_bad == 0), self._counter, self._first_bad)
        )
        self._update_norms(norm.detach().float())
        self.window += totals / totals[0]
        self._step_totals.zero_()

    def _update_norms(self, norm: Tensor) -> None:
        finite = torch.isfinite(norm)
        last, largest, smallest, skipped = self._norms.unbind()
        self._norms.copy_(
            torch.stack([
                torch.where(finite, norm, last),
                torch.where(finite, torch.maximum(norm, largest), largest),
                torch.where(finite, torch.minimum(norm, smallest), smallest),
                skipped + (~finite).float(),
            ])
        )  # fmt: skip

    def read_metrics(self) -> StepMetrics:
        """Reads the metrics and starts them anew. Every rank must call it."""
        host = self.backend.to_host(
            {"window": self.window, "norms": self._norms, "bad": self._first_bad}
        )
        steps, *sums = host["window"].tolist()
        last, largest, smallest, skipped = host["norms"].tolist()
        self.window.zero_()
        self._norms.copy_(_fresh_norms(self._norms.device))
        self.backend.finish()
        # Two reads in a row have no step between them.
        count = steps or float("nan")
        means = {name: total / count for name, total in zip(self._names, sums, strict=False)}
        bad = int(host["bad"])
        return StepMetrics(means, int(steps), last, largest, smallest, int(skipped), bad or None)

    def first_bad_step(self) -> int | None:
        """The latch alone: the first step whose loss was not finite."""
        return int(self.backend.to_host({"bad": self._first_bad})["bad"]) or None

    # -- state -----------------------------------------------------------------------------------
    def model_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by their plain names."""
        module = self.backend.unwrap(self.model)
        return {**dict(module.named_parameters()), **persistent_buffers(module)}


def _fresh_norms(device: torch.device) -> Tensor:
    """[last, largest, smallest finite gradient norm, steps that were not finite]."""
    # Computed on the device: an upload would differ, in the compiled graph, from a step's result.
    zeros = torch.zeros(4, device=device)
    return torch.where(torch.arange(4, device=device) == SMALLEST, float("inf"), zeros)


def seed_everything(seed: int) -> None:
    """Seeds the host's generators: the weights of a new model come from torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed & MASK_63)


def build_learner(task: Task, backend: Backend, model: nn.Module, config: TrainConfig) -> Learner:
    """The learner of a model whose weights are loaded and which is on the CPU still."""
    prepared = backend.prepare(model)
    prepared.train()
    optimizer = build_optimizer(task, backend, prepared, config)
    module = backend.unwrap(prepared)
    ema = start_ema(config, dict(module.named_parameters()), persistent_buffers(module))
    learner = Learner(task, backend, prepared, optimizer, ema, config.clip_norm)
    # What was just made must not become part of the first step's graph.
    backend.finish()
    return learner


def load_learner(
    task: Task,
    config: TrainConfig,
    backend: Backend,
    checkpoint: Checkpoint | None = None,
    data: Datasets | None = None,
) -> Learner:
    """The learner as a checkpoint left it, or as the seed and the data initialise it.

    data: None where only shapes matter (a memory trial).
    """
    seed_everything(config.global_seed)
    model = initial_model(task, backend, config, checkpoint, data)
    learner = build_learner(task, backend, model, config)
    backend.load_state({"seed": config.global_seed})
    if checkpoint is None:
        return learner
    tensors = checkpoint.tensors("optimizer")
    learner.optimizer_state.restore(backend, checkpoint.state.optimizer, tensors)
    if learner.ema:
        # Before buffers were averaged, a checkpoint held only the model's own.
        kept = {**checkpoint.tensors("model"), **checkpoint.tensors("ema")}
        backend.load(learner.ema.weights, kept)
    backend.load({"window": learner.window}, {"window": torch.tensor(checkpoint.state.window)})
    learner.set_steps_done(checkpoint.state.step)
    backend.load_state({"scaler": checkpoint.state.scaler})
    if len(checkpoint.state.random) == backend.world_size:
        backend.load_state({"random": checkpoint.state.random[backend.rank]})
    return learner
