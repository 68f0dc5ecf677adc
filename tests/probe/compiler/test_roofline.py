"""The roofline against arithmetic by hand."""

from __future__ import annotations

import pytest

from tpukit.probe.compiler.roofline import estimate_step
from tpukit.probe.compiler.targets import find_target


def test_the_slowest_resource_decides():
    v5e = find_target("v5e-8")
    step = estimate_step(v5e, flops=197e12, bytes_accessed=819e9 / 2, collective_bytes=1e9)
    assert step.arithmetic_seconds == pytest.approx(1.0)
    assert step.memory_seconds == pytest.approx(0.5)
    assert step.links_seconds == pytest.approx(0.01)
    assert (step.seconds, step.bound_by) == (pytest.approx(1.0), "arithmetic")
    assert estimate_step(v5e, 0, 819e9, 0).bound_by == "memory"
    assert estimate_step(v5e, 0, 0, 1e9).bound_by == "links"


def test_links_that_are_not_published_are_left_out():
    assert estimate_step(find_target("v3-8"), 1e12, 1e9, 1e9).links_seconds is None
