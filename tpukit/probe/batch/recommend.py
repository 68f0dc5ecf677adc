"""The whole question: which batch fits, which one to use, and how to reach the batch wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tpukit.errors import OutOfMemoryError
from tpukit.io.units import GIB
from tpukit.probe.batch.evaluators import Answerer, Ask
from tpukit.probe.batch.search import Found, Reading, SearchSettings, search
from tpukit.probe.batch.trial import Trial
from tpukit.probe.compiler.roofline import StepEstimate, estimate_step
from tpukit.probe.compiler.targets import Target

CLOSE_IN_SPEED = {"measured": 0.03, "estimated": 0.25}
"""Batches whose speeds differ by less are equally fast: the larger one is taken. A roofline cannot
tell closer."""
WORTH_A_TRIAL = 0.75
"""If nothing tried within the margin is this large a part of the largest, one more is tried."""
FAR_WITHIN = 0.5
"""Where a line does not lead to a batch within the margin: this part of the largest."""
MOST_ACCUMULATIONS = 3
"""Numbers of micro-steps that are tried for a wanted global batch."""


@dataclass(frozen=True)
class FindSettings:
    """What is looked for."""

    start: int = 4
    maximum: int = 4096
    multiple: int = 1
    margin: float = 0.05
    """The part of the memory that a recommended batch leaves free."""
    wanted_global_batch: int | None = None


@dataclass(frozen=True)
class Finding:
    """The answer."""

    target: Target | None
    versions: Mapping[str, str]
    devices: int
    parameters: int | None
    largest: int
    next_failed: int | None
    """None: every batch up to the maximum fits."""
    recommended: int
    accumulate: int
    """Micro-steps that reach the wanted global batch with `recommended` samples a device."""
    trials: tuple[Trial, ...]
    seconds: float
    note: str | None = None

    def trial_of(self, batch: int, accumulate: int = 1) -> Trial | None:
        """The most thorough trial of a batch."""
        found = [t for t in self.trials if t.batch == batch and t.accumulate == accumulate]
        return max(found, key=lambda t: (t.effort == "full", t.memory is not None), default=None)

    @property
    def recommended_trial(self) -> Trial | None:
        """The trial behind the recommendation."""
        return self.trial_of(self.recommended, self.accumulate) or self.trial_of(self.recommended)

    @property
    def recommended_global_batch(self) -> int:
        return self.recommended * self.devices * self.accumulate

    @property
    def compiles(self) -> int:
        return sum(trial.compiles for trial in self.trials)


class Finder:
    """Asks an answerer, and keeps what it said."""

    def __init__(self, answerer: Answerer, tell: Callable[[str], None]) -> None:
        self.answerer = answerer
        self.tell = tell
        self.trials: list[Trial] = []

    def find(self, settings: FindSettings) -> Finding:
        """The answer to the whole question.

        Raises:
            OutOfMemoryError: not even the smallest batch fits.
            JobError: a trial failed for another reason.
        """
        started = time.monotonic()
        found = self._search(settings)
        if found.largest == 0:
            raise self._nothing_fits(settings)
        recommended, note = self._recommend(found, settings)
        accumulate = 1
        if settings.wanted_global_batch is not None:
            recommended, accumulate, note = self._reach(
                settings.wanted_global_batch, recommended, found, settings
            )
        return Finding(
            target=self.answerer.target,
            versions=self.answerer.versions,
            devices=self.answerer.devices,
            parameters=self.answerer.parameters,
            largest=found.largest,
            next_failed=found.next_failed,
            recommended=recommended,
            accumulate=accumulate,
            trials=tuple(self.trials),
            seconds=time.monotonic() - started,
            note=note,
        )

    # -- the largest ---------------------------------------------------------------------------
    def _search(self, settings: FindSettings) -> Found:
        sought = SearchSettings(
            settings.start, settings.maximum, settings.multiple, self.answerer.stretch
        )
        if self.answerer.target is None:
            return search(lambda batch, why: self._ask(Ask(batch), why), sought)
        draft = self._draft(sought)
        if draft == 0:
            return Found(0, settings.multiple, ())
        self._confirm_both_sides(draft, draft + settings.multiple, settings.maximum)
        confirmed = SearchSettings(draft, settings.maximum, settings.multiple)
        return search(self._confirm, confirmed)

    def _draft(self, sought: SearchSettings) -> int:
        """The largest batch by the compiler's fast setting; 0 if none fits."""
        top = sought.maximum // sought.multiple * sought.multiple
        if sought.start >= top and self._confirm(top, "the only batch, at full effort").fits:
            return top
        return search(lambda batch, why: self._ask(Ask(batch), why), sought, settle=True).largest

    def _confirm_both_sides(self, largest: int, following: int, maximum: int) -> None:
        """The draft's answer and the next batch at the compiler's full effort, side by side."""
        batches = [b for b in (largest, following) if b <= maximum and self._confirmed(b) is None]
        if batches:
            asks = [Ask(batch, effort="full") for batch in batches]
            self.trials_of(asks, "the answer and the next one, at the compiler's full effort")

    def _confirmed(self, batch: int) -> Trial | None:
        """A batch's trial at full effort, if there was one."""
        return next((t for t in self.trials if t.batch == batch and t.effort == "full"), None)

    def _confirm(self, batch: int, why: str) -> Reading:
        """A batch at the compiler's full effort."""
        known = self._confirmed(batch)
        return _reading(known) if known else self._ask(Ask(batch, effort="full"), why)

    def _ask(self, ask: Ask, why: str) -> Reading:
        return _reading(self.trial(ask, why))

    def trial(self, ask: Ask, why: str) -> Trial:
        """Tries a batch, and says so."""
        return self.trials_of([ask], why)[0]

    def trials_of(self, asks: Sequence[Ask], why: str) -> list[Trial]:
        """Tries batches, and says so."""
        rows = " and ".join(str(ask.rows) for ask in asks)
        steps = f" x {asks[0].accumulate} micro-steps" if asks[0].accumulate > 1 else ""
        self.tell(f"Batch {rows}{steps} ({why}) ...")
        trials = self.answerer.try_batches(asks)
        self.trials += trials
        for trial in trials:
            self.tell(f"  {f'{trial.batch}: ' * (len(trials) > 1)}{describe(trial)}")
        return trials

    # -- the one to use ------------------------------------------------------------------------
    def _recommend(self, found: Found, settings: FindSettings) -> tuple[int, str | None]:
        """The fastest batch that leaves the margin free; near ties go to the larger one."""
        candidates = self._within_margin(found.largest, settings)
        for guess in (self._guess_within_margin, self._guess_far_within):
            most = max(candidates, default=0)
            batch = guess(found.largest, settings)
            if most < WORTH_A_TRIAL * found.largest and batch is not None and batch > most:
                self.trial(Ask(batch), f"leaves {settings.margin:.0%} of the memory free")
                candidates = self._within_margin(found.largest, settings)
            if candidates:
                return self._fastest(candidates), None
        return found.largest, f"No batch that was tried leaves {settings.margin:.0%} of it free."

    def _fastest(self, candidates: Sequence[int]) -> int:
        speeds = {batch: self._speed(batch) for batch in candidates}
        close = CLOSE_IN_SPEED["estimated" if self.answerer.target else "measured"]
        best = max(speeds.values())
        return max(b for b, speed in speeds.items() if speed >= best * (1 - close))

    def _guess_far_within(self, largest: int, settings: FindSettings) -> int | None:
        """Far under the largest, for memory that hardly grows where it is nearly full."""
        guess = int(FAR_WITHIN * largest) // settings.multiple * settings.multiple
        return guess or None

    def _within_margin(self, largest: int, settings: FindSettings) -> list[int]:
        fits: dict[int, bool] = {}
        for trial in self.trials:
            if trial.accumulate == 1 and trial.batch <= largest:
                within = trial.fits and leaves_margin(trial, settings.margin)
                fits[trial.batch] = fits.get(trial.batch, True) and within
        return [batch for batch, within in fits.items() if within]

    def _guess_within_margin(self, largest: int, settings: FindSettings) -> int | None:
        """A batch just within the margin by a line between what was tried; a round number."""
        tried = {t.batch: t for t in self.trials if t.fits and t.used_bytes and t.batch <= largest}
        above = tried.get(largest)
        if above is None or not above.limit_bytes:
            return None
        room = above.limit_bytes * (1 - settings.margin)
        below = [t for t in tried.values() if t.batch < largest and (t.used_bytes or 0) <= room]
        low, used = (
            max((t.batch, t.used_bytes or 0) for t in below)
            if below
            else (0, above.fixed_bytes or 0)
        )
        if not used < room < (above.used_bytes or 0):
            return None
        share = (room - used) / ((above.used_bytes or 0) - used)
        unit = settings.multiple
        while unit * 16 <= largest and unit < 8:
            unit *= 2
        guess = int(low + share * (largest - low)) // unit * unit
        return guess if 0 < guess < largest and guess not in tried else None

    def _speed(self, batch: int) -> float:
        """Samples a second: measured, or estimated; 0 where neither is known."""
        trials = [t for t in self.trials if t.batch == batch and t.fits and t.accumulate == 1]
        measured = [t.samples_per_second for t in trials if t.samples_per_second]
        if measured:
            return max(measured)
        estimates = [e for t in trials if (e := estimate(self.answerer.target, t))]
        return max((batch / e.seconds for e in estimates), default=0.0)

    # -- the one wanted ------------------------------------------------------------------------
    def _reach(
        self, wanted: int, recommended: int, found: Found, settings: FindSettings
    ) -> tuple[int, int, str | None]:
        """Samples a device and micro-steps that make the wanted batch, checked by a trial."""
        devices = self.answerer.devices
        if wanted % devices:
            near = max(devices, round(wanted / devices) * devices)
            return recommended, 1, (
                f"A global batch of {wanted} does not divide over {devices} devices; {near} does."
            )  # fmt: skip
        per_device = wanted // devices
        splits = [n for n in range(1, per_device + 1)
                  if per_device % n == 0 and per_device // n <= max(recommended, 1)]  # fmt: skip
        for accumulate in splits[:MOST_ACCUMULATIONS]:
            rows = per_device // accumulate
            known = [t for t in self.trials if t.batch == rows and t.accumulate == accumulate]
            trial = known[-1] if known else self.trial(
                Ask(rows, accumulate), f"reaches the global batch of {wanted}"
            )  # fmt: skip
            if trial.fits and leaves_margin(trial, settings.margin):
                return rows, accumulate, None
        return recommended, 1, f"No accumulation that was tried reaches {wanted} within the margin."

    def _nothing_fits(self, settings: FindSettings) -> OutOfMemoryError:
        least = min(self.trials, key=lambda t: t.batch)
        needs = ""
        if least.used_bytes and least.limit_bytes:
            needs = f": it wants {least.used_bytes / GIB:.2f} of {least.limit_bytes / GIB:.2f} GiB"
        elif least.error:
            needs = f": {least.error}"
        return OutOfMemoryError(
            f"Not even {settings.multiple} sample{'s' * (settings.multiple > 1)} a device fits"
            f"{needs}.",
            "Shard the weights over more devices (--shard), use a smaller or leaner model, or a "
            "device with more memory.",
            id="nothing-fits",
        )


def _reading(trial: Trial) -> Reading:
    return Reading(trial.fits, trial.used_bytes, trial.limit_bytes, trial.fixed_bytes)


def leaves_margin(trial: Trial, margin: float) -> bool:
    """Whether a trial's memory leaves this part of the limit free; unknown memory counts as so."""
    if trial.used_bytes is None or not trial.limit_bytes:
        return True
    return trial.used_bytes <= trial.limit_bytes * (1 - margin)


def estimate(target: Target | None, trial: Trial) -> StepEstimate | None:
    """The roofline of a compiled trial's step."""
    if target is None or trial.cost is None:
        return None
    cost = trial.cost
    return estimate_step(target, cost.flops, cost.bytes_accessed, trial.collective_bytes)


def describe(trial: Trial) -> str:
    """A trial's outcome in one line."""
    parts = ["fits" if trial.fits else "does not fit"]
    if trial.used_bytes:
        limit = f" of {trial.limit_bytes / GIB:.2f}" if trial.limit_bytes else ""
        parts.append(f"{trial.used_bytes / GIB:.2f}{limit} GiB")
    if trial.samples_per_second:
        parts.append(f"{trial.samples_per_second:.3g} samples/s")
    if not trial.fits and trial.error and not trial.used_bytes:
        parts.append(trial.error)
    parts.append("known already" if trial.cached else f"{trial.seconds:.0f} s")
    return ", ".join(parts)
