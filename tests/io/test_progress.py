"""Progress lines where there is no terminal."""

from __future__ import annotations

import io
import re

import pytest

from tpukit.io import progress
from tpukit.io.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_name_count_detail_and_time_left_and_are_rare(clock):
    stream = io.StringIO()
    with Progress("step", 2000, done=1000, stream=stream) as shown:
        for step in range(1001, 1021):
            clock[0] += 1.0
            shown.update(step, lambda: "loss 0.5")
    lines = stream.getvalue().splitlines()
    assert lines == [
        "step 1010/2000  loss 0.5  left 16m30s",
        "step 1020/2000  loss 0.5  left 16m20s",
    ]


def test_news_is_shown_earlier_and_the_end_always(clock):
    stream = io.StringIO()
    with Progress("step", 3, stream=stream) as shown:
        clock[0] += 3.0
        shown.update(1, lambda: "old")
        shown.update(2, lambda: "new", news=True)
        clock[0] += 0.1
        shown.update(3, lambda: "end")
    assert [re.split("  ", line)[1] for line in stream.getvalue().splitlines()] == ["new", "end"]


def test_a_disabled_one_is_silent(clock):
    stream = io.StringIO()
    with Progress("step", 3, enabled=False, stream=stream) as shown:
        clock[0] += 60.0
        shown.advance()
    assert stream.getvalue() == ""
