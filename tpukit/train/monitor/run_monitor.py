"""What a run reports of itself: progress, log rows, rates, stalls, compilations, warnings."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tpukit.hardware.backend import Batch
from tpukit.io.progress import Progress
from tpukit.io.units import format_bytes, format_duration
from tpukit.train.learner import Learner, StepMetrics
from tpukit.train.monitor.compilation_watch import CompilationWatch, shapes_of
from tpukit.train.monitor.non_finite import non_finite_loss
from tpukit.train.monitor.profiled_steps import ProfiledSteps
from tpukit.train.monitor.step_clock import StallWatch, StepClock
from tpukit.train.plan import RunPlan
from tpukit.train.storage.run_log import RunLog

SHOWN_SECONDS = 3.0
"""Minimum time between two lines about the first step's micro-batches."""
SHOWN_WAITING = 0.05
"""Minimum part of the time spent on waiting for data that the progress line shows."""
SHORT_RUN_SECONDS = 60.0
"""Estimated duration up to which none is logged."""
LONG_RUN_SECONDS = 12 * 3600.0
"""Estimated duration from which on a shorter run is suggested."""
LARGE_GRADIENT = 1e3
SMALL_GRADIENT = 1e-7


class RunMonitor:
    """Times, counts and logs a run's steps; `log` is None on all ranks but 0."""

    def __init__(self, plan: RunPlan, learner: Learner, log: RunLog | None) -> None:
        self.plan = plan
        self.learner = learner
        self.backend = learner.backend
        self.log = log
        self.last_loss = math.nan
        """Mean loss of the last log line."""
        self.watch = CompilationWatch(self.backend)
        self.clock = StepClock(plan.split.global_batch_size)
        self.stalls = StallWatch(self.backend.rank, self._report_stall)
        traces = plan.folder.path / "profile" if plan.config.profile else None
        self._profile = ProfiledSteps(self.backend, traces, learner.steps_done)
        self.progress = Progress(
            "step", plan.total_steps, done=learner.steps_done, enabled=log is not None
        )
        self._hook_failed = False
        self._started = self._shown = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all steps: shows progress, watches for stalls."""
        self._started = self._shown = time.monotonic()
        with self.progress, self.stalls:
            self.restart()
            yield

    def restart(self) -> None:
        """Begins to count anew, after a pause or the first step's compilation."""
        self.clock.restart()
        self.stalls.resume()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around other work than training, which counts neither as a stall nor for the rate."""
        self.stalls.pause()
        yield
        self.restart()

    def profiled(self) -> AbstractContextManager[None]:
        """Around the next step: traced where it is one of the few that `--profile` records."""
        return self._profile.step(self.learner.steps_done)

    # -- a step ------------------------------------------------------------------------------------
    def step_begins(self, batches: Sequence[Batch]) -> None:
        """Says what takes long: XLA compiles a graph for each new shape."""
        if self.watch.has_seen("train", shapes_of(batches)):
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
        unexpected = self.watch.done("train", shapes_of(batches))
        if unexpected and self.log:
            self.log.note(f"step {self.learner.steps_done}: {unexpected} unexpected compilation(s)")

    def first_step_done(self) -> None:
        """Its duration, what it says of the run's, and what left the device in it."""
        # The first step compiles: it says nothing about the rate.
        self.restart()
        if (left := ", ".join(self.backend.usage().fallbacks)) and self.log:
            self.log.text(
                f"Warning: {left} left the device in the first step, and each step will wait for"
                " it: `tpukit probe-batch --target v5e-8` names the line and what to write instead."
            )
        seconds = time.monotonic() - self._started
        self.recurring(f"First step: {format_duration(seconds)}.")
        steps = self.plan.total_steps - self.learner.steps_done
        left_seconds = steps * seconds
        compiled = self.backend.compiles or self.backend.compiles_everything
        if compiled or left_seconds < SHORT_RUN_SECONDS:
            return
        text = f"At this rate the other {steps} steps take {format_duration(left_seconds)}."
        if left_seconds > LONG_RUN_SECONDS and "quick" in self.plan.task.presets:
            text += " --preset quick is made for this."
        self.recurring(text)

    def show(self, *, news: bool = False) -> None:
        """Updates the progress line."""
        self.progress.update(self.learner.steps_done, self.facts, news=news)

    # -- log lines ---------------------------------------------------------------------------------
    def log_metrics(self, metrics: StepMetrics, rate: float) -> None:
        """A line of the metrics since the last one; `rate`: the last step's learning rate."""
        self.clock.stop()
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
            self.recurring(f"step {self.learner.steps_done}: {text}")

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

    def recurring(self, text: str) -> None:
        """A line of log.txt, which people see too while there are few of them."""
        if self.log is not None:
            (self.log.text if self.progress.admits() else self.log.note)(text)

    def require_finite(self, first_bad_step: int | None) -> None:
        """Raises NonFiniteLossError where the loss of a step was not finite."""
        if first_bad_step is not None:
            raise non_finite_loss(self.plan, first_bad_step)

    def facts(self) -> str:
        """Loss, rate, memory, device load and compilations in one line."""
        loss = self.last_loss
        parts = [f"loss {loss:.4g}" if math.isfinite(loss) else "loss -"]
        if self.clock.rate:
            parts.append(f"{self.clock.rate:.3g} samples/s")
        if self.clock.waiting >= SHOWN_WAITING:
            parts.append(f"waits for data {self.clock.waiting:.0%}")
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
        peak, operations = self.backend.usage().peak_flops, self.plan.operations_per_sample
        return rate * operations / peak if peak and operations else None

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
