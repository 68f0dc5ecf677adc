"""Progress lines where there is no terminal."""

import io
import re

import pytest

from tpukit.io import progress
from tpukit.io.progress import Progress
from tpukit.io.units import format_duration


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
            shown.update(step, lambda: "loss 0.5", news=step == 1009)
    lines = stream.getvalue().splitlines()
    # A loss is shown once: the next line would repeat it.
    assert lines == [
        "step 1009/2000  loss 0.5  left 16m31s",
        "step 1019/2000  1/s  left 16m21s",
    ]


def test_the_time_left_is_without_a_first_step_that_compiled(clock):
    stream = io.StringIO()
    with Progress("step", 100, stream=stream) as shown:
        clock[0] += 500.0
        shown.restart(1)
        for step in range(2, 50):
            clock[0] += 1.0
            shown.update(step, lambda: "loss 0.5", news=True)
    first = stream.getvalue().splitlines()[0]
    step = int(re.match(r"step (\d+)/", first)[1])
    assert first.endswith(f"left {format_duration(100 - step)}")


def test_before_the_first_news_a_line_has_no_empty_values(clock):
    stream = io.StringIO()
    with Progress("step", 20, stream=stream) as shown:
        for step in range(1, 4):
            clock[0] += 40.0
            shown.update(step, lambda: "loss -")
        shown.update(3, lambda: "loss 0.5", news=True)
        clock[0] += 40.0
        # News that came too soon for a line of their own stand in the next one.
        shown.update(4, lambda: "loss 0.5")
    told = [line.split("  ")[1] for line in stream.getvalue().splitlines()]
    assert told == ["40 s each", "40 s each", "40 s each", "loss 0.5"]


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


@pytest.mark.parametrize("hours", [0.003, 0.17, 9, 24 * 365])
def test_a_run_of_any_length_leaves_few_lines_and_its_first_at_once(clock, hours):
    """A line every 100 ms is offered, or 100,000 in all; recurring lines beside them."""
    stream, total = io.StringIO(), min(100_000, int(hours * 36_000))
    first = None
    with Progress("step", total, stream=stream) as shown:
        for step in range(1, total + 1):
            clock[0] += hours * 3600 / total
            shown.update(step, lambda: "loss 0.5  12.3 samples/s  1.20 GiB of 15.75 GiB", news=True)
            if step % 20 == 0 and shown.admits():
                shown.message(f"step {step}: valid_loss 0.4321, valid_accuracy 0.9876")
            if first is None and stream.getvalue():
                first = clock[0] - 100.0
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 200 and len(stream.getvalue()) <= 20_000
    assert first <= max(5.0, hours * 3600 / 1000)
    assert lines[-1].startswith(f"step {total}/{total}") or "valid_loss" in lines[-1]
    assert sum(f"step {total}/{total}" in line for line in lines) == 1
