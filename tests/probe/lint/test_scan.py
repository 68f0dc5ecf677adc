# ruff: noqa: E501 - a case is one line
"""Scanning: no file stops it, it is quick, and the library's own code gives no false alarm."""

import json
import random
import re
import sysconfig
from pathlib import Path

import pytest

from tpukit.errors import DataError
from tpukit.probe.lint.fix import plan_fix
from tpukit.probe.lint.scan import scan_file, scan_paths, source_files
from tpukit.probe.lint.source import python_module

XM = "import torch_xla.core.xla_model as xm\nxm.xla_device()\n"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00\x01\x02", b"\xff\xfe" + "import torch_xla".encode("utf-16-le"),
        b"import torch_xla\nprint 'python 2', xm.xla_device()\n",
        b"import torch_xla\n" + b"(" * 5000, b"import torch_xla\nx = " + b"-" * 20000 + b"1",
        b"import torch_xla\nx = " + b"1+" * 20000 + b"1\n", b"import torch_xla\n\x00",
        b"# -*- coding: nonsense -*-\nimport torch_xla\n", b"# coding: latin-1\nimport torch_xla # \xe9",
        b"import torch_xla\nif True:\n" + b" " * 300 + b"x = 1", b"import torch_xla\x0c\nx=1\r\ny=2\r",
        ("import torch_xla\n" + "".join(" " * i + "if x:\n" for i in range(120))).encode(),
        ("import torch_xla\nx = " + "f(" * 90 + ")" * 90).encode(),
        "import torch_xla as é\né.ü('𝕏')\n".encode(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".py", ".ipynb"])
def test_no_file_stops_the_scan(tmp_path, data, suffix):
    (tmp_path / f"odd{suffix}").write_bytes(data)
    (tmp_path / "good.py").write_text(XM)
    report = scan_paths([str(tmp_path)])
    assert [Path(f.path).name for f in report.findings] == ["good.py"]
    assert report.files == 2


@pytest.mark.parametrize(
    "text",
    ['[]', '{}', '{"cells": 3}', '{"cells": [3, null, {}]}', '{"worksheets": [{"cells": []}]}',
     '{"cells": [{"cell_type": "code"}]}', '{"cells": [{"cell_type": "code", "source": 7}]}',
     '{"cells": [{"cell_type": "code", "source": ["xm", 3]}]}', '{"torch_xla": ' * 3000],
)  # fmt: skip
def test_odd_notebooks(tmp_path, text):
    (tmp_path / "a.ipynb").write_text(text + " torch_xla" if text[-1] != "}" else text)
    assert scan_paths([str(tmp_path)]).findings == []


def test_script_exported_from_a_notebook(tmp_path):
    (tmp_path / "a.py").write_text("!pip install torch_xla\n%matplotlib inline\n" + XM)
    (finding,) = scan_paths([str(tmp_path)]).findings
    assert finding.line == 4


def test_folders_that_are_not_the_users(tmp_path):
    for folder in (".venv/lib", ".git", "__pycache__", "node_modules/x"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(XM)
    assert scan_paths([str(tmp_path)]).files == 0


def test_path_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        scan_paths([str(tmp_path / "none.py")])


def test_names_that_mean_each_other(tmp_path):
    """A chain of assignments is followed once, not once for every way through it."""
    lines = [f"{a} = {b}.{b}" for a in "abcdefgh" for b in "abcdefgh"]
    path = tmp_path / "a.py"
    path.write_text(XM + "\n".join(lines) + "\na.xla_device()\nb.spawn(nprocs=8)\n" * 50)
    assert len(scan_paths([str(path)]).findings) == 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("a.py", "print 'old'\n", r"invalid Python \(line 1: "),
     ("a.py", "x = 1\0", r"invalid Python \(source code"),
     ("a.ipynb", '{"cells": [', "invalid notebook"),
     ("a.ipynb", "[1, 2]", "no cells")],
)  # fmt: skip
def test_the_one_file_that_is_named_cannot_be_read(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        scan_paths([str(tmp_path / name)])
    (tmp_path / "good.py").write_text(XM)
    report = scan_paths([str(tmp_path / name), str(tmp_path / "good.py")])
    assert (len(report.findings), len(report.notes)) == (1, 1)


def test_one_bad_cell_is_a_note(tmp_path):
    cell = '{"cell_type": "code", "source": "print 3"}, {"cell_type": "code", "source": "x = 3"}'
    (tmp_path / "a.ipynb").write_text('{"cells": [' + cell + "]}")
    report = scan_paths([str(tmp_path / "a.ipynb")])
    assert (report.findings, len(report.notes)) == ([], 1)
    assert "cell 1" in report.notes[0]


def test_a_note_on_a_file_that_a_cell_writes_names_the_line_of_the_cell(tmp_path):
    cell = '{"cell_type": "code", "source": "%%writefile a.py\\nprint 3"}'
    (tmp_path / "a.ipynb").write_text('{"cells": [' + cell + "]}")
    (note,) = scan_paths([str(tmp_path / "a.ipynb")]).notes
    assert "cell 1: invalid Python (line 2: " in note


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_python_counts_them(tmp_path, end):
    code = XM + "x = 1  # tpukit: ignore\nxm.xla_device()\n"
    (tmp_path / "a.py").write_bytes(code.replace("\n", end).encode())
    assert [f.line for f in scan_paths([str(tmp_path)]).findings] == [2, 4]
    fix = plan_fix(tmp_path / "a.py")
    assert fix is not None
    assert python_module("a.py", fix.data.decode()).tree is not None


def test_order_is_by_place(tmp_path):
    for name in ("b.py", "a.py"):
        (tmp_path / name).write_text(XM + "xm.mark_step()\n")
    places = [(f.path[-4:], f.line) for f in scan_paths([str(tmp_path)]).findings]
    assert places == [("a.py", 2), ("a.py", 3), ("b.py", 2), ("b.py", 3)]


def library(name: str) -> list[str]:
    return [str(f) for f in source_files(Path(sysconfig.get_paths()[name]))]


@pytest.mark.slow
def test_standard_library_has_no_finding():
    files = library("stdlib")
    chosen = random.Random(0).sample(files, min(1000, len(files)))
    assert scan_paths(chosen).findings == []


OF_ANY_CODE = {"python-removed-module", "numpy-2"}
"""Ids of findings that need no torch: other packages may have what newer releases removed."""
USES_TORCH = re.compile(r"^\s*(?:from|import)\s+(?:torch|accelerate|transformers)", re.MULTILINE)


@pytest.mark.slow
def test_installed_packages_have_findings_only_where_torch_is_used():
    """What is found there is true, where it was looked at; it changes with their releases."""
    findings = scan_paths(library("purelib")).findings
    assert len({f.id for f in findings}) > 20
    elsewhere = [f for f in findings if f.id not in OF_ANY_CODE]
    texts = {f.path: Path(f.path).read_text(errors="replace") for f in elsewhere}
    assert [f for f in elsewhere if not USES_TORCH.search(texts[f.path])] == []
    assert not [f for f in findings if f.id in ("unsynchronised-gradients", "no-drop-last")]


# -- fuzz ------------------------------------------------------------------------------------------
SEEDS = [
    XM, "from timm.models.layers import (\n    DropPath as D,\n)\n", "try:\n    import torch_xla\nexcept:\n  pass\n",
    "class A(torch_xla.X):\n  def f(self, a: 'A' = 3, *b, **c): return lambda q: self.z\n",
    "from accelerate import *\na = Accelerator(fp16=True, **k)\nwith a as b, c: del a.use_fp16\n",
    "match torch_xla:\n  case {'a': 1, **r}: pass\n  case [x, *y]: pass\n",
    "import os; os.environ['XLA_USE_BF16'] += '1'\nasync def f():\n  await xm.mark_step()\n",
    "x = [a for torch in b if (y := torch.load(c)) for d in e]\nglobal torch\n",
]  # fmt: skip


def mutated(draw: random.Random) -> str:
    text = draw.choice(SEEDS) + draw.choice(SEEDS)
    for _ in range(draw.randrange(6)):
        where = draw.randrange(len(text) + 1)
        what = draw.choice(["", "(", ")", "\n", " ", ":", "=", ".", "*", "\x00", "é", "%", "!", "'",
                            "lambda:", "import ", "xm", text[: draw.randrange(20)]])  # fmt: skip
        text = text[:where] + what + text[where + draw.randrange(4) :]
    return text


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_code(count, tmp_path):
    draw = random.Random(count)
    for number in range(count):
        text = mutated(draw)
        notebook = number % 3 == 0
        path = tmp_path / ("a.ipynb" if notebook else "a.py")
        if notebook and number % 2:
            text = (
                '{"cells": [{"cell_type": "code", "source": '
                + repr([text])[: -draw.randrange(1, 5)]
            )
        elif notebook:
            text = json.dumps(
                {"cells": [{"cell_type": "code", "source": [text]}, {"source": text}]}
            )
        path.write_text(text, encoding="utf-8", errors="replace")
        scan_file(str(path))
        fix = plan_fix(path) if number % 4 == 0 else None
        if fix is not None and not notebook:
            # A notebook's magics, kept as they were, are no Python.
            assert python_module("a.py", fix.data.decode()).tree is not None
