"""Records the programs of a training step on torch_tpu without executing them, nor a TPU.

The engine's own step is recorded as in a run; each tensor that outlives it is a placeholder.
"""

import functools
import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tpukit.errors import JobError
from tpukit.hardware.collectives import Collectives
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import Gather
from tpukit.hardware.eager.distributed import SingleProcess
from tpukit.hardware.eager.grad_scaling import PlainUpdate
from tpukit.hardware.eager.programs import RecordedPrograms, why_several
from tpukit.hardware.eager.recorder import Recorder, graphs, living, recording_mode
from tpukit.hardware.eager.torch_tpu import TpuDevice, load_torch_tpu
from tpukit.hardware.options import Precision
from tpukit.hardware.step_programs import NotOneProgramError, StepCall
from tpukit.probe.compiler.absent_tpu import AbsentTpu
from tpukit.probe.compiler.compile import Program, TracedStep
from tpukit.probe.compiler.kernel_shares import KernelShares, mean_share
from tpukit.probe.unfilled_model import unfilled_model
from tpukit.train.config import TrainConfig
from tpukit.train.learner import Learner, build_learner
from tpukit.train.loader import example_batches
from tpukit.train.task import PlanSettings, Task


class PlaceholderRecorder(Recorder):
    """Takes placeholders, which have no value, as what a step finds."""

    def __init__(self, device: torch.device, placeholders: Mapping[int, Tensor]) -> None:
        super().__init__(device)
        self.placeholders = placeholders

    def is_from_before(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.placeholders


class TracingPrograms(RecordedPrograms):
    """Steps that are recorded on placeholders and kept, not executed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, print)
        self.placeholders: dict[int, Tensor] = {}
        """By the number of their storage, which they keep in use."""
        self.kinds: dict[int, str] = {}
        self.kernel_shares: list[float] = []
        self.recorded_programs: list[Program] = []

    def placeholder(self, like: Tensor, kind: str = "other") -> Tensor:
        """A tensor of this shape and dtype on the device, without memory."""
        made: Tensor = graphs().placeholder(list(like.shape), like.dtype, False)
        number = made.untyped_storage()._cdata
        self.placeholders[number], self.kinds[number] = made, kind
        return made

    def new_recorder(self) -> Recorder:
        return PlaceholderRecorder(self.device, self.placeholders)

    def inputs(self, step: StepCall) -> list[Tensor]:
        return [*step.given, self.placeholder(torch.tensor(step.numbers, device="meta"))]

    def run(self, step: StepCall) -> Any:
        try:
            found = self.recorded(step, self.inputs(step))
        except (NotOneProgramError, RuntimeError) as error:
            raise JobError(
                f"{why_several(error)}.",
                "The compiler's answer is of a step that is one program: write this operation"
                " otherwise, or measure the batch on a TPU.",
                id="leaves-device",
            ) from error
        kept, changed = found.recorder.kept, found.recorder.changed
        places = {id(each): place for place, each in enumerate(kept)}
        arguments = {each.before.untyped_storage()._cdata for each in kept}
        resident: Counter[str] = Counter()
        elsewhere = 0
        for number, tensor in self.placeholders.items():
            size = tensor.numel() * tensor.element_size()
            resident[self.kinds[number]] += size
            elsewhere += 0 if number in arguments else size
        program = Program(
            bytecode=graphs().serialize_mlir_portable_artifact(found.module),
            aliases={places[id(each)]: output for output, each in enumerate(changed)},
            argument_shardings=(None,) * len(found.arguments),
            outputs=len(found.results),
            kernel_share=mean_share(self.kernel_shares),
            resident=dict(resident),
            resident_elsewhere=elsewhere,
        )
        self.recorded_programs.append(program)
        return True


class TracingDevice(TpuDevice):
    """A TPU that is not there."""

    def __init__(self, absent: AbsentTpu, name: str) -> None:
        self.absent = absent
        self._name = name
        super().__init__()
        self.programs = self._programs = TracingPrograms(self.device)

    def _is_memory_counted(self) -> bool:
        return False

    def name(self) -> str:
        return self._name

    def _move(self, tensor: Tensor) -> Tensor:
        return self.programs.placeholder(tensor)

    def run(self, step: StepCall, gather: Gather) -> Any:
        return self.programs.run(step)

    def surface_errors(self, results: Sequence[Tensor]) -> None:
        pass


class RecordingBackend(KernelShares, EagerBackend):
    """torch_tpu's backend, as a run of one device has it."""

    eager: TracingDevice


def open_tracing(
    precision: Precision, *, shard: bool, fused: bool, topology: str
) -> RecordingBackend:
    """A backend on one device of a topology, none of which is here."""
    absent = _opened(topology)
    with absent.shown():
        device = TracingDevice(absent, topology)
    device.set_arithmetic(precision, deterministic=False)
    backend = RecordingBackend(
        "tpu", device, precision, Collectives(), SingleProcess(device.place), PlainUpdate(),
        compiles=True, fused=fused,
    )  # fmt: skip
    backend.kernel_shares = device.programs.kernel_shares
    return backend


@functools.cache
def _opened(topology: str) -> AbsentTpu:
    """The device that torch_tpu has opened, once a process."""
    absent = AbsentTpu(topology)
    hardware: Any = importlib.import_module("torch_tpu._internal.utils.hardware")
    hardware.get_tpu_device_count = lambda: 1
    with absent.shown():
        load_torch_tpu()
        # It sends the generator's first state to the device.
        _ = torch.get_device_module("tpu").default_generators[0]
    return absent


def trace_step(
    task: Task, config: TrainConfig, backend: RecordingBackend, rows: int, accumulate: int
) -> TracedStep:
    """The program of one step of micro-batches of `rows` samples, and of an evaluation.

    Raises:
        JobError: the step is not one program.
    """
    programs = backend.eager.programs
    with backend.eager.absent.shown(), recording_mode():
        torch.manual_seed(0)
        learner = build_learner(task, backend, unfilled_model(task, backend), config)
        settings = PlanSettings(rows * accumulate, rows, 1, seed=0, compiles=True)
        host = example_batches(task, settings)[0]
        _replace(learner, programs)
        batches = [
            {name: programs.placeholder(tensor, "batch") for name, tensor in host.items()}
            for _ in range(accumulate)
        ]
        learner.train_step(batches, lr=config.lr)
        learner.model.eval()
        learner.sums.add(batches[0])
    training, evaluation = programs.recorded_programs
    count = sum(p.numel() for p in backend.unwrap(learner.model).parameters())
    return TracedStep((training,), evaluation, count)


def _replace(learner: Learner, programs: TracingPrograms) -> None:
    """Makes placeholders of all tensors of the device: they outlive the step."""
    programs.placeholders.clear()
    programs.kinds.clear()
    kinds = {
        "parameters": list(learner.model.parameters()),
        "optimizer": [v for s in learner.optimizer.state.values() for v in s.values()],
        "ema": list(learner.ema.weights.values()) if learner.ema else [],
    }
    of = {id(tensor): kind for kind, tensors in kinds.items() for tensor in tensors}
    made: dict[int, Tensor] = {}
    for tensor in sorted(living(programs.device), key=lambda tensor: id(tensor) not in of):
        number = tensor.untyped_storage()._cdata
        if number not in made:
            made[number] = programs.placeholder(tensor, of.get(id(tensor), "other"))
        tensor.data = made[number]
