"""The recommendation: the largest batch, the one to use, the accumulation for a global batch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from tpukit.errors import JobError, OutOfMemoryError, TpukitError
from tpukit.io.units import format_duration
from tpukit.probe.batch.search import (
    MOST,
    MOST_COMPILED,
    TOLERANCE,
    Bracket,
    Ending,
    SearchSettings,
    line_end,
    search,
)
from tpukit.probe.roofline import samples_per_second
from tpukit.probe.targets import GpuTarget, Target
from tpukit.probe.trial import COMPILER_MEMORY, Effort, Trial, TrialRequest

Log = Callable[[str], None]
CPU_TRIAL_SECONDS, CPU_SEARCH_SECONDS = 120.0, 900.0
"""Default bounds on a CPU: the longest trial that is started, and the time after which none is."""
CLOSE_IN_SPEED = {"measured": 0.03, "estimated": 0.25}
"""Relative differences in speed that count as none; a roofline is no more precise."""
WORTH_A_TRIAL = 0.75
"""Part of the largest batch below which one more trial within the margin is worth its time."""
PARTS = (0.87, 0.75, 0.5)
"""Parts of the largest batch to try where a line leads to none within the margin: memory may hardly
grow near the limit."""
FAST_SETTING_BIAS = 0.02
"""Part of the memory by which the compiler's fast setting mostly reports too little."""
FAST_SETTING_MOST = 0.05
"""Maximum of that part: 0.7 GiB of a v5e's 15.75."""
UNREAD = (
    "The compiler's text of this program takes more memory than the machine has free: its "
    "operations, collectives, largest allocations and speed are unknown; its memory is known."
)
MOST_ACCUMULATIONS = 3
"""Maximum number of splits into gradient accumulation steps that are tried."""


class Evaluator(Protocol):
    """Runs trials."""

    @property
    def devices(self) -> int: ...
    @property
    def target(self) -> Target | GpuTarget | None: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    @property
    def on_cpu(self) -> bool:
        """Whether the trials run on a CPU, where a step may take minutes."""
        ...

    @property
    def by_speed(self) -> bool:
        """Whether speed alone decides, and not the memory that a batch fills."""
        ...

    def evaluate(self, request: TrialRequest) -> Trial:
        """Runs a trial.

        Raises:
            TpukitError: it failed for another reason than memory.
        """
        ...


@dataclass(frozen=True)
class Recommendation:
    """The result of a search."""

    target: Target | GpuTarget | None
    versions: Mapping[str, str]
    devices: int
    largest: int
    smallest_failed: int | None
    """The smallest batch that was tried and does not fit; None where all that were tried fit."""
    exact: bool
    """Whether `smallest_failed` is the batch after `largest`."""
    recommended: int
    accumulate: int
    """Steps that reach the global batch size with `recommended` samples a device."""
    trials: tuple[Trial, ...]
    seconds: float
    note: str | None = None
    ended: Ending = "memory"
    """Why the search for the largest ended."""
    too_slow: int | None = None
    """A batch that would take too long to try, or did."""
    estimated_largest: int | None = None
    """Batch at which the line through the trials reaches the memory limit; untried."""
    as_asked: bool = True
    """Whether the recommendation leaves the margin and reaches the global batch size."""
    form: str = ""
    """Name of the task's form, where it has several."""
    forms: Mapping[str, "Recommendation | None"] = field(default_factory=dict)
    """The results for them by name; None: no batch fits."""

    @property
    def recommended_trial(self) -> Trial | None:
        """The trial behind the recommendation."""
        return self.trial_of(self.recommended, self.accumulate) or self.trial_of(self.recommended)

    def trial_of(self, batch: int, accumulate: int = 1) -> Trial | None:
        """The most thorough trial of a batch."""
        found = [t for t in self.trials if t.batch == batch and t.accumulate == accumulate]
        return max(found, key=lambda t: (t.effort == "full", t.memory is not None), default=None)

    @property
    def recommended_global_batch(self) -> int:
        return self.recommended * self.devices * self.accumulate

    @property
    def parameters(self) -> int | None:
        """Number of weights of the model; None where no trial got that far."""
        return next((trial.parameters for trial in self.trials if trial.parameters), None)

    @property
    def limit_bytes(self) -> int | None:
        """Memory limit of a device."""
        return next((trial.limit_bytes for trial in self.trials if trial.limit_bytes), None)

    @property
    def compiles(self) -> int:
        return sum(trial.compiles for trial in self.trials)

    @property
    def samples_per_second(self) -> float | None:
        """Speed of the recommendation: measured, else estimated."""
        chosen = self.recommended_trial
        return samples_per_second(self.target, chosen) if chosen else None


class Recommender:
    """Searches with an evaluator, and keeps its trials."""

    def __init__(
        self, evaluator: Evaluator, settings: SearchSettings, log: Log, form: int = 0
    ) -> None:
        self.evaluator = evaluator
        self.form = form
        """Place of the task's form that is searched."""
        most = MOST_COMPILED if isinstance(evaluator.target, Target) else MOST
        self.settings = replace(settings, max=settings.max or max(most, settings.start))
        self.log = log
        self.trials: list[Trial] = []
        on_cpu, endless = evaluator.on_cpu, float("inf")
        limit = settings.time_limit or endless
        default = min(CPU_TRIAL_SECONDS, limit) if on_cpu else limit
        self.trial_seconds = settings.trial_time or default
        """The longest trial that is started, by those before it."""
        self.search_seconds = settings.max_time or (CPU_SEARCH_SECONDS if on_cpu else endless)
        self.why_fast: str | None = None
        """Why the compiler's fast setting confirms the answer, in place of full effort."""
        self._started = time.monotonic()

    def recommend(self) -> Recommendation:
        """Searches, and chooses.

        Raises:
            OutOfMemoryError: not even the smallest batch fits.
            JobError: a trial failed for another reason, or takes too long at the smallest batch.
        """
        self._started = time.monotonic()
        found = self._search()
        if found.low == 0:
            raise self._nothing_fits()
        recommended, note = self._choose(found.low)
        accumulate = 1
        if self.settings.global_batch_size is not None:
            recommended, accumulate, note = self._accumulate(
                self.settings.global_batch_size, recommended
            )
        result = Recommendation(
            target=self.evaluator.target,
            versions=self.evaluator.versions,
            devices=self.evaluator.devices,
            largest=found.low,
            smallest_failed=found.high,
            exact=found.high == found.low + self.settings.multiple_of,
            recommended=recommended,
            accumulate=accumulate,
            trials=tuple(self.trials),
            seconds=time.monotonic() - self._started,
            ended=found.ended or "memory",
            too_slow=found.too_slow,
            estimated_largest=line_end(found) if found.ended in ("speed", "time") else None,
            as_asked=note is None,
        )
        chosen = result.recommended_trial
        unread = UNREAD if chosen and chosen.unread else None
        few = None
        if chosen and chosen.seen and chosen.samples and chosen.seen < chosen.samples:
            few = f"Sized by the largest of {chosen.seen:,} of {chosen.samples:,} samples."
        notes = filter(None, (note, self.why_fast, unread, few))
        return replace(result, note=" ".join(notes) or None)

    # -- the largest ------------------------------------------------------------------------------
    def _search(self) -> Bracket:
        settings, top = self.settings, self.settings.top
        if self.evaluator.target is None:
            by_speed = self.evaluator.by_speed
            return search(self._try, settings, by_speed=by_speed, affordable=self._affordable)
        if settings.start >= top and self._confirm(top, "the only batch").fits:
            return Bracket(low=top, ended="max")
        if settings.exact or isinstance(self.evaluator.target, GpuTarget):
            return self._search_exactly()
        within = (1 - self.settings.margin) * (1 - FAST_SETTING_BIAS)
        draft = search(self._try, settings, TOLERANCE, within, affordable=self._affordable)
        if draft.low == 0:
            return draft
        batch = self._worth_confirming(draft)
        trial = self._confirm(batch, "the largest")
        if trial.slow:
            return replace(draft, ended="time", too_slow=batch)
        if not trial.fits:
            start = int((1 - TOLERANCE) * batch) or 1
            search(self._confirm, replace(settings, start=start), TOLERANCE)
        return replace(self._bracket(), ended=draft.ended, too_slow=draft.too_slow)

    def _affordable(self, bracket: Bracket) -> float:
        """The largest batch whose trial ends within the limits on trial and search time."""
        if not bracket.low:
            return float("inf")
        return bracket.trials[bracket.low].batch_within(self._seconds_for_a_trial())

    def _seconds_for_a_trial(self) -> float:
        left = self._started + self.search_seconds - time.monotonic()
        return min(self.trial_seconds, left)

    def _search_exactly(self) -> Bracket:
        """The last batch that fits at full effort, and the next one, which does not."""
        settings = self.settings
        draft = search(self._try, settings, 0.0, affordable=self._affordable)
        if draft.low == 0 or draft.ended == "time":
            return draft
        found = search(self._confirm, replace(settings, start=draft.low))
        return self._bracket() if self.why_fast else found

    def _worth_confirming(self, draft: Bracket) -> int:
        """The batch for full effort, by the fast setting's trials: the largest, or the largest that
        leaves the margin where that one does; the fast setting's bias is left free, but for half of
        the batch at most: weights may take nearly all."""
        most, unit = draft.trials[draft.low], self.settings.multiple_of
        fits = sorted((b, trial.used_bytes or 0) for b, trial in draft.trials.items() if trial.fits)
        room = (most.limit_bytes or 0) * (1 - FAST_SETTING_BIAS)
        if most.leaves_margin(self.settings.margin):
            room *= 1 - self.settings.margin
        batch = max(_batch_at(room, [(0, most.fixed_bytes or 0), *fits]), draft.low / 2)
        return min(max(int(batch) // unit * unit, unit), draft.low)

    def _bracket(self) -> Bracket:
        """The largest batch that is confirmed, and the smallest that failed above it."""
        whole = [trial for trial in self.trials if trial.accumulate == 1]
        low = max((t.batch for t in whole if self._is_confirmed(t)), default=0)
        failed = [t.batch for t in whole if not t.fits and not t.slow and t.batch > low]
        return Bracket(low=low, high=min(failed, default=None))

    def _confirm(self, batch: int, why: str) -> Trial:
        """A trial at full effort, or at the fast one where memory is short."""
        effort: Effort = "fast" if self.why_fast else "full"
        compiles = isinstance(self.evaluator.target, Target)
        how = f"at the compiler's {effort} effort" if compiles else "traced"
        try:
            trial = self.run(TrialRequest(batch, effort=effort), f"{why}, {how}")
        except JobError as error:
            if error.id != COMPILER_MEMORY or self.why_fast:
                raise
            left = (1 - self.settings.margin) * (1 - FAST_SETTING_MOST)
            self.settings = replace(self.settings, margin=1 - left)
            self.why_fast = (
                f"{error.message} The answer is by the compiler's fast effort, with "
                f"{FAST_SETTING_MOST:.0%} of the TPU's memory left for what that does not report."
            )
            self.log(f"  {self.why_fast}")
            return self._confirm(batch, why)
        return replace(trial, fits=self._is_confirmed(trial))

    def _is_confirmed(self, trial: Trial) -> bool:
        """Whether it fits at full effort, or in its place with what the fast one may not report."""
        if trial.effort == "full" or not trial.fits:
            return trial.fits
        return self.why_fast is not None and trial.leaves_margin(FAST_SETTING_MOST)

    def _try(self, batch: int, why: str) -> Trial:
        return self.run(TrialRequest(batch), why)

    def run(self, request: TrialRequest, why: str) -> Trial:
        """The trial of this request; runs and logs it where there is none yet."""
        if known := self._known(request):
            return known
        steps = request.accumulate
        accumulation = f" x {steps} accumulation steps" if steps > 1 else ""
        seconds = self._expected_seconds(request)
        about = f", about {format_duration(max(1.0, seconds))}" if seconds is not None else ""
        self.log(f"Batch {request.batch}{accumulation} ({why}){about} ...")
        trial = self.evaluator.evaluate(replace(request, form=self.form))
        self.trials.append(trial)
        self.log(f"  {trial.describe()}")
        return trial

    def _expected_seconds(self, request: TrialRequest) -> float | None:
        """The expected duration of a measured trial, by the nearest one before it."""
        timed = [t for t in self.trials if t.fits and t.samples_per_second]
        if not timed:
            return None
        known = min(timed, key=lambda t: abs(t.batch - request.batch))
        return known.expected_seconds(request.batch, request.accumulate)

    def _known(self, request: TrialRequest) -> Trial | None:
        """The last trial that was at least as thorough as this request."""
        same = (t for t in reversed(self.trials)
                if (t.batch, t.accumulate) == (request.batch, request.accumulate))  # fmt: skip
        return next((t for t in same if request.effort == "fast" or t.effort != "fast"), None)

    # -- the one to use ---------------------------------------------------------------------------
    def _choose(self, largest: int) -> tuple[int, str | None]:
        """The fastest batch that leaves the margin free; near ties go to the larger one."""
        margin = f"{self.settings.margin:.0%}"
        guesses: list[Callable[[int], int | None]] = [self._guess_within_margin]
        guesses += [partial(self._part, share) for share in PARTS]
        while True:
            candidates = self._within_margin(largest)
            most = max(candidates, default=0)
            if most < WORTH_A_TRIAL * largest and guesses:
                batch = guesses.pop(0)(largest)
                if batch is not None and batch > most:
                    self._thorough(batch, f"leaves {margin} of the memory free")
                continue
            if not candidates:
                return largest, f"No batch that was tried leaves {margin} of the memory free."
            best = self._fastest(candidates)
            trial = self._thorough(best, "the fastest within the margin")
            if trial.slow:
                return best, f"{best} was too slow to compile at full effort (--time-limit)."
            if self._leaves_margin(trial, largest):
                return best, None

    def _thorough(self, batch: int, why: str) -> Trial:
        """A measured trial, or one at the compiler's full effort."""
        return self._try(batch, why) if self.evaluator.target is None else self._confirm(batch, why)

    def _fastest(self, candidates: Sequence[int]) -> int:
        speeds = {batch: self._speed(batch) for batch in candidates}
        if not all(speeds.values()):
            return max(candidates)  # No batch is slower because its speed is unknown.
        close = CLOSE_IN_SPEED["estimated" if self.evaluator.target else "measured"]
        best = max(speeds.values())
        return max(b for b, speed in speeds.items() if speed >= best * (1 - close))

    def _within_margin(self, largest: int) -> list[int]:
        within: dict[int, bool] = {}
        for trial in self.trials:
            if trial.accumulate == 1 and trial.batch <= largest:
                leaves = trial.fits and self._leaves_margin(trial, largest)
                within[trial.batch] = within.get(trial.batch, True) and leaves
        return [batch for batch, leaves in within.items() if leaves]

    def _leaves_margin(self, trial: Trial, largest: int) -> bool:
        """Whether the margin stays free: of memory, or of the largest batch where it is unknown."""
        if trial.used_bytes is None or not trial.limit_bytes:
            return trial.batch <= (1 - self.settings.margin) * largest
        return trial.leaves_margin(self.settings.margin)

    def _part(self, share: float, largest: int) -> int | None:
        batch = self._rounded(share * largest)
        return batch if batch < largest else None

    def _guess_within_margin(self, largest: int) -> int | None:
        """A batch just within the margin by a line between what was tried; a round number."""
        share = 1 - self.settings.margin
        tried = {t.batch: t for t in self.trials if t.fits and t.used_bytes and t.batch <= largest}
        above = tried.get(largest)
        if above is None:
            return self._part(share, largest)
        if not above.limit_bytes:
            return None
        used = sorted((t.batch, t.used_bytes or 0) for t in tried.values())
        points = [(0, above.fixed_bytes or 0), *used]
        guess = self._rounded(_batch_at(above.limit_bytes * share, points))
        return guess if 0 < guess < largest and guess not in tried else None

    def _rounded(self, batch: float) -> int:
        """The batch rounded down to a multiple of 8 (or of less, where it is small)."""
        unit = self.settings.multiple_of
        while unit * 16 <= batch and unit < 8:
            unit *= 2
        return int(batch) // unit * unit or self.settings.multiple_of

    def _speed(self, batch: int) -> float:
        """Samples a second: measured, or estimated; 0 where neither is known."""
        trials = [t for t in self.trials if t.batch == batch and t.fits and t.accumulate == 1]
        return max((samples_per_second(self.evaluator.target, t) or 0.0 for t in trials), default=0)

    # -- the global batch size --------------------------------------------------------------------
    def _accumulate(self, size: int, recommended: int) -> tuple[int, int, str | None]:
        """Samples a device and accumulation steps for a global batch size, checked by a trial."""
        devices = self.evaluator.devices
        if size % devices:
            near = max(devices, round(size / devices) * devices)
            return recommended, 1, (
                f"A global batch of {size} does not divide over {devices} devices; {near} does."
            )  # fmt: skip
        per_device = size // devices
        splits = [n for n in range(1, per_device + 1)
                  if per_device % n == 0 and per_device // n <= max(recommended, 1)]  # fmt: skip
        for accumulate in splits[:MOST_ACCUMULATIONS]:
            request = TrialRequest(per_device // accumulate, accumulate)
            seconds = self._expected_seconds(request) or 0.0
            if not self._known(request) and seconds > self._seconds_for_a_trial():
                took = format_duration(seconds)
                return request.batch, accumulate, (
                    f"The global batch of {size} was not tried: a trial of it takes about {took}."
                )  # fmt: skip
            trial = self.run(request, f"for a global batch of {size}")
            if trial.fits and trial.leaves_margin(self.settings.margin):
                return request.batch, accumulate, None
        return recommended, 1, f"No accumulation that was tried reaches {size} within the margin."

    def _nothing_fits(self) -> TpukitError:
        multiple = self.settings.multiple_of
        least = min(self.trials, key=lambda t: t.batch)
        if least.slow:
            return JobError(
                f"batch {least.batch}, the smallest: {least.error}.",
                "Give it longer (--time-limit 30m), or take a smaller model or a faster device.",
                id="trial-timeout",
            )
        cause = f"it needs {least.memory_usage}" if least.used_bytes else least.error
        return OutOfMemoryError(
            f"not even {multiple} sample{'s' * (multiple > 1)} a device fits"
            f"{f': {cause}' if cause else ''}.{f' {self.why_fast}' if self.why_fast else ''}",
            "Shard the weights over more devices (--shard), use a smaller or leaner model, or a "
            "device with more memory.",
            id="nothing-fits",
        )


def _batch_at(room: float, points: Sequence[tuple[int, int]]) -> float:
    """The batch that needs `room` bytes, by the line through the two nearest points.

    points: batches with their memory, ascending. Beyond them where all are within `room`; the last
    batch where memory does not grow.
    """
    above = next((i for i, (_, used) in enumerate(points) if used > room), len(points) - 1)
    (low, least), (high, most) = points[max(0, above - 1)], points[max(1, above)]
    return low + (room - least) / (most - least) * (high - low) if most > least else high
