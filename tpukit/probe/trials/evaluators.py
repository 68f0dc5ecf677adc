"""Evaluators run trials: on the hardware of this machine, or with the TPU compiler."""

import dataclasses
import importlib.metadata
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from tpukit.errors import JobError, TpukitError
from tpukit.hardware.detect import EMULATED_KERNELS
from tpukit.hardware.launch.child import Child, ChildDiedError, Death
from tpukit.hardware.launch.holders import BUSY, PAUSES
from tpukit.hardware.launch.memory_watch import end_before_memory_does
from tpukit.hardware.options import choose_precision
from tpukit.hardware.select import computes_on_cpu, find_kind, rank_count
from tpukit.io.code_owner import is_model_code
from tpukit.io.units import format_duration
from tpukit.probe.compiler.client import find_client
from tpukit.probe.compiler.source_map import SourceLine
from tpukit.probe.targets import GpuTarget, Target
from tpukit.probe.trial import (
    COMPILER_MEMORY,
    TaskSource,
    Trial,
    TrialRequest,
    TrialSetup,
    compiler_failure,
)
from tpukit.probe.trials.worker import MODULE, read_result
from tpukit.train.config import TrainConfig

COMPILER_ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "JAX_PLATFORMS": "cpu",
    "TORCH_WARM_POOL": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    # Several processes may load libtpu at a time: none of them holds a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    # Operations remember the line they come from.
    "XLA_IR_DEBUG": "1",
    "XLA_HLO_DEBUG": "1",
    "USE_TORCH_XLA": "1",
    # The kernels that are compiled are a TPU's.
    EMULATED_KERNELS: "0",
}
TRACING_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "0"}
EAGER_SECONDS, COMPILED_SECONDS = 600.0, 1800.0
"""Default time limits of a trial; the first one on a device compiles all of a run's programs."""
NO_MEMORY_HERE = "Error: out of memory: "
"""Text at the end of the log of a process that `tpukit.hardware.launch.memory_watch` ends."""
CRASH = "Fatal Python error:"
COMPILING = "/compiler/compile.py"
STACK_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
TRACE_CRASH_HINT = (
    "This is not a lack of memory. Operations that XLA runs on the CPU crash in a trace: write "
    "them with operations that XLA has."
)
CRASH_HINT = "This is not a lack of memory: run the training command to see the whole error."


class ChildEvaluator(AbstractContextManager["ChildEvaluator"]):
    """Runs trials in a child process, and classifies its death."""

    target: Target | GpuTarget | None = None
    on_cpu = by_speed = False
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    crash_hint = CRASH_HINT
    _end = staticmethod(Child.close)
    """Ends a child."""

    def __init__(self, setup: TrialSetup, devices: int, seconds: float) -> None:
        self.setup = setup
        self.devices = devices
        self.seconds = seconds
        """Time limit of a trial."""
        self.fitted = 0
        """The largest batch that fitted so far."""
        self._child: Child | None = None

    def evaluate(self, request: TrialRequest) -> Trial:
        """Runs a trial; its child runs the next one unless it died."""
        started = time.monotonic()
        child = self._child = self._child or self._start_child()
        child.send(dataclasses.asdict(dataclasses.replace(request, fitted=self.fitted)))
        try:
            result = child.receive(started + self.seconds)
        except ChildDiedError as error:
            self.close()
            return self._after_death(request, error.death, time.monotonic() - started)
        trial = read_result(result)
        self.devices = trial.devices or self.devices
        if trial.fits:
            self.fitted = max(self.fitted, request.batch)
        return trial

    def _start_child(self) -> Child:
        child = Child(self.environment, ("-m", MODULE))
        child.send(dataclasses.asdict(self.setup))
        return child

    def _after_death(self, request: TrialRequest, death: Death, seconds: float) -> Trial:
        """The trial of a child that died for lack of memory or ran out of time; raises else."""
        if not self._shows_size(death):
            raise self._failure(request, death)
        return Trial(
            batch=request.batch,
            fits=False,
            limit_bytes=self.setup.config.memory_limit,
            seconds=seconds,
            error=self._cause(death),
            slow=death.return_code is None,
            accumulate=request.accumulate,
        )

    def _cause(self, death: Death) -> str:
        if death.return_code is None:
            where = crash_place(death.output)
            return f"no result within {format_duration(self.seconds)}{where} (--time-limit)"
        # What was ended here, at its time limit, has no code.
        if death.return_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return "killed by the system for lack of memory (SIGKILL)"
        _, ended, words = death.output.partition(NO_MEMORY_HERE)
        return f"out of memory: {words.partition(',')[0]}" if ended else death.describe()

    def _shows_size(self, death: Death) -> bool:
        """Whether a child died because its batch does not fit, or takes too long."""
        if self.target is not None:
            # A compiler or a trace says what does not fit; a kill is about this machine's memory.
            return death.return_code is None
        return death.is_out_of_memory(limited=self.setup.config.memory_limit is not None)

    def _failure(self, request: TrialRequest, death: Death) -> JobError:
        message = Death(None, death.output.partition(CRASH)[0]).last_line
        return JobError(
            f"batch {request.batch}: the trial's process {death.describe()}"
            f"{crash_place(death.output)}." + (f" Its last message: {message}" if message else ""),
            self.crash_hint,
            id="trial-crashed",
        )

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._end(self._child)
            self._child = None

    def __exit__(self, *_: object) -> None:
        self.close()


class MeasuredEvaluator(ChildEvaluator):
    """Trains a few steps on this machine, each trial in a process of its own.

    Where trials do not compute on the CPU, the next process imports its libraries meanwhile.
    """

    def __init__(self, task: TaskSource, config: TrainConfig, seconds: float | None) -> None:
        kind = find_kind(config)
        world_size = rank_count(config, kind)
        compiles = kind != "cpu" or config.compile
        default = COMPILED_SECONDS if compiles else EAGER_SECONDS
        setup = TrialSetup(task, config, world_size=world_size)
        super().__init__(setup, world_size, seconds or default)
        self.on_cpu = computes_on_cpu(kind)
        # A limit stands for a device whose memory is the question.
        self.by_speed = self.on_cpu and config.memory_limit is None
        self.environment = {}
        self.versions = {}
        self._next: Child | None = None
        if kind != "cpu":
            # A process that is killed may keep the device, or its memory, for a while.
            self._end = Child.finish

    def evaluate(self, request: TrialRequest) -> Trial:
        """The trial; retries while an earlier process still holds the TPU."""
        for pause in PAUSES:
            try:
                return self._evaluate_once(request)
            except TpukitError as error:
                if not BUSY.search(error.message):
                    raise
            time.sleep(pause)
        return self._evaluate_once(request)

    def _evaluate_once(self, request: TrialRequest) -> Trial:
        try:
            return super().evaluate(request)
        finally:
            super().close()

    def _start_child(self) -> Child:
        child, self._next = self._next, None
        if child is None or child.has_ended:
            child = super()._start_child()
        if not self.on_cpu:
            self._next = super()._start_child()
        return child

    def close(self) -> None:
        super().close()
        if self._next is not None:
            self._next.close()  # it has opened nothing


class CompilerEvaluator(ChildEvaluator):
    """Compiles the training step for a TPU; one process runs all trials until it dies."""

    crash_hint = TRACE_CRASH_HINT

    def __init__(
        self,
        task: TaskSource,
        config: TrainConfig,
        target: Target,
        seconds: float | None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        client = find_client(log)
        self.versions = client.versions
        setup = TrialSetup(task, config, target.name)
        super().__init__(setup, target.devices, seconds or COMPILED_SECONDS)
        self.target = target
        devices = {"CPU_NUM_DEVICES": str(target.devices)}
        self.environment = {**COMPILER_ENVIRONMENT, **client.environment, **devices}

    def _start_child(self) -> Child:
        child = super()._start_child()
        threading.Thread(target=end_before_memory_does, args=(child,), daemon=True).start()
        return child

    def evaluate(self, request: TrialRequest) -> Trial:
        trial = super().evaluate(request)
        if trial.unread:
            # The memory of what was read of the text comes back with the end of its process.
            self.close()
        return trial

    def _failure(self, request: TrialRequest, death: Death) -> JobError:
        process = f"batch {request.batch}: the TPU compiler's process"
        _, ended, words = death.output.partition(NO_MEMORY_HERE)
        if ended:
            return JobError(
                f"{process} ended at {request.effort} effort for lack of memory on this machine: "
                + words.splitlines()[0],
                "Close other programs, try smaller batches only (--max), or use another machine.",
                id=COMPILER_MEMORY,
            )
        # A trace runs C++ that checks, too: the stack says which of the two it was.
        if death.failed_check and COMPILING in death.output.partition(CRASH)[2]:
            return compiler_failure(request.batch, death.failed_check)
        if death.return_code not in (-signal.SIGKILL, -signal.SIGTERM):
            return super()._failure(request, death)
        return JobError(
            f"{process} was {death.describe()}.",
            "This machine may have run out of memory (see `dmesg`): close other programs and run "
            "the same command again; what was compiled is kept.",
            id="compiler-killed",
        )


class TracedEvaluator(ChildEvaluator):
    """Traces the training step over fake tensors for a GPU that is not here."""

    def __init__(
        self,
        task: TaskSource,
        config: TrainConfig,
        target: GpuTarget,
        seconds: float | None,
    ) -> None:
        setup = TrialSetup(task, config, target.name)
        super().__init__(setup, target.devices, seconds or EAGER_SECONDS)
        precision = choose_precision(config.precision, "gpu", native_bf16=target.capability >= 8.0)
        self.target = target.at(precision)
        self.versions = {"torch": importlib.metadata.version("torch")}
        self.environment = TRACING_ENVIRONMENT


def predicting_evaluator(
    task: TaskSource,
    config: TrainConfig,
    target: Target | GpuTarget,
    seconds: float | None,
    log: Callable[[str], None] | None = None,
) -> CompilerEvaluator | TracedEvaluator:
    """The TPU compiler for a TPU, a trace for a GPU."""
    if isinstance(target, GpuTarget):
        return TracedEvaluator(task, config, target, seconds)
    return CompilerEvaluator(task, config, target, seconds, log)


def crash_place(output: str) -> str:
    """` at PATH:LINE`: the model's line in the stack that a crashing Python process writes."""
    frames = STACK_FRAME.finditer(output.partition(CRASH)[2])
    lines = (SourceLine(frame[1], int(frame[2])) for frame in frames)
    return next((f" at {line.path}:{line.line}" for line in lines if is_model_code(line.path)), "")
