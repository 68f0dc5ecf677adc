"""Who answers whether a batch fits: the hardware that is here, or the TPU compiler."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from tpukit.errors import JobError, TpukitError, UsageError
from tpukit.hardware.launch.child import Child, ChildDiedError, Death
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import find_kind, rank_count
from tpukit.io.units import GIB
from tpukit.probe.batch.trial import MemoryByKind, StepCost, TaskSource, Trial, first_line
from tpukit.probe.compiler.compile import check_versions
from tpukit.probe.compiler.source_map import Place
from tpukit.probe.compiler.targets import Target
from tpukit.train.config import TrainConfig

COMPILER_ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    # Several processes may load libtpu at a time: none of them holds a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    # Operations remember the line they come from.
    "XLA_IR_DEBUG": "1",
    "XLA_HLO_DEBUG": "1",
    "USE_TORCH_XLA": "1",
}


CORES_FOR_TWO, MEMORY_FOR_TWO_BYTES = 2, 10 * GIB
"""A compilation keeps about one core busy, and takes 2 to 5 GiB."""


WORKER = ("-m", "tpukit.probe.batch.worker")
"""The command of a child that tries batches."""


@dataclass(frozen=True)
class Ask:
    """One question to an answerer."""

    rows: int
    """Samples a device and micro-step."""
    accumulate: int = 1
    effort: str = "fast"


class Answerer(Protocol):
    """Tries batches."""

    devices: int
    stretch: float
    """See `SearchSettings.stretch`."""
    parameters: int | None
    """The model's weights, known after the first trial."""
    target: Target | None
    versions: Mapping[str, str]

    def try_batches(self, asks: Sequence[Ask]) -> list[Trial]:
        """Whether each fits; several are tried at the same time where there is room for that.

        Raises:
            JobError: a trial failed for another reason than memory.
        """
        ...

    def __enter__(self) -> Answerer: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class ChildAnswerer:
    """What both kinds share: a child a trial (or for many), and what its end means."""

    stretch = 1.0
    target: Target | None = None
    versions: Mapping[str, str]

    def __init__(self, task: TaskSource, config: TrainConfig, seconds: float) -> None:
        self.task = task
        self.config = config
        self.seconds = seconds
        self.parameters: int | None = None
        self.devices = 1
        self.fitted = 0
        """The largest batch that fitted so far."""
        self._children: dict[int, Child] = {}

    def environment(self) -> dict[str, str]:
        raise NotImplementedError

    def question(self, ask: Ask) -> dict[str, Any]:
        """What the child is asked."""
        return {
            "task": dataclasses.asdict(self.task),
            "config": dataclasses.asdict(self.config),
            "rows": ask.rows,
            "accumulate": ask.accumulate,
        }

    def try_batches(self, asks: Sequence[Ask]) -> list[Trial]:
        return [trial for ask in asks for trial in self.try_together([ask])]

    def try_together(self, asks: Sequence[Ask]) -> list[Trial]:
        """Each ask in a child of its own, all at the same time."""
        started = time.monotonic()
        for place, ask in enumerate(asks):
            if place not in self._children:
                self._children[place] = Child(self.environment(), WORKER)
            self._children[place].send(self.question(ask))
        return [self._answer(place, ask, started) for place, ask in enumerate(asks)]

    def _answer(self, place: int, ask: Ask, started: float) -> Trial:
        try:
            answer = self._children[place].receive(started + self.seconds)
        except ChildDiedError as error:
            self._children.pop(place).close()
            trial = self._after_death(ask, error.death, time.monotonic() - started)
        else:
            if "error" in answer:
                raise _as_error(answer["error"], ask)
            self.parameters = self.parameters or answer["parameters"]
            self.devices = answer["devices"] or self.devices
            trial = read_trial(answer["trial"])
        if trial.fits:
            self.fitted = max(self.fitted, ask.rows)
        return trial

    def _after_death(self, ask: Ask, death: Death, seconds: float) -> Trial:
        """A batch that does not fit, if that is what the child died of."""
        hung_at_once = death.return_code is None and self.fitted == 0
        if hung_at_once or not death.is_out_of_memory(limited=self.config.memory_limit is not None):
            raise self._failure(ask, death)
        return Trial(
            batch=ask.rows,
            fits=False,
            limit_bytes=self.config.memory_limit,
            seconds=seconds,
            error=death.describe(),
            accumulate=ask.accumulate,
        )

    def _failure(self, ask: Ask, death: Death) -> JobError:
        place = crash_place(death.output)
        where = f" at {place.path}:{place.line}" if place else ""
        if death.return_code is None:
            return JobError(
                f"Batch {ask.rows}: no answer within {self.seconds:.0f} s{where}, and no smaller "
                "batch has fitted yet.",
                "Give it longer (--time-limit 30m), or start smaller (--start 1).",
                id="trial-timeout",
            )
        words = last_words(death.output)
        return JobError(
            f"Batch {ask.rows}: the trial's process {death.describe()}{where}."
            + (f" Its last words: {words}" if words else ""),
            "This is not a lack of memory. Operations that XLA runs on the CPU crash in a trace: "
            "write them with plain ones." if self.environment().get("XLA_IR_DEBUG") else
            "This is not a lack of memory: run the training command to see the whole error.",
            id="trial-crashed",
        )  # fmt: skip

    def close(self) -> None:
        while self._children:
            self._children.popitem()[1].close()

    def __enter__(self) -> Answerer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class MeasuredAnswerer(ChildAnswerer):
    """Trains a few steps here; each trial in a process of its own."""

    def __init__(self, task: TaskSource, config: TrainConfig, seconds: float) -> None:
        super().__init__(task, config, seconds)
        names = {field.name for field in dataclasses.fields(HardwareOptions)}
        values = {n: v for n, v in dataclasses.asdict(config).items() if n in names}
        self.hardware = HardwareOptions(**values)
        self.kind = find_kind(self.hardware)
        self.processes = rank_count(self.hardware, self.kind)
        self.devices = self.processes
        self.versions = {}

    def environment(self) -> dict[str, str]:
        return {}

    def question(self, ask: Ask) -> dict[str, Any]:
        return {
            **super().question(ask),
            "kind": "measure",
            "hardware": dataclasses.asdict(self.hardware),
            "processes": self.processes,
        }

    def try_together(self, asks: Sequence[Ask]) -> list[Trial]:
        try:
            return super().try_together(asks)
        finally:
            # What ran out of memory once is poisoned, and what did not leaves fragments.
            self.close()


class CompiledAnswerer(ChildAnswerer):
    """Asks the TPU compiler; one process answers until it dies."""

    stretch = 1.33
    """The compiler recomputes near the limit; GPT-2 fitted a third more than a line foretold."""

    def __init__(
        self, task: TaskSource, config: TrainConfig, target: Target, seconds: float
    ) -> None:
        self.versions = check_versions()
        super().__init__(task, config, seconds)
        self.target = target
        self.devices = target.devices

    def try_batches(self, asks: Sequence[Ask]) -> list[Trial]:
        if not can_compile_two():
            return super().try_batches(asks)
        trials = self.try_together(asks)
        # The memory of those that helped is given back.
        for place in [place for place in self._children if place > 0]:
            self._children.pop(place).close()
        return trials

    def environment(self) -> dict[str, str]:
        return {**COMPILER_ENVIRONMENT, "CPU_NUM_DEVICES": str(self.devices)}

    def question(self, ask: Ask) -> dict[str, Any]:
        assert self.target is not None
        return {
            **super().question(ask),
            "kind": "compile",
            "target": self.target.name,
            "effort": ask.effort,
        }


def can_compile_two() -> bool:
    """Whether this machine has the cores and the memory for two compilations at a time."""
    import psutil

    enough_memory = psutil.virtual_memory().available >= MEMORY_FOR_TWO_BYTES
    return len(os.sched_getaffinity(0)) >= CORES_FOR_TWO and enough_memory


def read_trial(fields: Mapping[str, Any]) -> Trial:
    """A trial as the child sent it."""
    memory, cost = fields["memory"], fields["cost"]
    return Trial(
        **{
            **fields,
            "memory": MemoryByKind(**memory) if memory else None,
            "cost": StepCost(**cost) if cost else None,
            "largest": tuple(fields["largest"]),
        }
    )


def _as_error(error: Mapping[str, Any], ask: Ask) -> TpukitError:
    """The child's error as this process' own."""
    if "exit_code" in error:
        kind = UsageError if error["exit_code"] == 2 else JobError
        return kind(error["message"], error["hint"], id=error["id"])
    if error["id"] == "LeftDeviceError":
        message = error["message"].removeprefix("LeftDeviceError: ")
        return JobError(
            f"An operation would leave the TPU in the middle of the step, at {message}.",
            "Keep it a tensor: read values (`.item()`, `float()`, `if tensor:`) after the step, "
            "and write operations that XLA lacks with plain ones.",
            id="leaves-device",
        )
    return JobError(
        f"The task failed at batch {ask.rows}, and not for lack of memory: {error['message']}",
        "Mend the task; --debug shows more of a training command's error.",
        id="task-failed",
    )


def crash_place(output: str) -> Place | None:
    """The model's line in the stack that Python writes when its process crashes."""
    _, found, stack = output.rpartition("Fatal Python error:")
    if not found:
        return None
    for line in stack.splitlines():
        parts = line.strip().split('"')
        if len(parts) == 3 and parts[0] == "File ":
            number = parts[2].split("line ")[-1].split(" ")[0]
            place = Place(parts[1], int(number) if number.isdigit() else 0)
            if place.is_the_models:
                return place
    return None


def last_words(output: str) -> str:
    """The last line that a process wrote before any stack."""
    before = output.partition("Fatal Python error:")[0]
    lines = [line.strip() for line in before.splitlines() if line.strip()]
    return first_line(lines[-1], 200) if lines else ""
