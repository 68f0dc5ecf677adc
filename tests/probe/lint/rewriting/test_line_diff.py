"""The difference is the smallest one, and `patch` takes it."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest

from tpukit.probe.lint.fix import plan_fix
from tpukit.probe.lint.rewriting.line_diff import changes, unified


def longest_common(a: list[str], b: list[str]) -> int:
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            above = max(lengths[i][j + 1], lengths[i + 1][j])
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if x == y else above
    return lengths[-1][-1]


def test_smallest_and_right():
    draw = random.Random(0)
    for _ in range(300):
        a = [draw.choice("abc") for _ in range(draw.randrange(12))]
        b = [draw.choice("abc") for _ in range(draw.randrange(12))]
        found = changes(a, b)
        kept = len(a) - sum(c.last - c.first for c in found)
        assert kept == longest_common(a, b)
        rebuilt, at = [], 0
        for change in found:
            rebuilt += a[at : change.first] + b[change.new_first : change.new_last]
            at = change.last
        assert rebuilt + a[at:] == b


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch here")
@pytest.mark.parametrize("ends", [("\n", "\n"), ("", ""), ("\n", ""), ("", "\n")])
def test_patch_takes_it(tmp_path, ends):
    old = [f"line {i % 7}" for i in range(60)]
    new = [*old[:5], "new", *old[6:30], *old[33:59], "last"]
    before, after = "\n".join(old) + ends[0], "\n".join(new) + ends[1]
    (tmp_path / "a").write_text(before)
    text = unified("a", before, after) + "\n"
    subprocess.run(["patch", "-p0"], input=text.encode(), cwd=tmp_path, check=True)
    assert (tmp_path / "a").read_text() == after


def test_equal_texts():
    assert unified("a", "x\n", "x\n") == ""
    assert unified("a", "x", "x\n").splitlines()[2:] == [
        "@@ -1 +1 @@", "-x", "\\ No newline at end of file", "+x",
    ]  # fmt: skip


def test_a_long_file_changes_in_the_rewritten_lines_only(tmp_path):
    body = "def f{0}(x):\n    y = x\n    if y:\n        return xm.xla_device()\n    return xm\n\n"
    text = "import torch_xla.core.xla_model as xm\n" + "".join(body.format(i) for i in range(400))
    path = tmp_path / "a.py"
    path.write_text(text)
    lines = plan_fix(path).diff.splitlines()[2:]
    assert sum(line.startswith("-") for line in lines) == 400
    assert sum(line.startswith("+") for line in lines) == 401
