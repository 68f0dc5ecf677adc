"""What a run reports of itself: progress, log rows, warnings."""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tpukit.hardware.backend import Batch
from tpukit.hardware.profiling import profile
from tpukit.io.progress import Progress
from tpukit.io.units import format_bytes, format_duration, three_digits
from tpukit.train.clocks import CompilationWatch, Goodput, StallWatch, StepClock, shapes_of
from tpukit.train.learner import Learner, StepMetrics
from tpukit.train.module_state import listed
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
UNPROFILED_STEPS, PROFILED_STEPS = 3, 3
"""First steps, which compile and warm caches, and steps after them that `--profile` traces."""
LARGE_GRADIENT = 1e3
SMALL_GRADIENT = 1e-7


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
                f" optimizer, they stay as they are: {listed(names)}. Return them from"
                " `parameter_groups`, or set requires_grad to False."
            )
        if (names := self.learner.outside_of_model()) and self.log:
            self.log.text(
                f"Warning: {listed(names)} got a gradient and is no part of the model: the engine"
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
                f"Warning: ranks hold other values of {listed(self._parted)}: the task writes there"
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
            for warning in _gradient_warnings(metrics):
                self.recurring(warning)
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


def _gradient_warnings(metrics: StepMetrics) -> Iterator[str]:
    largest, smallest = metrics.largest_gradient_norm, metrics.smallest_gradient_norm
    if largest > LARGE_GRADIENT:
        yield f"Warning: gradient norm {largest:.3g} is large: lower --lr?"
    if smallest < SMALL_GRADIENT:
        yield f"Warning: gradient norm {smallest:.3g} is tiny: does the model learn?"
