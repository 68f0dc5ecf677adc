"""report.html in headless Chromium: it renders, fits, is silent, and its charts can be used."""

import json
import re

import pytest
from browser import CHROMIUM, browser
from PIL import Image

from tpukit.train.report.page import RunReport
from tpukit.train.run_folder import RunFolder, write_config

CHART = "document.querySelector('#charts svg')"
LABELS = "[...document.querySelectorAll('#charts figure:first-child text')].map(t => t.textContent)"
VALUES = "document.querySelector('#charts output').textContent"
COLOUR = "getComputedStyle(document.body).backgroundColor"
RAW = "document.querySelectorAll('#charts path.raw').length"
STEPS = 3000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a run of three hours with a picture, a test and a long command."""
    folder = RunFolder(tmp_path_factory.mktemp("run") / "<script>alert(1)<script>")
    folder.create()
    write_config(folder, {"train": {"data_path": "x" * 300}, "task": {"name": "t"}})
    rows = [{"kind": "train", "step": step, "loss": 100 / step, "lr": 0.1, "compilations": 2}
            for step in range(1, STEPS)]  # fmt: skip
    rows += [{"kind": "valid", "step": 1000 * i, "valid_loss": 0.1 / i} for i in (1, 2)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.log.write_text(
        "2026-01-01T10:00:00 Command: tpukit train --task file.py:Task\n"
        "2026-01-01T10:00:00 Run: r, step 0 of 30; x\n"
        "2026-01-01T13:00:00 step 2999: loss 1\n"
        "2026-01-01T13:00:00 Warning: the disk may fill up\n"
    )
    metrics = {name: 0.5 for part in "abcdef" for name in (f"{part}_metric", f"{part}_metric_old")}
    folder.tests.write_text(json.dumps({"": {"metrics": metrics, "samples": 3}}))
    (folder.path / "test").mkdir()
    Image.new("RGB", (2000, 3000), "green").save(folder.path / "test" / "pictures.png")
    assert RunReport(folder, pytest.fail).renew()
    return folder.report


@pytest.fixture(scope="module")
def page():
    with browser() as page:
        yield page


@pytest.mark.parametrize("width", [400, 1600])
def test_it_renders_and_fits_in_light_and_dark(report, page, width):
    colours = set()
    for dark in (False, True):
        page.open(report, width, dark=dark)
        assert page.value("document.documentElement.scrollWidth") <= width
        assert page.value("document.querySelectorAll('#charts figure').length") == 3
        assert page.value("document.querySelectorAll('#charts path.curve').length") >= 4
        assert page.value("document.querySelector('.gallery img').naturalWidth") == 2000
        colours.add(page.value(COLOUR))
    assert len(colours) == 2
    assert page.said == []


def test_charts_are_read_and_zoomed_with_the_keyboard(report, page):
    page.open(report, 1600)
    page.value(f"{CHART}.focus()")
    whole, last = page.value(LABELS), page.value(VALUES)
    assert "training 0.03334" in last and "validation 0.05" in last
    page.press("Home")
    assert page.value(VALUES).startswith("step 4")
    page.press("ArrowRight")
    assert page.value(VALUES).startswith("step 8")
    page.press("+")
    assert page.value(LABELS) != whole
    page.press("0")
    assert page.value(LABELS) == whole
    assert page.said == []


def test_charts_are_zoomed_smoothed_and_scaled_with_the_mouse(report, page):
    page.open(report, 1600)
    whole = page.value(LABELS)
    page.value(f"{CHART}.scrollIntoView()")
    left, top, width = page.value(f"(r => [r.x, r.y, r.width])({CHART}.getBoundingClientRect())")
    page.drag((left + width * 0.3, top + 50), (left + width * 0.6, top + 50))
    assert page.value(LABELS) != whole
    page.value("document.querySelector('#reset').click()")
    assert page.value(LABELS) == whole
    page.value("document.querySelector('#charts input').click()")
    assert page.value(LABELS) != whole
    assert page.value(RAW) > 0
    change(page, "smoothing", "0", "input")
    assert page.value(RAW) == 0
    change(page, "axis", "time", "change")
    assert [label for label in page.value(LABELS) if re.fullmatch(r"\dh(\d+m)?", label)]
    assert page.said == []


def change(page, name, value, event):
    """What choosing a value in a control does."""
    page.value(
        f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('{event}')); }})"
        f"(document.getElementById('{name}'))"
    )


def test_axes_are_named_and_have_several_ticks_and_memory_begins_at_zero(tmp_path, page):
    """105 steps, logged at 100 and 105: a narrow chart had one tick."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_config(folder, {"train": {}, "task": {"name": "t"}})
    row = {"kind": "train", "loss": 0.5, "memory_used": 1.13 * 2**30, "memory_peak": 1.14 * 2**30}
    folder.metrics.write_text("".join(json.dumps({**row, "step": n}) + "\n" for n in (100, 105)))
    assert RunReport(folder, pytest.fail).renew()
    page.open(folder.report, 400)
    for figure in ("first", "last"):
        labels = page.value(LABELS.replace("first", figure))
        steps = [int(text) for text in labels if text.isdigit() and int(text) > 1]
        assert "optimizer step" in labels and len(steps) >= 3, labels
    assert labels[0] == "0"  # of the last chart, memory
    assert page.value("document.querySelectorAll('#charts .dashed').length") == 1
