"""The recommendation and the accumulation, on answers that are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import pytest

from tpukit.errors import OutOfMemoryError
from tpukit.io.units import GIB
from tpukit.probe.batch.evaluators import Ask
from tpukit.probe.batch.recommend import Finder, FindSettings
from tpukit.probe.batch.trial import MemoryByKind, StepCost, Trial
from tpukit.probe.compiler.targets import find_target


class Played:
    """Memory a + b rows; the compiler's full effort reads a little more."""

    parameters = 1000
    versions: ClassVar[dict[str, str]] = {}

    def __init__(self, per_row=0.5, fixed=1.0, target=None, speed=None, devices=1, more=0.0):
        self.per_row, self.fixed, self.more = per_row, fixed, more
        self.target = find_target(target) if target else None
        self.devices = self.target.devices if self.target else devices
        self.stretch = 1.33 if target else 1.0
        self.speed = speed
        self.asked: list[Ask] = []

    def try_batches(self, asks: Sequence[Ask]) -> list[Trial]:
        return [self.try_batch(ask) for ask in asks]

    def try_batch(self, ask: Ask) -> Trial:
        self.asked.append(ask)
        used = self.fixed + self.per_row * ask.rows + 0.5 * (ask.accumulate > 1)
        used += self.more * (ask.effort == "full")
        fits = used <= 16
        return Trial(
            ask.rows,
            fits,
            int(used * GIB),
            16 * GIB,
            int(self.fixed * GIB),
            samples_per_second=self.speed(ask.rows) if self.speed and fits else None,
            accumulate=ask.accumulate,
            memory=MemoryByKind() if fits else None,
            cost=StepCost(1e12 * ask.rows, 1e9) if self.target and fits else None,
            effort=ask.effort if self.target else None,
            compiles=1,
        )


def find(answerer, **settings):
    said: list[str] = []
    finding = Finder(answerer, said.append).find(FindSettings(**settings))
    # Two batches that are tried together are announced together.
    assert len(finding.trials) < len(said) <= 2 * len(finding.trials)
    return finding


def test_measured_both_sides_and_the_margin():
    finding = find(Played())
    assert (finding.largest, finding.next_failed) == (30, 31)
    # 0.95 of 16 GiB holds 28 rows.
    assert finding.recommended <= 28
    assert finding.recommended_global_batch == finding.recommended


def test_the_fastest_within_the_margin_is_recommended_not_the_largest():
    finding = find(Played(speed=lambda rows: 100.0 if rows == 4 else 50.0))
    assert finding.largest == 30
    assert finding.recommended == 4


def test_near_ties_in_speed_go_to_the_larger_batch():
    finding = find(Played(speed=lambda rows: 100.0 - 0.05 * rows))
    assert finding.recommended == max(
        t.batch for t in finding.trials if t.fits and t.used_bytes <= 0.95 * 16 * GIB
    )


def test_compiled_answers_are_confirmed_at_full_effort_on_both_sides():
    answerer = Played(target="v5e-1")
    finding = find(answerer)
    full = [ask for ask in answerer.asked if ask.effort == "full"]
    assert {ask.rows for ask in full} == {finding.largest, finding.next_failed}
    assert len(full) == 2


def test_at_most_six_compiles_where_memory_is_a_line():
    assert find(Played(target="v5e-1", per_row=0.7, fixed=1.4, more=0.05)).compiles <= 6


class NearlyFull(Played):
    """A compiler that trades operations for memory: hardly any growth from 24 rows on."""

    def try_batch(self, ask: Ask) -> Trial:
        used = min(1.0 + 0.6 * ask.rows, 15.2 + 0.02 * ask.rows)
        trial = super().try_batch(ask)
        return dataclasses.replace(trial, fits=used <= 16, used_bytes=int(used * GIB))


def test_a_margin_is_left_where_memory_hardly_grows():
    finding = find(NearlyFull(target="v5e-1"), start=36)
    assert finding.largest == 40
    assert finding.recommended == 20
    assert finding.note is None


def test_no_margin_is_said():
    finding = find(Played(fixed=15.3, per_row=0.3))
    assert finding.recommended == finding.largest == 2
    assert "leaves 5%" in finding.note


def test_one_batch_is_asked_about_once():
    answerer = Played(target="v5e-1")
    assert find(answerer, start=8, maximum=8).largest == 8
    assert [(ask.rows, ask.effort) for ask in answerer.asked] == [(8, "full")]
    answerer = Played(target="v5e-1")
    assert find(answerer, start=50, maximum=40).largest == 30
    assert [ask.rows for ask in answerer.asked if ask.effort == "full"] == [40, 30, 31]


def test_an_answer_that_full_effort_contradicts_is_searched_anew():
    # The draft says 30; at full effort 27 is the most.
    finding = find(Played(target="v5e-1", more=1.5))
    assert (finding.largest, finding.next_failed) == (27, 28)
    assert finding.trial_of(27).effort == "full"


def test_accumulation_reaches_the_wanted_batch_and_is_tried():
    finding = find(Played(devices=8), wanted_global_batch=512)
    assert finding.recommended * finding.accumulate * 8 == 512
    assert finding.accumulate > 1
    assert finding.trial_of(finding.recommended, finding.accumulate).fits


def test_a_wanted_batch_that_fits_needs_no_accumulation():
    finding = find(Played(devices=8), wanted_global_batch=64)
    assert (finding.recommended, finding.accumulate) == (8, 1)
    assert finding.trial_of(8, 1).fits


def test_a_wanted_batch_that_does_not_divide_is_said():
    finding = find(Played(devices=8), wanted_global_batch=100)
    assert "100" in finding.note and "96" in finding.note


def test_nothing_fits():
    with pytest.raises(OutOfMemoryError) as caught:
        find(Played(fixed=20.0))
    assert caught.value.id == "nothing-fits"
    assert "20.50 of 16.00 GiB" in caught.value.message


def test_everything_fits_up_to_the_maximum():
    finding = find(Played(), maximum=16)
    assert (finding.largest, finding.next_failed) == (16, None)
