"""What the steps of a run take of its devices, by the trace that predicts a GPU's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpukit.hardware.backend import Backend
from tpukit.hardware.select import EXPANDABLE, allocator_settings
from tpukit.io.units import GIB
from tpukit.probe.targets import gpu_here
from tpukit.probe.trial import Trial, TrialRequest
from tpukit.train.batch_size import Examples
from tpukit.train.config import TrainConfig
from tpukit.train.task import Task, for_probing

if TYPE_CHECKING:
    from tpukit.probe.gpu_memory.traced_trial import TracedTrials

SHARDED = ("parameters", "optimizer", "ema", "gradients")
"""What `--shard` splits over the devices."""


@dataclass(frozen=True)
class TracedCosts:
    """`StepCosts` by traced trials."""

    trials: TracedTrials
    on_gpu: bool
    """Memory includes the allocator and the libraries' workspaces, as `probe-batch --target` has
    it; of other devices it is the peak of live tensors."""
    shards: int
    """Devices that weights, gradients and optimizer state are split over."""

    def memory_bytes(self, rows: int, accumulate: int) -> int:
        # A second micro-batch adds to the gradients of the first; more take no more.
        trial = self._trial(rows, min(accumulate, 2))
        assert trial.used_bytes and trial.allocated_bytes and trial.memory
        used = trial.used_bytes
        if not self.on_gpu:
            used = trial.allocated_bytes - trial.memory["workspaces"]
        whole = sum(trial.memory[kind] for kind in SHARDED)
        return used - whole + whole // self.shards

    def moved_bytes(self, rows: int, accumulate: int) -> float:
        one, two = (self._trial(rows, n).bytes_accessed or 0.0 for n in (1, min(accumulate, 2)))
        return one + (accumulate - 1) * (two - one)

    def operations(self, rows: int) -> float:
        from tpukit.probe.gpu_memory.traced_step import trace_fake_step

        trials = self.trials
        how = {**trials.how, "as_cuda": False, "recomputes": False}
        # Of attention's forms this one consists of products that are counted.
        with sdpa_kernel(SDPBackend.MATH):
            return trace_fake_step(trials.task, trials.config, trials.target, rows, 1, **how).flops

    def _trial(self, rows: int, accumulate: int) -> Trial:
        return self.trials.run(TrialRequest(rows, accumulate))


def predict_costs(
    task: Task, config: TrainConfig, backend: Backend, examples: Examples
) -> TracedCosts:
    """Those of a run's steps on the backend's devices, as `PredictCosts` has it.

    Models keep something of a trace: ask in a process of its own.
    """
    from tpukit.probe.gpu_memory.traced_trial import TracedTrials

    here, memory = backend.describe(), backend.usage().memory
    room = memory.limit if memory and memory.limit else 0
    target = gpu_here(str(here["device"]), backend.world_size, max(room, GIB))
    trials = TracedTrials(
        for_probing(task),
        replace(config, precision=backend.precision, shard=False),
        # CUDA's context is there already, and not in the room.
        replace(target, memory_bytes=room, context_bytes=(0, 0)),
        expandable=EXPANDABLE in allocator_settings(EXPANDABLE),
        as_cuda=here["hardware"] != "cpu",
        recomputes=_recomputes(backend),
        examples=examples,
    )
    return TracedCosts(trials, here["hardware"] == "gpu", backend.devices if config.shard else 1)


def _recomputes(backend: Backend) -> bool:
    """Whether the backend recomputes activations where a model asks for it: a CPU need not."""
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * x  # keeps its input for the backward pass

    if not backend.compiles_everything:
        backend.recompute(count, torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    return calls != 1
