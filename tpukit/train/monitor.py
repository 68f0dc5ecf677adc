"""What a run reports of itself: progress, log rows, rates, stalls, compilations, warnings."""

import math
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch

from tpukit.hardware.backend import Backend, Batch
from tpukit.hardware.profiling import profile
from tpukit.io.progress import Progress
from tpukit.io.units import format_bytes, format_duration, three_digits
from tpukit.train.goodput import Goodput
from tpukit.train.learner import Learner, StepMetrics
from tpukit.train.plan import RunPlan
from tpukit.train.python_watch import PythonWatch
from tpukit.train.replicas import parted
from tpukit.train.run_log import RunLog

SHOWN_SECONDS = 3.0
"""Minimum time between two lines about the first step's micro-batches."""
SHOWN_WAITING = 0.05
"""Minimum part of the time spent on waiting for data that the progress line shows."""
HOST_BOUND = 0.8
"""Minimum part of the time in which the thread that trains computes, that the progress line calls
host-bound."""
SHOWN_NAMES = 3
"""Number of names in a warning of parameters."""
UNPROFILED_STEPS, PROFILED_STEPS = 3, 3
"""First steps, which compile and warm caches, and steps after them that `--profile` traces."""


class RunMonitor:
    """Times, counts and logs a run's steps; `log` is None on all ranks but 0."""

    def __init__(
        self, plan: RunPlan, learner: Learner, log: RunLog | None, goodput: Goodput
    ) -> None:
        self.plan = plan
        self.learner = learner
        self.backend = learner.backend
        self.log = log
        self.goodput = goodput
        self.last_loss = math.nan
        """Mean loss of the last log line."""
        self.watch = CompilationWatch(self.backend)
        self.clock = StepClock(plan.split.global_batch_size)
        self.stalls = StallWatch(self.backend.rank, self._report_stall)
        self._first_step = learner.steps_done
        self._trace = ExitStack()
        self.progress = Progress(
            "step", plan.total_steps, done=learner.steps_done, enabled=log is not None
        )
        self._hook_failed = False
        self._parted: list[str] = []
        model = self.backend.unwrap(learner.model)
        self.python = PythonWatch(plan.task, model, learner.optimizer)
        self._last_scores: str | None = None
        """The line of the last validation, where it was not shown."""
        self._started = self._shown = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all steps: shows progress, watches for stalls."""
        self._shown = time.monotonic()
        with self.progress, self.stalls:
            self.restart()
            yield
        if self.log and self._last_scores:
            self.log.show(self._last_scores)

    def restart(self) -> None:
        """Begins to count anew, after a pause or the first step's compilation."""
        self._started = time.monotonic()
        self.clock.restart()
        self.stalls.resume()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around other work than training, which counts neither as a stall nor for the rate."""
        self.stalls.pause()
        yield
        self.restart()

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Around the next step: traced where it is one of the few that `--profile` records."""
        done = self.learner.steps_done - self._first_step
        if self.plan.config.profile and done == UNPROFILED_STEPS:
            self._trace.enter_context(profile(self.backend, self.plan.folder.path / "profile"))
        yield
        if done == UNPROFILED_STEPS + PROFILED_STEPS - 1:
            self._trace.close()

    # -- a step -----------------------------------------------------------------------------------
    def step_begins(self, batches: Sequence[Batch]) -> None:
        """Says what takes long: XLA compiles a graph for each new shape."""
        self.python.step_begins(self.learner.steps_done - self._first_step)
        if ("train", shapes_of(batches)) in self.watch.seen:
            return
        self.stalls.pause()
        if self.backend.compiles_everything:
            number = self.learner.steps_done + 1
            self.recurring(
                f"step {number}: compiling for a new batch shape (on a TPU this takes minutes)"
            )

    def passes_done(self, done: int, count: int) -> None:
        """Shows, of a long first step, how many of its micro-batches are done."""
        now = time.monotonic()
        if now - self._shown > SHOWN_SECONDS:
            self._shown = now
            self.recurring(
                f"step {self.learner.steps_done + 1}: forward pass {done} of {count}"
                f" micro-batch(es) after {format_duration(now - self._started)}"
            )

    def step_done(self, batches: Sequence[Batch]) -> None:
        """Counts a step and what it compiled."""
        self.clock.step()
        self.stalls.step()
        if (moving := self.python.step_done()) and self.log:
            self.log.text(moving)
        unexpected = self.watch.done("train", shapes_of(batches))
        if unexpected and self.log:
            text = f"step {self.learner.steps_done}: {unexpected} unexpected compilation(s)"
            self.log.note(text)
            self.log.event("warning", text=text)

    def first_step_done(self) -> None:
        """Its duration, what it says of the run's, what left the device in it, and what it did not
        train. Raises UsageError for an optimizer whose state no checkpoint can hold, and for
        parameters that it does not know."""
        self.learner.optimizer_state.values()
        self.learner.require_known_parameters()
        if not self._compiles:
            self._wait_for_device()
        seconds = time.monotonic() - self._started
        # The first step compiles: it says nothing about the rate.
        self.restart()
        if (left := ", ".join(self.backend.usage().fallbacks)) and self.log:
            self.log.text(
                f"Warning: {left} left the device in the first step, and each step will wait for"
                " it: `tpukit probe-batch --target v5e-8` names the line and what to write instead."
            )
        self.compare_ranks()
        if (names := self.learner.untrained()) and self.log:
            self.log.text(
                f"Warning: {len(names)} parameter(s) got a gradient and are in no group of the"
                f" optimizer, they stay as they are: {_shown(names)}. Return them from"
                " `parameter_groups`, or set requires_grad to False."
            )
        if (names := self.learner.outside_of_model()) and self.log:
            self.log.text(
                f"Warning: {_shown(names)} got a gradient and is no part of the model: the engine"
                " neither trains nor saves it. Have `build_model` return a module that has it, or"
                " set requires_grad to False."
            )
        self.recurring(f"First step: {format_duration(seconds)}.")
        if self._compiles:
            self.progress.restart(self.learner.steps_done)

    def compare_ranks(self) -> None:
        """Warns, once, of parameters that the ranks hold other values of; every rank must call
        it."""
        if self._parted:
            return
        self._parted = parted(self.learner.optimizer_state.parameters, self.backend)
        if self._parted and self.log:
            self.log.text(
                f"Warning: ranks hold other values of {_shown(self._parted)}: the task writes there"
                " what it finds in its own rows (`max_norm`, statistics of a first batch, a step of"
                " an optimizer of its own); rank 0's are validated and saved. Write it in"
                " `initialize`, or in `after_step` from the rows of all ranks."
            )

    @property
    def _compiles(self) -> bool:
        """Whether a step may take longer than others, as its shape is new."""
        return self.backend.compiles or self.backend.compiles_everything

    def _wait_for_device(self) -> None:
        """A GPU's steps go on after the call that began them; a value that is read is behind."""
        self.backend.to_host({"now": torch.zeros((), device=self.backend.device)})

    def show(self, *, news: bool = False) -> None:
        """Updates the progress line."""
        self.progress.update(self.learner.steps_done, self.facts, news=news)

    # -- log lines --------------------------------------------------------------------------------
    def log_metrics(self, metrics: StepMetrics, rate: float) -> None:
        """A line of the metrics since the last one; `rate`: the last step's learning rate."""
        step_seconds = self.clock.stop()
        self.watch.done("read")
        self.last_loss = metrics.means["loss"]
        memory = self.backend.usage().memory
        row = {
            "kind": "train",
            "step": self.learner.steps_done,
            **metrics.means,
            "lr": rate,
            "gradient_norm": metrics.gradient_norm,
            "largest_gradient_norm": metrics.largest_gradient_norm,
            "skipped_steps": metrics.skipped,
            "samples_per_second": self.clock.rate,
            "data_waiting": self.clock.waiting,
            **self.goodput.fields(step_seconds),
            "host_busy": self._host_busy(),
            "mfu": self._mfu(self.clock.rate),
            "compilations": self.backend.compilations(),
            **({"memory_used": memory.used, "memory_peak": memory.peak} if memory else {}),
        }
        if self.log:
            self._log_row(row)
            self.log.note(f"step {self.learner.steps_done}: {self.facts()}")
        self.show(news=True)

    def log_scores(self, scores: Mapping[str, float]) -> None:
        """A line of validation metrics."""
        if self.log:
            self._log_row({"kind": "valid", "step": self.learner.steps_done, **scores})
            text = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
            line = f"step {self.learner.steps_done}: {text}"
            self._last_scores = None if self.recurring(line) else line

    def _log_row(self, row: Mapping[str, Any]) -> None:
        assert self.log is not None
        self.log.metric_line(row)
        for warning in self.learner.sums.inputs.warnings():
            self.log.text(warning)
        try:
            self.plan.task.on_log(row)
        except Exception as error:
            if not self._hook_failed:
                name, kind = type(self.plan.task).__name__, type(error).__name__
                self.log.text(f"Warning: {name}.on_log failed: {kind}: {error}")
            self._hook_failed = True

    def recurring(self, text: str) -> bool:
        """A line of log.txt, which people see too while there are few of them: whether they do."""
        shown = self.log is not None and self.progress.admits()
        if self.log is not None:
            (self.log.text if shown else self.log.note)(text)
        return shown

    def facts(self) -> str:
        """Loss, rate, memory, device load and compilations in one line."""
        loss = self.last_loss
        parts = [f"loss {loss:.4g}" if math.isfinite(loss) else "loss -"]
        if self.clock.rate:
            parts.append(f"{three_digits(self.clock.rate)} samples/s")
        if self.clock.waiting >= SHOWN_WAITING:
            parts.append(f"waits for data {self.clock.waiting:.0%}")
        if (busy := self._host_busy()) is not None and busy >= HOST_BOUND:
            parts.append(f"host-bound {busy:.0%}")
        if mfu := self._mfu(self.clock.rate):
            parts.append(f"MFU {mfu:.1%}")
        usage = self.backend.usage()
        memory, load = usage.memory, usage.utilization_percent
        if memory:
            limit = f" of {format_bytes(memory.limit)}" if memory.limit else ""
            parts.append(f"{format_bytes(memory.peak)}{limit}")
        if load is not None:
            parts.append(f"device {load} %")
        if compilations := self.backend.compilations():
            parts.append(f"{compilations} compilations")
        return "  ".join(parts)

    def totals(self) -> dict[str, Any]:
        """The fields of a TrainingResult that are counted here."""
        return {
            "loss": self.last_loss if math.isfinite(self.last_loss) else None,
            "samples_per_second": self.clock.mean_rate(),
            "data_waiting": self.clock.mean_waiting(),
            "mfu": self._mfu(self.clock.mean_rate()),
            "compilations": self.backend.compilations(),
            "compilations_after_warmup": self.watch.after_warmup,
            "graphs": {kind: count for kind, count in self.watch.graphs.items() if count},
        }

    def _mfu(self, rate: float) -> float | None:
        """Part of the devices' peak operations a second that the model takes at this rate."""
        peak, operations = self.backend.usage().peak_flops, self.plan.operations_per_sample()
        return rate * operations / peak if peak and operations else None

    def _host_busy(self) -> float | None:
        """Part of the time in which the host computes; None where waiting for the devices takes
        processor time too."""
        return self.clock.busy if self.backend.usage().host_sleeps else None

    def _report_stall(self, line: str, stack: str) -> None:
        if self.log is None:
            print(f"{line}\n{stack}", file=sys.stderr, flush=True)
        else:
            self.log.text(line)
            self.log.note(stack)


def _shown(names: Sequence[str]) -> str:
    """The first of some names."""
    more = f" and {len(names) - SHOWN_NAMES} more" if names[SHOWN_NAMES:] else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


# -- compilations --------------------------------------------------------------------------------
class CompilationWatch:
    """Counts compilations after the warm-up, which should not happen.

    An activity (training on one set of shapes, evaluating, reading) may compile the first time
    it is seen; whatever it compiles later is counted as after the warm-up.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.seen: set[Any] = set()
        self.counted = backend.compilations()
        self.graphs: dict[str, int] = {"start": self.counted}
        """Compilations by kind of activity."""
        self.after_warmup = 0

    def done(self, kind: str, shapes: Any = None) -> int:
        """Counts the compilations since the last call; returns how many were unexpected."""
        now = self.backend.compilations()
        fresh, self.counted = now - self.counted, now
        if fresh:
            self.graphs[kind] = self.graphs.get(kind, 0) + fresh
        if (kind, shapes) not in self.seen:
            self.seen.add((kind, shapes))
            return 0
        self.after_warmup += fresh
        return fresh


def shapes_of(batches: Iterable[Batch]) -> tuple[Any, ...]:
    """What a compiled graph depends on."""
    return tuple(tuple(tensor.shape) for batch in batches for tensor in batch.values())


# -- time ----------------------------------------------------------------------------------------
SHORTEST_STALL_SECONDS = 120.0
"""Minimum time without a step that is reported."""
STALL_FACTOR = 10.0
"""Minimum time without a step that is reported, in median steps."""
STEPS_FOR_MEDIAN = 50
CHECK_SECONDS = 5.0
SHOWN_FRAMES = 4
"""Number of frames in the line for people; the log has them all."""


class StepClock:
    """Training time, without pauses and the first step's compilation."""

    def __init__(self, samples_per_step: int) -> None:
        self.samples_per_step = samples_per_step
        self.rate = 0.0
        """Samples per second of the last window."""
        self.waiting = 0.0
        """Part of the last window's time that the host waited for data."""
        self.busy = 0.0
        """Part of the last window's time in which this thread computed, other than data."""
        self._seconds = self._waited = 0.0
        self._steps = 0
        self.restart()

    def restart(self) -> None:
        """Begins a window, without what has not been counted yet."""
        self._window_started, self._window_computed = time.monotonic(), time.thread_time()
        self._window_steps = 0
        self._window_waited = 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        started, computed = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self._window_waited += time.monotonic() - started
            self._window_computed += time.thread_time() - computed

    def step(self) -> None:
        """Counts a step."""
        self._window_steps += 1

    def stop(self) -> float:
        """Counts the window, and returns its seconds; a new one begins with `restart`."""
        seconds = time.monotonic() - self._window_started
        if not self._window_steps or seconds <= 0:
            return 0.0
        self.rate = self._window_steps * self.samples_per_step / seconds
        self.waiting = self._window_waited / seconds
        self.busy = (time.thread_time() - self._window_computed) / seconds
        self._seconds += seconds
        self._waited += self._window_waited
        self._steps += self._window_steps
        return seconds

    def mean_rate(self) -> float:
        """Samples per second over all windows."""
        return self._steps * self.samples_per_step / self._seconds if self._seconds else 0.0

    def mean_waiting(self) -> float:
        """Part of all windows' time that the host waited for data."""
        return self._waited / self._seconds if self._seconds else 0.0


class StallWatch:
    """Reports, once, where the main thread is when no step has ended for long.

    report: takes a line for people and the whole stack. Use as a context manager in the thread
    that trains; `step` after each step, `pause` around other work.
    """

    def __init__(self, rank: int, report: Callable[[str, str], None]) -> None:
        self.rank = rank
        self.report = report
        self._thread_id = threading.get_ident()
        self._durations: deque[float] = deque(maxlen=STEPS_FOR_MEDIAN)
        self._since: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def step(self) -> None:
        """A step has ended; the next one begins."""
        now = time.monotonic()
        if self._since is not None:
            self._durations.append(now - self._since)
        self._since = now

    def pause(self) -> None:
        """What follows (validation, saving, a compilation) is not watched."""
        self._since = None

    def resume(self) -> None:
        """A step begins after a pause."""
        self._since = time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(min(CHECK_SECONDS, SHORTEST_STALL_SECONDS / 2)):
            since, durations = self._since, [*self._durations]
            if since is None or not durations:
                continue
            median = statistics.median(durations)
            seconds = time.monotonic() - since
            if seconds > max(SHORTEST_STALL_SECONDS, STALL_FACTOR * median):
                self._report(seconds, median)
                return

    def _report(self, seconds: float, median: float) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = traceback.extract_stack(frame)
        where = " < ".join(
            f"{f.name} ({f.filename}:{f.lineno})" for f in stack[: -SHOWN_FRAMES - 1 : -1]
        )
        self.report(
            f"Warning: no step for {format_duration(seconds)}, one takes {format_duration(median)}:"
            f" rank {self.rank} is in {where}. The run goes on waiting.",
            "".join(traceback.format_list(stack)),
        )
