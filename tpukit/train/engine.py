"""The one training engine: steps, and what happens once in a while between them."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from tpukit.hardware.backend import Batch
from tpukit.io.interrupts import StopRequest
from tpukit.train.checkpoint_writer import BackgroundWriter
from tpukit.train.evaluation import validation_scores
from tpukit.train.learner import BadStep
from tpukit.train.monitor import RunMonitor
from tpukit.train.non_finite import non_finite_step
from tpukit.train.requests import TrainingResult
from tpukit.train.run_state import RunState

LONG_STEP_SECONDS = 10.0
"""Duration of a step from which on the next one can be dropped, after half of that."""
SHORT_STEP_SECONDS = 1.0
"""Duration of a step below which ranks read a request to stop after the step that follows it, and
of the forward passes between two questions of a long one."""


class Engine:
    """Takes a run from its present state on."""

    def __init__(
        self, state: RunState, stop: StopRequest, monitor: RunMonitor, writer: BackgroundWriter
    ) -> None:
        self.state = state
        self.plan = state.plan
        self.learner = state.learner
        self.backend = self.learner.backend
        self.stop = stop
        self.monitor = monitor
        self.writer = writer
        self.source = self.plan.step_batches(
            self.backend, state.step, see=self.learner.sums.inputs.see, position=state.stream
        )
        self._stepped = False
        self._own_seconds = 0.0
        self._step_seconds = math.inf
        """The same of the slowest rank, as all of them know it."""
        self._asked: Callable[[], list[float]] | None = None
        """What waits for the answer to the last step's question whether to stop."""
        self._saved_step = state.resumed_from or 0
        self.stopped_by: int | None = None
        """The signal that stopped the run, if one did."""
        self.stopped_early = False
        """Whether `early_stopping` ended the run."""

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return self.state.step

    # -- the loop ---------------------------------------------------------------------------------
    def run(self) -> TrainingResult:
        """Trains from the present step to the last, or until it is stopped."""
        total, first_step = self.plan.total_steps, self.step
        steps = self.source.read()
        with self.plan.validation_workers() as self._validating, self.monitor.running():
            self.stop.raises = False
            while self.step < total:
                with self.monitor.profiled():
                    batches = self.next_batches(steps)
                    if batches is None:
                        break
                    self.monitor.step_begins(batches)
                    if not self.train_step(batches):
                        break
                if self.step == first_step + 1:
                    self.monitor.first_step_done()
                    if self.state.is_in_shards:
                        self.writer.prepare(self.state.make_room())

                # once in a while: read the metrics and log them
                if self.plan.logs_after(self.step):
                    self.report()

                # once in a while: validate and save
                if self.plan.saves_after(self.step, total):
                    scores = self.validate()
                    self.save(is_best=self._is_best(scores))
                    self.plan.best.require_among(scores)
                    if self.plan.stops_early(self.state.since_best):
                        self.stopped_early = True
                        break

                self.writer.check()

                # a signal or the clock, the same decision in every rank
                if self._stops():
                    break
                self.monitor.show()
            steps.close()
            if self._asked is not None:
                self._asked()
            self._validate_at_time_limit()
        return self.end()

    def next_batches(self, steps: Iterator[list[Batch]]) -> list[Batch] | None:
        """The batches of the next step; None where a signal ended the wait for them.

        Several ranks wait to the end: each would leave the loop at a step of its own.
        """
        with self.monitor.clock.waiting_for_data():
            if self.backend.world_size > 1:
                return next(steps)
            try:
                with self.stop.at_once():
                    return next(steps)
            except KeyboardInterrupt:
                if self.stop.signal_number is None or not self._stepped:
                    raise
                return None

    def train_step(self, batches: list[Batch]) -> bool:
        """One optimizer step at the rate its number has; False where a request to stop dropped
        it."""
        started = time.monotonic()
        interrupt = self._interrupt(len(batches), started)
        with self.plan.errors_of_step(self.step + 1):
            if not self.learner.train_step(batches, self.plan.rate(self.step), interrupt):
                return False
        self._own_seconds = time.monotonic() - started
        self._stepped = True
        self.source.step_done()
        self.monitor.step_done(batches)
        return True

    def _stops(self) -> bool:
        """Whether any rank is to stop; all ranks then know how long the slowest one's step took.

        Several ranks with short steps read the answer a step later: none waits for another.
        """
        asked, before = self.backend.agree((self.stop.is_set, self._own_seconds)), self._asked
        is_late = self.backend.world_size > 1 and self._step_seconds < SHORT_STEP_SECONDS
        self._asked = asked if is_late else None
        answers = [wait() for wait in (before, None if is_late else asked) if wait is not None]
        if answers:
            self._step_seconds = answers[-1][1]
        return any(is_set for is_set, _ in answers)

    def _interrupt(self, count: int, started: float) -> Callable[[int], bool] | None:
        """What a step of `count` micro-batches asks after each forward pass: whether to drop it.

        None for steps that are short, or that the device makes while the host is ahead. The same
        in every rank.
        """
        is_first = not self._stepped
        is_long = self._step_seconds > LONG_STEP_SECONDS
        if self.backend.compiles_everything or not (is_first or is_long):
            return None

        asks_at = 1

        def interrupt(done: int) -> bool:
            nonlocal asks_at
            if is_first:
                self.monitor.passes_done(done, count)
            if done < asks_at:
                return False
            seconds = time.monotonic() - started
            wanted = self.stop.is_set and seconds > LONG_STEP_SECONDS / 2
            is_wanted, seconds = self.backend.agree((wanted, seconds))()
            asks_at = done + 1
            if self.backend.world_size > 1:
                asks_at += int(SHORT_STEP_SECONDS * done / max(seconds, 1e-6))
            return bool(is_wanted)

        return interrupt

    # -- once in a while --------------------------------------------------------------------------
    def report(self) -> None:
        """Reads the metrics (the one stop of the pipeline), logs them, checks loss and gradient."""
        with self.monitor.pause():
            metrics = self.learner.read_metrics()
            self.monitor.log_metrics(metrics, self.plan.rate(self.step - 1))
            self.require_finite(metrics.bad)

    def require_finite(self, bad: BadStep | None) -> None:
        """Raises NonFiniteLossError for the first step whose loss or gradient was not finite."""
        if bad is not None:
            self.writer.wait()  # the checkpoint that the error names
            raise non_finite_step(self.plan, self.learner, bad, self._saved_step)

    def validate(self) -> dict[str, float]:
        """Metrics on every validation sample, with the EMA weights where they are kept."""
        if not self.plan.datasets.validation_sets():
            return {}
        with self.monitor.pause():
            self.require_finite(self.learner.bad_step())
            with self.learner.evaluation_weights():
                scores = validation_scores(
                    self.plan, self.learner, self.monitor.watch, self._validating
                )
            self.monitor.log_scores(scores)
        return scores

    def _validate_at_time_limit(self) -> None:
        """Validates the state that a time limit ended training in, once it is saved."""
        is_over = self.stopped_early or self.step >= self.plan.total_steps
        signalled = any(self.backend.all_gather_objects(self.stop.signal_number is not None))
        saved = self.plan.saves_after(self.step, 0) or self.step == 0
        if is_over or signalled or saved or not self.plan.datasets.validation_sets():
            return
        self.save(is_best=False)
        try:
            with self.stop.at_once() if self.backend.world_size == 1 else nullcontext():
                scores = self.validate()
        except KeyboardInterrupt:
            if self.stop.signal_number is None:
                raise
            return
        since_best = self.state.since_best
        if self._is_best(scores):
            with self.stop.saving():
                self.writer.record_best(self.step, self.state.best)
        # A validation that an uninterrupted run would not make ends no run early.
        self.state.since_best = min(self.state.since_best, since_best)

    def save(self, *, is_best: bool) -> None:
        """A checkpoint of this step; none is written after a loss or gradient that was not
        finite."""
        with self.monitor.pause():
            self.require_finite(self.learner.bad_step())
            self.learner.require_known_parameters()
            self.monitor.compare_ranks()
            with self.stop.saving():
                self.state.stream = self.source.saved_position()
                self.writer.write(self.state, is_best=is_best)
                self.monitor.watch.done("save")
            self._saved_step = self.step

    def _is_best(self, scores: dict[str, float]) -> bool:
        metric = self.plan.best
        state = self.state
        state.since_best = 0 if metric.improves(scores, state.best) else state.since_best + 1
        if not metric.is_best(scores, state.best):
            return False
        state.best = {metric.key: scores[metric.name], "step": float(self.step)}
        return True

    def end(self) -> TrainingResult:
        """Saves what is not saved yet; the result of the run. No signal breaks it off."""
        finished = self.stopped_early or self.step >= self.plan.total_steps
        if not finished and self.step != self._saved_step:
            self.save(is_best=False)
        self.stop.is_saving = True
        self.writer.wait()
        numbers = self.backend.all_gather_objects(self.stop.signal_number)
        if not finished:
            self.stopped_by = next((n for n in numbers if n is not None), None)
        return TrainingResult(
            steps=self.step,
            best=self.state.best,
            run=self.plan.folder.shown,
            resumed_from=self.state.resumed_from,
            finished=finished,
            stopped_early=self.stopped_early,
            **self.monitor.totals(),
        )
