"""The roofline against arithmetic by hand."""

import pytest

from tpukit.probe.roofline import estimate_step
from tpukit.probe.targets import find_target
from tpukit.probe.trial import Trial


def estimate(target: str, flops: float, bytes_accessed: float, collective_bytes: int):
    trial = Trial(1, True, flops=flops, bytes_accessed=bytes_accessed,
                  collective_bytes=collective_bytes)  # fmt: skip
    found = estimate_step(find_target(target), trial)
    assert found is not None
    return found


def test_the_slowest_resource_decides():
    step = estimate("v5e-8", flops=197e12, bytes_accessed=819e9 / 2, collective_bytes=10**9)
    assert step.seconds_by["arithmetic"] == pytest.approx(1.0)
    assert step.seconds_by["memory"] == pytest.approx(0.5)
    assert step.seconds_by["links"] == pytest.approx(0.005)
    assert (step.seconds, step.bound_by) == (pytest.approx(1.0), "arithmetic")
    assert estimate("v5e-8", 0, 819e9, 0).bound_by == "memory"
    assert estimate("v5e-8", 0, 0, 10**9).bound_by == "links"


def test_links_that_are_not_published_are_left_out():
    assert "links" not in estimate("v3-8", 1e12, 1e9, 10**9).seconds_by


def test_a_measured_trial_has_no_estimate():
    assert estimate_step(None, Trial(1, True)) is None
    assert estimate_step(find_target("v5e-1"), Trial(1, True)) is None
