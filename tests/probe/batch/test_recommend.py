"""The recommendation and the accumulation, on trials of a simulated evaluator."""

import dataclasses

import pytest
from simulated import Simulated, recommend

from tpukit.errors import JobError, OutOfMemoryError
from tpukit.io.units import GIB
from tpukit.probe.batch.recommend import Recommender
from tpukit.probe.batch.search import SearchSettings
from tpukit.probe.trial import COMPILER_MEMORY, Trial, TrialRequest


def test_measured_both_sides_and_the_margin():
    found = recommend(Simulated())
    assert (found.largest, found.smallest_failed) == (30, 31)
    # 0.95 of 16 GiB holds 28 rows.
    assert found.recommended <= 28
    assert found.recommended_global_batch == found.recommended


class PeakElsewhere(Simulated):
    """As the smallest EIT network under a memory limit: the peak of small batches is the copy of a
    checkpoint, and they suggest that memory grows faster than it does; later it grows a little
    more slowly."""

    def trial(self, request: TrialRequest) -> Trial:
        trial = super().trial(request)
        if request.batch >= 20:
            less = int(0.003 * GIB) * max(0, request.batch - 100)
            used = trial.used_bytes - less
            return dataclasses.replace(trial, used_bytes=used, fits=used <= 16 * GIB)
        used = int(6.78 * GIB)
        fixed = used - int(0.123 * GIB) * request.batch
        return dataclasses.replace(trial, used_bytes=used, fixed_bytes=fixed)


def test_the_recommended_batch_is_tried_on_the_way_to_the_largest():
    evaluator = PeakElsewhere(per_row=0.0835, fixed=4.48)
    found = recommend(evaluator)
    assert (found.largest, found.smallest_failed) == (139, 140)
    assert 120 <= found.recommended <= 130
    assert len(evaluator.requests) <= 5


def test_the_fastest_within_the_margin_is_recommended_not_the_largest():
    found = recommend(Simulated(speed=lambda rows: 100.0 if rows == 4 else 50.0))
    assert found.largest == 30
    assert found.recommended == 4


def test_near_ties_in_speed_go_to_the_larger_batch():
    found = recommend(Simulated(speed=lambda rows: 100.0 - 0.05 * rows))
    assert found.recommended == max(
        t.batch for t in found.trials if t.fits and t.used_bytes <= 0.95 * 16 * GIB
    )


def test_an_exact_search_confirms_both_sides_at_full_effort():
    evaluator = Simulated(target="v5e-1")
    found = recommend(evaluator, exact=True)
    assert found.exact
    assert (found.largest, found.smallest_failed) == (30, 31)
    full = {request.batch for request in evaluator.requests if request.effort == "full"}
    assert full == {30, 31, found.recommended}


def test_a_draft_within_the_margin_is_the_one_batch_at_full_effort():
    evaluator = Simulated(target="v5e-1", per_row=0.7, fixed=1.4, more=0.05)
    found = recommend(evaluator)
    assert (found.largest, found.recommended) == (19, 19)
    full = [request for request in evaluator.requests if request.effort == "full"]
    assert [(request.batch, request.evaluate) for request in full] == [(19, True)]


def test_the_largest_and_the_recommended_are_confirmed_at_full_effort():
    evaluator = Simulated(target="v5e-1", per_row=0.7, fixed=1.4, more=0.05)
    found = recommend(evaluator, start=20)
    full = [request for request in evaluator.requests if request.effort == "full"]
    assert [request.batch for request in full] == [found.largest, found.recommended]
    assert 19 <= found.largest <= 20
    assert 16 <= found.recommended <= 19


@pytest.mark.parametrize("per_row", [0.02, 0.07, 0.3, 0.7, 1.5, 3.0])
@pytest.mark.parametrize("fixed", [0.1, 1.4, 5.0])
def test_few_trials_find_the_largest_within_a_tenth(per_row, fixed):
    found = recommend(Simulated(target="v5e-1", per_row=per_row, fixed=fixed, more=0.05))
    largest = (16 - fixed - 0.05) / per_row
    assert 0.9 * largest - 1 <= found.largest <= largest
    assert found.compiles <= 6


@pytest.mark.parametrize("more", [0.0, 0.05])
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("fixed", [14.6, 14.95, 15.15, 15.6, 15.9])
def test_weights_may_nearly_fill_the_memory(fixed, unit, more):
    evaluator = Simulated(target="v5e-1", per_row=0.005, fixed=fixed, more=more)
    found = recommend(evaluator, start=unit, multiple_of=unit, max=40)
    largest = min(40, int((16 - fixed - more) / 0.005 + 1e-6) // unit * unit)
    assert {request.batch % unit for request in evaluator.requests} == {0}
    assert min(request.batch for request in evaluator.requests) >= unit
    assert unit <= found.recommended <= found.largest <= largest
    assert found.largest >= 0.4 * largest
    assert found.compiles <= 8


def nearly_full(request: TrialRequest) -> float:
    """A compiler that trades operations for memory: hardly any growth from 24 rows on."""
    return min(1.0 + 0.6 * request.batch, 15.2 + 0.02 * request.batch)


def test_a_margin_is_left_where_memory_hardly_grows():
    found = recommend(Simulated(target="v5e-1", used=nearly_full), start=36)
    assert 34 <= found.largest <= 36
    assert 16 <= found.recommended <= 23
    assert found.trial_of(found.recommended).effort == "full"
    assert found.note is None
    found = recommend(Simulated(target="v5e-1", used=nearly_full), start=36, exact=True)
    assert found.largest == 40


def flat(request: TrialRequest) -> float:
    """A compiler whose full effort needs a little more than the margin leaves, on a plateau."""
    used = min(6.0 + 0.05 * request.batch, 14.7 + 0.002 * request.batch)
    return used + 0.6 * (request.effort == "full")


def test_the_start_is_not_recommended_where_a_batch_misses_the_margin_narrowly():
    found = recommend(Simulated(target="v5e-1", fixed=6.0, used=flat))
    assert found.recommended >= 0.4 * found.largest
    assert found.recommended_trial.leaves_margin(0.05)


def test_no_margin_is_said():
    found = recommend(Simulated(fixed=15.3, per_row=0.3))
    assert found.recommended == found.largest == 2
    assert "leaves 5%" in found.note


def test_one_batch_is_tried_once():
    evaluator = Simulated(target="v5e-1")
    assert recommend(evaluator, start=8, max=8).largest == 8
    assert [(request.batch, request.effort) for request in evaluator.requests] == [(8, "full")]
    evaluator = Simulated(target="v5e-1")
    assert recommend(evaluator, start=50, max=40, exact=True).largest == 30
    full = [request.batch for request in evaluator.requests if request.effort == "full"]
    assert full[:3] == [40, 30, 31]


def test_a_draft_that_full_effort_contradicts_is_searched_anew():
    # The draft says 30; at full effort 27 is the most.
    found = recommend(Simulated(target="v5e-1", more=1.5))
    assert 24 <= found.largest <= 27
    assert found.trial_of(found.recommended).effort == "full"
    found = recommend(Simulated(target="v5e-1", more=1.5), exact=True)
    assert (found.largest, found.smallest_failed) == (27, 28)
    assert found.trial_of(27).effort == "full"


class Unread(Simulated):
    """A compiler whose text of large programs does not fit into this machine's memory."""

    def trial(self, request: TrialRequest) -> Trial:
        trial = super().trial(request)
        large = request.batch > 8
        return dataclasses.replace(trial, unread=large, flops=None if large else trial.flops)


def test_without_the_speed_of_large_batches_memory_decides():
    whole, found = (recommend(kind(target="v5e-1")) for kind in (Simulated, Unread))
    assert (found.largest, found.recommended) == (whole.largest, whole.recommended)
    assert whole.note is None and "speed are unknown; its memory is known" in found.note
    # What is not recommended needs no remark.
    found = recommend(Unread(target="v5e-1"), margin=0.7)
    assert found.recommended <= 8 < found.largest and found.note is None


class SmallMachine(Simulated):
    """A machine without the memory to compile at some efforts."""

    lacks = ("full",)

    def evaluate(self, request: TrialRequest) -> Trial:
        if request.effort in self.lacks:
            self.requests.append(request)
            raise JobError("no memory.", id=COMPILER_MEMORY)
        return super().evaluate(request)


@pytest.mark.parametrize(
    "settings",
    [{}, {"exact": True}, {"start": 8, "max": 8}, {"start": 22, "max": 22}, {"start": 20},
     {"global_batch_size": 64}],
    ids=str,
)  # fmt: skip
def test_without_memory_for_full_effort_the_fast_one_s_error_is_left_free(settings):
    """Full effort would report 0.7 GiB more; here it cannot say so."""
    whole = Simulated(target="v5e-1", per_row=0.7, fixed=1.4, more=0.7)
    short = SmallMachine(target="v5e-1", per_row=0.7, fixed=1.4, more=0.7)
    lines: list[str] = []
    found = Recommender(short, SearchSettings(**settings), lines.append).recommend()
    least, most = whole.trial(TrialRequest(found.recommended, effort="full")), found.largest
    assert least.leaves_margin(0.05) and whole.trial(TrialRequest(most, effort="full")).fits
    assert most >= min(18, settings.get("max", 18)) and found.recommended >= 8
    assert {trial.effort for trial in found.trials} == {"fast"}
    failed = [trial.batch for trial in found.trials if not trial.fits]
    assert found.smallest_failed in (failed or [None])
    assert found.note.startswith("no memory. The answer is by the compiler's fast effort")
    assert sum("no memory" in line for line in lines) == 1
    tried = [(each.batch, each.accumulate, each.effort) for each in short.requests]
    assert len(tried) == len(set(tried)) and sum(effort == "full" for *_, effort in tried) <= 2


def test_without_memory_for_the_fast_effort_either_there_is_an_error():
    none = SmallMachine(target="v5e-1")
    none.lacks = ("fast", "full")
    for settings, tries in (({}, ["fast"]), ({"start": 8, "max": 8}, ["full", "fast"])):
        none.requests = []
        with pytest.raises(JobError, match="no memory"):
            recommend(none, **settings)
        assert [request.effort for request in none.requests] == tries


def test_accumulation_reaches_the_wanted_batch_and_is_tried():
    found = recommend(Simulated(devices=8), global_batch_size=512)
    assert found.recommended * found.accumulate * 8 == 512
    assert found.accumulate > 1
    assert found.trial_of(found.recommended, found.accumulate).fits


def test_a_wanted_batch_that_fits_needs_no_accumulation():
    found = recommend(Simulated(devices=8), global_batch_size=64)
    assert (found.recommended, found.accumulate) == (8, 1)
    assert found.trial_of(8, 1).fits


def test_a_wanted_batch_that_does_not_divide_is_said():
    found = recommend(Simulated(devices=8), global_batch_size=100)
    assert "100" in found.note and "96" in found.note


def test_nothing_fits():
    with pytest.raises(OutOfMemoryError) as caught:
        recommend(Simulated(fixed=20.0))
    assert caught.value.id == "nothing-fits"
    assert "20.50 of 16.00 GiB" in caught.value.message


def test_everything_fits_up_to_the_maximum():
    found = recommend(Simulated(), max=16)
    assert (found.largest, found.smallest_failed) == (16, None)


# -- time, speed and data --------------------------------------------------------------------------
class OnCpu(Simulated):
    """A machine that takes `seconds` for a sample in each step, and 5 for a trial itself."""

    on_cpu = True

    def __init__(self, seconds=1.0, samples=None, by_speed=False, faster_to=1, **settings):
        super().__init__(speed=lambda rows: min(rows, faster_to) / seconds, **settings)
        self.seconds, self.samples, self.by_speed = seconds, samples, by_speed

    def trial(self, request: TrialRequest) -> Trial:
        trial = super().trial(request)
        step = trial.step_seconds or 0.0
        seconds = 5.0 + 2.5 * step
        return dataclasses.replace(
            trial, seconds=seconds, samples=self.samples, devices=self.devices
        )


def test_no_trial_is_started_that_takes_longer_than_the_bound():
    """A step of 30, the largest, takes 300 s here; 8 samples take 80 s, and their trial 205 s."""
    evaluator = OnCpu(seconds=10.0, per_row=0.5)
    found = Recommender(evaluator, SearchSettings(start=1), lambda line: None).recommend()
    assert max(trial.seconds for trial in found.trials) <= 120
    assert max(request.batch for request in evaluator.requests) == found.largest == 4
    assert (found.ended, found.smallest_failed, found.exact) == ("time", None, False)
    assert found.too_slow > 4 and found.estimated_largest == 30
    longer = OnCpu(seconds=10.0, per_row=0.5)
    settings = SearchSettings(start=1, trial_time=3600, max_time=36000)
    found = Recommender(longer, settings, lambda line: None).recommend()
    assert (found.largest, found.smallest_failed, found.ended) == (30, 31, "memory")


def test_a_trial_that_did_not_end_in_time_is_slow_and_ends_the_search():
    found = recommend(Simulated(slow_above=8))
    assert (found.ended, found.smallest_failed, found.exact) == ("time", None, False)
    assert found.largest <= 8 < found.too_slow and found.recommended == found.largest
    assert found.trials[-1].verdict == "slow" and found.trials[-1].batch == found.too_slow
    assert found.estimated_largest == 30


@pytest.mark.parametrize("fitting", [16, 5, 1, 0])
def test_a_first_trial_that_did_not_end_in_time_is_followed_by_the_smallest(fitting):
    evaluator = Simulated(slow_above=fitting)
    recommender = Recommender(evaluator, SearchSettings(start=20), lambda line: None)
    if not fitting:
        with pytest.raises(JobError, match="batch 1, the smallest: no result within 30m"):
            recommender.recommend()
        assert [trial.batch for trial in recommender.trials] == [20, 1]
        return
    found = recommender.recommend()
    assert [trial.batch for trial in found.trials][:2] == [20, 1]
    assert (found.ended, found.smallest_failed) == ("time", None)
    assert 1 <= found.recommended <= found.largest <= fitting < found.too_slow


def test_the_next_trials_time_is_said():
    lines: list[str] = []
    Recommender(OnCpu(seconds=1.0), SearchSettings(max=20), lines.append).recommend()
    # A step of 20 samples takes 20 s, a trial 2.5 of them and 5 s.
    assert lines[0] == "Batch 4 (the start) ..."
    assert any("Batch 20 " in line and ", about 55s ..." in line for line in lines)


def test_where_speed_decides_a_search_ends_with_it():
    """A CPU computes no faster from 4 samples on, or from 16; 30 are all that fit."""
    found = recommend(OnCpu(seconds=0.01, faster_to=16, by_speed=True))
    assert [trial.batch for trial in found.trials] == [4, 8, 16, 30, 28]
    assert (found.ended, found.smallest_failed) == ("memory", None)
    found = recommend(OnCpu(seconds=0.01, faster_to=4, by_speed=True))
    assert [trial.batch for trial in found.trials] == [4, 8, 16]
    assert (found.ended, found.largest, found.recommended) == ("speed", 16, 16)


def test_one_slow_measurement_does_not_end_a_search_by_speed():
    class Disturbed(OnCpu):
        def trial(self, request):
            trial = super().trial(request)
            rate = 1.0 if request.batch == 8 else trial.samples_per_second
            return dataclasses.replace(trial, samples_per_second=rate)

    found = recommend(Disturbed(seconds=0.01, faster_to=1000, per_row=0.1, by_speed=True))
    assert found.largest == 128


@pytest.mark.parametrize("devices", [1, 2])
def test_no_batch_is_tried_that_holds_samples_twice(devices):
    found = recommend(OnCpu(seconds=0.001, samples=21, devices=devices))
    assert (found.largest, found.ended) == (21 // devices, "data")
    assert found.largest * devices <= 21


class Unknown(Simulated):
    """A device that does not say how much memory it uses."""

    def trial(self, request: TrialRequest) -> Trial:
        trial = super().trial(request)
        return dataclasses.replace(trial, used_bytes=None, limit_bytes=None, fixed_bytes=None)


def test_where_memory_is_unknown_the_margin_is_one_of_the_batch():
    found = recommend(Unknown())
    assert (found.largest, found.smallest_failed) == (30, 31)
    assert 24 <= found.recommended <= 28 and found.recommended_trial.fits


def test_a_compiler_tries_no_more_than_1024_without_a_maximum():
    small = {"target": "v5e-1", "per_row": 0.0001}
    assert recommend(Simulated(**small)).largest == 1024
    assert recommend(Simulated(**small), max=4096).largest == 4096
