"""The one training engine: steps, and what happens once in a while between them."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpukit.errors import JobError, UsageError
from tpukit.hardware.backend import Batch
from tpukit.hardware.memory import is_out_of_memory
from tpukit.io.interrupts import StopRequest
from tpukit.io.progress import Progress
from tpukit.io.units import format_bytes, format_duration
from tpukit.train.learner import Learner, StepMetrics
from tpukit.train.loader import PlannedMicroBatches, make_loader
from tpukit.train.monitor.best import stops_early
from tpukit.train.monitor.compilation_watch import CompilationWatch, shapes_of
from tpukit.train.monitor.non_finite import non_finite_loss
from tpukit.train.monitor.profiled_steps import ProfiledSteps
from tpukit.train.monitor.step_clock import StallWatch, StepClock
from tpukit.train.monitor.validation import validation_scores
from tpukit.train.plan import RunPlan
from tpukit.train.requests import TrainingResult
from tpukit.train.schedule import is_due
from tpukit.train.storage.checkpoint import BackgroundWriter, Snapshot, TrainState
from tpukit.train.storage.run_log import RunLog

LONG_STEP_SECONDS = 10.0
"""Duration of a step from which on the next one can be dropped, after half of that."""
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


class StepBatches(NamedTuple):
    """What an optimizer step is computed from."""

    batches: list[Batch]
    stream: bytes | None
    """Position of a training stream after the step."""


@dataclass
class RunState:
    """What changes from step to step, apart from tensors."""

    step: int = 0
    best: dict[str, float] = field(default_factory=dict)
    last_loss: float = float("nan")
    scores: dict[str, float] = field(default_factory=dict)
    resumed_from: int | None = None
    """The step of the checkpoint that the run started from."""
    stopped_by: int | None = None
    """The signal that stopped the run, if one did."""
    since_best: int = 0
    """Validations since the best one."""
    stopped_early: bool = False
    """Whether `early_stopping` ended the run."""
    stream: bytes | None = None
    """Position of a training stream after this step, as a checkpoint keeps it."""


class Engine:
    """Runs a plan with a learner; `log` and `writer` are None on all ranks but 0."""

    def __init__(
        self,
        plan: RunPlan,
        learner: Learner,
        state: RunState,
        stop: StopRequest,
        log: RunLog | None,
        writer: BackgroundWriter | None,
    ) -> None:
        self.plan = plan
        self.config = plan.config
        self.learner = learner
        self.backend = learner.backend
        self.state = state
        self.stop = stop
        self.log = log
        self.writer = writer
        self.watch = CompilationWatch(self.backend)
        self.clock = StepClock(plan.split.global_batch_size)
        self.stalls = StallWatch(self.backend.rank, self._report_stall)
        self._stepped = False
        self._step_seconds = 0.0
        self._saved_step = state.resumed_from or 0
        self._hook_failed = False

    # -- the loop --------------------------------------------------------------------------------
    def run(self) -> TrainingResult:
        """Trains from the present step to the last, or until it is stopped."""
        total, first_step = self.plan.total_steps, self.state.step
        traces = self.plan.folder.path / "profile" if self.config.profile else None
        profile = ProfiledSteps(self.backend, traces, first_step)
        steps = self.training_batches(self.state.step, total)
        started = time.monotonic()
        with (
            Progress("step", total, done=first_step, enabled=self.log is not None) as progress,
            self.stalls,
        ):
            self._restart_clock()
            self.stop.raises = False
            while self.state.step < total:
                with profile.step(self.state.step):
                    batches = self.next_batches(steps)
                    if batches is None:
                        break
                    self._announce_compilation(batches, progress)
                    if not self.train_step(batches, progress):
                        break
                done = self.state.step
                if done == first_step + 1:
                    # The first step compiles: it says nothing about the rate.
                    self._restart_clock()
                    self._warn_about_fallbacks()
                    self._recurring(f"First step: {_seconds_since(started)}.", progress)
                    self._estimate_end(time.monotonic() - started, progress)

                # once in a while: read the metrics and log them
                if is_due(done, self.config.log_every, total):
                    self.report(progress)

                # once in a while: validate and save
                if self.plan.saves_after(done, total):
                    self.validate(progress)
                    self.save(is_best=self._is_best())
                    self._require_best_metric()
                    if stops_early(self.config.early_stopping, self.state.since_best):
                        self.state.stopped_early = True
                        break

                # a signal or the clock, the same decision in every rank
                if any(self.backend.all_gather_objects(self.stop.is_set)):
                    break
                progress.update(done, self.facts)
            steps.close()
            self._validate_at_time_limit(progress)
        return self.end()

    def next_batches(self, steps: Iterator[StepBatches]) -> StepBatches | None:
        """The batches of the next step; None where a signal ended the wait for them.

        Several ranks wait to the end: each would leave the loop at a step of its own.
        """
        with self.clock.waiting_for_data():
            if self.backend.world_size > 1:
                return next(steps)
            return self._next_at_once(steps)

    def _next_at_once(self, steps: Iterator[StepBatches]) -> StepBatches | None:
        try:
            with self.stop.at_once():
                return next(steps)
        except KeyboardInterrupt:
            if self.stop.signal_number is None or not self._stepped:
                raise
            return None

    def train_step(self, step: StepBatches, progress: Progress) -> bool:
        """One optimizer step at the rate its number has; False where a request to stop dropped
        it."""
        started = time.monotonic()
        try:
            interrupt = self._interrupt(len(step.batches), progress)
            if not self.learner.train_step(step.batches, self.rate(self.state.step), interrupt):
                return False
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, JobError):
                error.add_note(f"in step {self.state.step + 1}")
            raise
        self._step_seconds = time.monotonic() - started
        self.state.step += 1
        self.state.stream = step.stream
        self._stepped = True
        self.clock.step()
        self.stalls.step()
        unexpected = self.watch.done("train", shapes_of(step.batches))
        if unexpected and self.log:
            self.log.note(f"step {self.state.step}: {unexpected} unexpected compilation(s)")
        return True

    def _interrupt(self, count: int, progress: Progress) -> Callable[[int], bool] | None:
        """What a step of `count` micro-batches asks after each forward pass: whether to drop it.

        None for steps that are short, or that the device makes while the host is ahead. The same
        in every rank.
        """
        is_first = not self._stepped
        several_ranks = self.backend.world_size > 1
        is_long = count > 1 if several_ranks else self._step_seconds > LONG_STEP_SECONDS
        if self.backend.compiles_everything or not (is_first or is_long):
            return None
        started = shown = time.monotonic()

        def interrupt(done: int) -> bool:
            nonlocal shown
            now = time.monotonic()
            if is_first and now - shown > SHOWN_SECONDS:
                shown = now
                self._recurring(
                    f"step {self.state.step + 1}: forward pass {done} of {count} micro-batch(es)"
                    f" after {format_duration(now - started)}", progress,
                )  # fmt: skip
            wanted = self.stop.is_set and now - started > LONG_STEP_SECONDS / 2
            return any(self.backend.all_gather_objects(wanted))

        return interrupt

    def _estimate_end(self, step_seconds: float, progress: Progress) -> None:
        """How long the run will take, where its first step compiled nothing."""
        left = self.plan.total_steps - self.state.step
        seconds = left * step_seconds
        if self.backend.compiles or self.backend.compiles_everything or seconds < SHORT_RUN_SECONDS:
            return
        text = f"At this rate the other {left} steps take {format_duration(seconds)}."
        if seconds > LONG_RUN_SECONDS and "quick" in self.plan.task.presets:
            text += " --preset quick is made for this."
        self._recurring(text, progress)

    def rate(self, step: int) -> float:
        """The learning rate of a step, as the task has it."""
        rate = float(self.plan.task.learning_rate(step, self.plan.total_steps, self.config))
        if not 0 <= rate < math.inf:
            raise UsageError(
                f"{type(self.plan.task).__name__}.learning_rate gave {rate} for step {step}.",
                "Return a finite number that is not negative.",
            )
        return rate

    def training_batches(self, start: int, stop: int) -> Generator[StepBatches, None, None]:
        """The device batches of each step from `start` on, grouped by step."""
        sampler = PlannedMicroBatches(
            self.plan.batches, start, stop, self.backend.rank, self.backend.world_size
        )
        loader = make_loader(
            self.plan.task, self.plan.datasets.train, sampler, self.plan.loading,
            self.learner.sums.inputs.see,
        )  # fmt: skip
        batches = self.backend.batches(loader)
        for batch in batches:
            step = sampler.read.popleft()
            micro_batches = [batch, *itertools.islice(batches, step.micro_batches - 1)]
            yield StepBatches(micro_batches, step.stream)

    # -- once in a while ---------------------------------------------------------------------------
    def report(self, progress: Progress) -> None:
        """Reads the metrics (the one stop of the pipeline), logs them, checks the loss."""
        self.stalls.pause()
        metrics = self.learner.read_metrics()
        self.clock.stop()
        self.watch.done("read")
        self.state.last_loss = metrics.means["loss"]
        row = {
            "kind": "train",
            "step": self.state.step,
            **metrics.means,
            "lr": self.rate(self.state.step - 1),
            "gradient_norm": metrics.gradient_norm,
            "largest_gradient_norm": metrics.largest_gradient_norm,
            "skipped_steps": metrics.skipped,
            "samples_per_second": self.clock.rate,
            "data_waiting": self.clock.waiting,
            "mfu": self._mfu(self.clock.rate),
            "compilations": self.backend.compilations(),
            **self._memory_row(),
        }
        if self.log:
            self._log_row(row)
            self.log.note(f"step {self.state.step}: {self.facts()}")
            for warning in _gradient_warnings(metrics):
                self._recurring(warning, progress)
        progress.update(self.state.step, self.facts, news=True)
        self._require_finite(metrics.first_bad_step)
        self._restart_clock()

    def validate(self, progress: Progress) -> None:
        """Metrics on every validation sample, with the EMA weights where they are kept."""
        if not self.plan.datasets.validation_sets():
            return
        self.stalls.pause()
        self._require_finite(self.learner.first_bad_step())
        ema = self.learner.ema
        with ema.in_place_of_weights() if ema else nullcontext():
            self.state.scores = validation_scores(self.plan, self.learner, self.watch)
        if self.log:
            self._log_row({"kind": "valid", "step": self.state.step, **self.state.scores})
            text = ", ".join(f"{name} {value:.4g}" for name, value in self.state.scores.items())
            self._recurring(f"step {self.state.step}: {text}", progress)
        self._restart_clock()

    def _validate_at_time_limit(self, progress: Progress) -> None:
        """Validates the state that a time limit ended training in, once it is saved."""
        is_over = self.state.stopped_early or self.state.step >= self.plan.total_steps
        signalled = any(self.backend.all_gather_objects(self.stop.signal_number is not None))
        saved = self.plan.saves_after(self.state.step, 0) or self.state.step == 0
        if is_over or signalled or saved or not self.plan.datasets.validation_sets():
            return
        self.save(is_best=False)
        try:
            with self.stop.at_once() if self.backend.world_size == 1 else nullcontext():
                self.validate(progress)
        except KeyboardInterrupt:
            if self.stop.signal_number is None:
                raise
            return
        since_best = self.state.since_best
        if self._is_best():
            self.save(is_best=True)
        # A validation that an uninterrupted run would not make ends no run early.
        self.state.since_best = min(self.state.since_best, since_best)

    def save(self, *, is_best: bool) -> None:
        """A checkpoint of this step; none is written once the loss was not finite."""
        self.stalls.pause()
        self._require_finite(self.learner.first_bad_step())
        with self.stop.saving():
            snapshot = self.snapshot()
            self.watch.done("save")
            if self.writer is not None:
                self.writer.write(snapshot, is_best=is_best)
        self._saved_step = self.state.step
        self._restart_clock()

    def snapshot(self) -> Snapshot:
        """The whole state after this step, copied to the host. Every rank must call it."""
        learner, backend = self.learner, self.backend
        tensors = {
            "model": backend.to_host(learner.model_tensors()),
            "optimizer": backend.to_host(learner.optimizer_state.tensors()),
        }
        if learner.ema:
            tensors["ema"] = backend.to_host(learner.ema.weights)
        states = backend.all_gather_objects(backend.state())
        state = TrainState(
            step=self.state.step,
            task=self.plan.task.name,
            identity=self.plan.identity,
            random=[state["random"] for state in states],
            scaler=states[0]["scaler"],
            optimizer=learner.optimizer_state.values(),
            best=self.state.best,
            since_best=self.state.since_best,
            window=backend.to_host({"window": learner.window})["window"].tolist(),
        )
        return Snapshot(state, tensors, self.plan.datasets.artifacts, self.state.stream)

    def _is_best(self) -> bool:
        metric, scores = self.plan.best, self.state.scores
        if not metric.improves(scores, self.state.best):
            self.state.since_best += 1
            return False
        self.state.best = {metric.key: scores[metric.name], "step": float(self.state.step)}
        self.state.since_best = 0
        return True

    def _require_best_metric(self) -> None:
        if self.state.scores and self.plan.best.name not in self.state.scores:
            raise UsageError(
                f"best_metric {self.plan.best.name!r} is not among the validation metrics:"
                f" {', '.join(self.state.scores)}.",
                "Name one of these with --set best_metric=NAME (max:NAME where more is better).",
            )

    def end(self) -> TrainingResult:
        """Saves what is not saved yet; the result of the run. No signal breaks it off."""
        finished = self.state.stopped_early or self.state.step >= self.plan.total_steps
        if not finished and self.state.step != self._saved_step:
            self.save(is_best=False)
        self.stop.is_saving = True
        if self.writer is not None:
            self.writer.wait()
        numbers = self.backend.all_gather_objects(self.stop.signal_number)
        if not finished:
            self.state.stopped_by = next((n for n in numbers if n is not None), None)
        loss = self.state.last_loss
        return TrainingResult(
            steps=self.state.step,
            loss=loss if math.isfinite(loss) else None,
            best=self.state.best,
            run=str(self.plan.folder.path),
            samples_per_second=self.clock.mean_rate(),
            data_waiting=self.clock.mean_waiting(),
            mfu=self._mfu(self.clock.mean_rate()),
            compilations=self.backend.compilations(),
            compilations_after_warmup=self.watch.after_warmup,
            graphs={kind: count for kind, count in self.watch.graphs.items() if count},
            resumed_from=self.state.resumed_from,
            finished=finished,
            stopped_early=self.state.stopped_early,
        )

    # -- reporting ---------------------------------------------------------------------------------
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

    def facts(self) -> str:
        """Loss, rate, memory, device load and compilations in one line."""
        loss = self.state.last_loss
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

    def _mfu(self, rate: float) -> float | None:
        """Part of the devices' peak operations a second that the model takes at this rate."""
        peak, operations = self.backend.usage().peak_flops, self.plan.operations_per_sample
        return rate * operations / peak if peak and operations else None

    def _memory_row(self) -> dict[str, int]:
        memory = self.backend.usage().memory
        return {"memory_used": memory.used, "memory_peak": memory.peak} if memory else {}

    def _warn_about_fallbacks(self) -> None:
        left = ", ".join(self.backend.usage().fallbacks)
        if left and self.log:
            self.log.text(
                f"Warning: {left} left the device in the first step, and each step will wait for"
                " it: `tpukit probe-batch --target v5e-8` names the line and what to write instead."
            )

    def _announce_compilation(self, step: StepBatches, progress: Progress) -> None:
        """Says what takes long: XLA compiles a graph for each new shape."""
        shapes = shapes_of(step.batches)
        if self.watch.has_seen("train", shapes):
            return
        self.stalls.pause()
        if self.backend.compiles_everything:
            number = self.state.step + 1
            text = f"step {number}: compiling for a new batch shape (on a TPU this takes minutes)"
            self._recurring(text, progress)

    def _recurring(self, text: str, progress: Progress) -> None:
        """A line of log.txt, which people see too while there are few of them."""
        if self.log is not None:
            (self.log.text if progress.admits() else self.log.note)(text)

    def _require_finite(self, first_bad_step: int | None) -> None:
        if first_bad_step is not None:
            raise non_finite_loss(self.plan, first_bad_step)

    def _restart_clock(self) -> None:
        """After the first step's compilation, and after pauses."""
        self.clock.restart()
        self.stalls.resume()

    def _report_stall(self, line: str, stack: str) -> None:
        if self.log is None:
            print(f"{line}\n{stack}", file=sys.stderr, flush=True)
        else:
            self.log.text(line)
            self.log.note(stack)


def _seconds_since(started: float) -> str:
    return format_duration(time.monotonic() - started)


def _gradient_warnings(metrics: StepMetrics) -> Iterator[str]:
    largest, smallest = metrics.largest_gradient_norm, metrics.smallest_gradient_norm
    if largest > LARGE_GRADIENT:
        yield f"Warning: gradient norm {largest:.3g} is large: lower --lr?"
    if smallest < SMALL_GRADIENT:
        yield f"Warning: gradient norm {smallest:.3g} is tiny: does the model learn?"
