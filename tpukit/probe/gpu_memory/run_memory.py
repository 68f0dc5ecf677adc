"""Memory that the steps of a run take on its device, by the trace that predicts a GPU's."""

from dataclasses import replace

import torch
from torch import Tensor

from tpukit.hardware.backend import Backend
from tpukit.hardware.select import EXPANDABLE, allocator_settings
from tpukit.io.units import GIB
from tpukit.probe.targets import gpu_here
from tpukit.probe.trial import TrialRequest
from tpukit.train.batch_size import Examples, StepMemory
from tpukit.train.config import TrainConfig
from tpukit.train.task import Task

SHARDED = ("parameters", "optimizer", "ema", "gradients")
"""What `--shard` splits over the devices."""


def predict_memory(
    task: Task, config: TrainConfig, backend: Backend, examples: Examples
) -> StepMemory:
    """The memory of a step on the backend's device; see `PredictMemory`.

    A GPU's includes its allocator and the libraries' workspaces, as `probe-batch --target` has it;
    of other devices it is the peak of live tensors. Call it where the models that a trace keeps may
    stay: in a process of its own.
    """
    from tpukit.probe.gpu_memory.traced_trial import TracedTrials

    here, memory = backend.describe(), backend.usage().memory
    on_gpu = here["hardware"] == "gpu"
    room = memory.limit if memory and memory.limit else 0
    # CUDA's context is there already, and not in that.
    target = gpu_here(str(here["device"]), backend.world_size, max(room, GIB))
    target = replace(target, memory_bytes=room, context_bytes=(0, 0))
    trials = TracedTrials(
        task.for_probing(),
        replace(config, precision=backend.precision, shard=False),
        target,
        expandable=EXPANDABLE in allocator_settings(EXPANDABLE),
        as_cuda=here["hardware"] != "cpu",
        recomputes=_recomputes(backend),
        examples=examples,
    )

    def needed(rows: int, accumulate: int) -> int:
        trial = trials.run(TrialRequest(rows, accumulate))
        used = trial.used_bytes if on_gpu else trial.allocated_bytes
        assert used is not None and trial.memory is not None
        whole = sum(trial.memory[kind] for kind in SHARDED)
        return used - (whole - whole // backend.devices if config.shard else 0)

    return needed


def _recomputes(backend: Backend) -> bool:
    """Whether the backend recomputes activations where a model asks for it: a CPU need not."""
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * 2

    if not backend.compiles_everything:
        backend.recompute(count, torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    return calls != 1
