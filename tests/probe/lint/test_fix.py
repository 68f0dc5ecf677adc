"""--fix: what it writes parses, changes nothing else, changes nothing twice, and runs."""

import ast
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cases import read_cases
from runs import script

from tpukit.errors import DataError
from tpukit.probe.lint.fix import apply_fix, plan_fix, plan_fixes, unified
from tpukit.probe.lint.scan import scan_paths

CASES = read_cases(__file__)
XM = CASES["texts"]["XM"]


def fixed(path: Path) -> str:
    fix = plan_fix(path)
    return path.read_text() if fix is None else fix.data.decode()


def test_rewrites(tmp_path):
    path = tmp_path / "a.py"
    for name, (before, after) in CASES["rewrites"].items():
        newline = "\r\n" if name == "windows lines" else "\n"
        path.write_bytes(before.replace("\n", newline).encode())
        apply_fix(plan_fix(path))
        assert path.read_bytes().decode() == after.replace("\n", newline)
        ast.parse(path.read_text())
        assert plan_fix(path) is None, "a second run changes nothing"


def test_what_has_no_right_replacement_is_left_alone(tmp_path):
    path = tmp_path / "a.py"
    for code in CASES["left-alone"].values():
        path.write_text(code)
        assert plan_fix(path) is None


def test_nothing_else_changes(tmp_path):
    """Comments, odd spacing, strings and blank lines stay."""
    odd = "x  =  ( 1,2 )   # odd\n\n\n\ns = '''xm.xla_device()'''\n\tif_tab = 1\n"
    path = tmp_path / "a.py"
    path.write_text(XM + "def f( a,b ) :\n" + "\n".join(f"    {x}" for x in odd.splitlines()[:4])
                    + "\n    return  xm.xla_device( )  ;\n# end")  # fmt: skip
    before = path.read_text()
    after = fixed(path)
    assert after == before.replace("xm.xla_device( )", "torch_xla.device( )").replace(
        XM, "import torch_xla\n"
    )


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch here")
@pytest.mark.parametrize("ends", [("\n", "\n"), ("", ""), ("\n", ""), ("", "\n")])
def test_patch_takes_a_diff(tmp_path, ends):
    old = [f"line {i % 7}" for i in range(60)]
    new = [*old[:5], "new", *old[6:30], *old[33:59], "last"]
    before, after = "\n".join(old) + ends[0], "\n".join(new) + ends[1]
    (tmp_path / "a").write_text(before)
    text = unified("a", before, after) + "\n"
    subprocess.run(["patch", "-p0"], input=text.encode(), cwd=tmp_path, check=True)
    assert (tmp_path / "a").read_text() == after


def test_a_long_file_changes_in_the_rewritten_lines_only(tmp_path):
    body = "def f{0}(x):\n    y = x\n    if y:\n        return xm.xla_device()\n    return xm\n\n"
    text = "import torch_xla.core.xla_model as xm\n" + "".join(body.format(i) for i in range(60))
    path = tmp_path / "a.py"
    path.write_text(text)
    lines = plan_fix(path).diff.splitlines()[2:]
    assert sum(line.startswith("-") for line in lines) <= 62
    assert sum(line.startswith("+") for line in lines) <= 63


def test_an_import_that_a_package_exports_stays(tmp_path):
    path = tmp_path / "__init__.py"
    path.write_text(XM + "d = xm.xla_device()\n")
    assert fixed(path) == XM + "import torch_xla\nd = torch_xla.device()\n"


def test_encoding_marks_and_mode_stay(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes(b"\xef\xbb\xbf# \xc3\xbc\n" + (XM + "xm.mark_step()\n").encode())
    path.chmod(0o751)
    apply_fix(plan_fix(path))
    assert path.read_bytes().startswith(b"\xef\xbb\xbf# \xc3\xbc\n")
    assert b"torch_xla.sync()" in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o751


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_declared_encoding_stays(tmp_path, encoding):
    before = f"# coding: {encoding}\n{XM}xm.mark_step()  # \xe9\n".encode(encoding)
    path = tmp_path / "a.py"
    path.write_bytes(before)
    apply_fix(plan_fix(path))
    assert path.read_bytes().endswith(b"\ntorch_xla.sync()  # \xe9\n")


# -- backups ---------------------------------------------------------------------------------------
def git(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        check=True, capture_output=True,
    )  # fmt: skip


def test_backup_where_no_version_control_has_the_file(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(XM + "xm.mark_step()\n")
    assert apply_fix(plan_fix(path)) == tmp_path / "a.py.bak"
    assert (tmp_path / "a.py.bak").read_text() == XM + "xm.mark_step()\n"
    path.write_text(XM + "xm.xla_device()\n")
    assert apply_fix(plan_fix(path)) == tmp_path / "a.py.bak1", "no backup is overwritten"


def test_no_backup_of_a_committed_file(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(XM + "xm.mark_step()\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-m", "a")
    assert apply_fix(plan_fix(path)) is None
    path.write_text(XM + "xm.xla_device()\n")
    assert apply_fix(plan_fix(path)) is not None, "changes that are not committed are kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_file_that_cannot_be_written_stays(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(XM + "xm.mark_step()\n")
    fix = plan_fix(path)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(DataError):
            apply_fix(fix)
    finally:
        tmp_path.chmod(0o755)
    assert path.read_text() == XM + "xm.mark_step()\n"


# -- notebooks -------------------------------------------------------------------------------------
def notebook(*cells: str, indent: int = 1) -> str:
    return json.dumps(
        {
            "cells": [
                {"cell_type": "markdown", "metadata": {}, "source": ["# xm.xla_device() é"]},
                *(
                    {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [],
                     "source": cell.splitlines(keepends=True)}
                    for cell in cells
                ),
            ],
            "metadata": {"kernelspec": {"name": "python3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        indent=indent,
        ensure_ascii=False,
    ) + "\n"  # fmt: skip


def test_notebook_is_found_and_fixed_in_its_cells(tmp_path):
    path = tmp_path / "a.ipynb"
    cells = (
        "!pip install -q torch_xla\n%env XLA_USE_BF16=1\nimport torch_xla.core.xla_model as xm",
        "%%bash\necho xm.xla_device()",
        "def f():\n    %time d = xm.xla_device()\n    return xm.xla_device()\n",
        "f()\nxm.mark_step()",
        "%%writefile train.py\nimport torch_xla.core.xla_model as xm\nd = xm.xla_device()\n",
        "this is no python",
    )
    path.write_text(notebook(*cells))
    report = scan_paths([str(path)])
    found = [(f.cell, f.line, f.column, f.id) for f in report.findings]
    assert found == [
        (2, 2, 6, "xla-environment"),
        (4, 3, 12, "xm-xla-device"),
        (5, 2, 1, "xm-mark-step"),
        (6, 3, 5, "xm-xla-device"),
    ]
    assert any("cell 7" in note for note in report.notes)
    apply_fix(plan_fix(path))
    after = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"][1:]]
    assert after == [
        cells[0] + "\nimport torch_xla",
        cells[1],
        cells[2].replace("return xm.xla_device", "return torch_xla.device"),
        "f()\ntorch_xla.sync()",
        "%%writefile train.py\nimport torch_xla\nd = torch_xla.device()\n",
        cells[5],
    ]
    assert plan_fix(path) is None


def test_a_cell_that_is_indented_throughout(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(notebook(XM, "    d = xm.xla_device()\n\n    if d:\n        print(xm)\n"))
    (finding,) = scan_paths([str(path)]).findings
    assert (finding.cell, finding.line, finding.column) == (3, 1, 9)
    apply_fix(plan_fix(path))
    cell = json.loads(path.read_text())["cells"][2]
    assert "".join(cell["source"]) == (
        "    d = torch_xla.device()\n\n    if d:\n        print(xm)\n"
    )


def test_a_shell_line_that_goes_on_hides_no_cell(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(notebook(XM, "!pip install a \\\n   b \\\n   c\nd = xm.xla_device()\n"))
    (finding,) = scan_paths([str(path)]).findings
    assert (finding.cell, finding.line) == (3, 4)
    apply_fix(plan_fix(path))
    cell = json.loads(path.read_text())["cells"][2]
    assert "".join(cell["source"]).startswith("!pip install a \\\n   b \\\n   c\n")


def test_a_file_that_an_exported_notebook_writes(tmp_path):
    path = tmp_path / "a.py"
    inner = XM + "xm.mark_step()\n"
    text = f"x = 1\nget_ipython().run_cell_magic('writefile', 't.py', {inner!r})\n"
    path.write_text(text + f"get_ipython().run_cell_magic('bash', '', {inner!r})\n")
    (finding,) = scan_paths([str(path)]).findings
    assert (finding.id, finding.line, finding.fixable) == ("xm-mark-step", 2, False)


@pytest.mark.parametrize("indent", [1, 2, 4, None])
def test_notebook_keeps_its_layout(tmp_path, indent):
    path = tmp_path / "a.ipynb"
    text = notebook(XM + "xm.mark_step()", "x = 'ü'", indent=indent)
    path.write_text(text)
    apply_fix(plan_fix(path))
    changed = set(path.read_text().splitlines()) ^ set(text.splitlines())
    assert len(changed) <= (6 if indent else 2)


def test_a_notebook_in_an_odd_layout_changes_in_its_lines_only(tmp_path):
    """Sorted keys, odd spaces and escapes: only the rewritten line differs."""
    path = tmp_path / "a.ipynb"
    lines = [json.dumps(x) for x in (XM + "xm.mark_step()\n# \u00fc\n").splitlines(True)]
    lines.append(json.dumps("# \u2713", ensure_ascii=False))
    source = ",\n   ".join(lines)
    text = (
        '{"nbformat": 4, "metadata": {"x": 1.50, "e": 1E5},\n "cells" : [ {"source": "text",'
        ' "cell_type": "markdown"}, \n {"outputs": [], "source": [\n   ' + source + "],"
        ' "cell_type": "code"}\n]}\n'
    )
    path.write_text(text)
    apply_fix(plan_fix(path))
    wanted = text.replace("import torch_xla.core.xla_model as xm", "import torch_xla")
    assert path.read_text() == wanted.replace("xm.mark_step()", "torch_xla.sync()")


def test_a_notebook_whose_sources_are_texts(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(
        '{"cells": [{"cell_type": "code", "source": ' + json.dumps(XM + "xm.mark_step()") + "}]}"
    )
    apply_fix(plan_fix(path))
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["source"] == "import torch_xla\ntorch_xla.sync()"


# -- running ------------------------------------------------------------------------------------
OLD_SCRIPT = """
import torch
import torch_xla.core.xla_model as xm
from torch_xla.core.xla_model import xrt_world_size, get_ordinal
import torch_xla.distributed.xla_multiprocessing as xmp
from torch.optim.lr_scheduler import LinearLR


def train(index, steps):
    device = xm.xla_device()
    print("rank", get_ordinal(), "of", xrt_world_size())
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LinearLR(optimizer, verbose=False)
    for _ in range(steps):
        loss = model(torch.ones(2, 4, device=device)).square().mean()
        loss.backward()
        xm.optimizer_step(optimizer)
        scheduler.step()
        xm.mark_step()
    print("trained", float(loss) >= 0.0)


if __name__ == "__main__":
    xmp.spawn(train, args=(2,), nprocs=8, start_method="fork")
"""


def run_on_xla(path: Path) -> subprocess.CompletedProcess[str]:
    """The script, of which a FutureWarning ends it."""
    strict = path.with_name("strict.py")
    strict.write_text(
        "import runpy, sys, warnings\n"
        "warnings.filterwarnings('error', category=FutureWarning, module='__main__')\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    return script(strict, path, env={"PJRT_DEVICE": "CPU"})


@pytest.mark.xla
def test_fixed_script_runs_where_the_old_one_failed(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OLD_SCRIPT)
    old = run_on_xla(path)
    assert old.returncode != 0
    assert "cannot import name 'xrt_world_size'" in old.stderr
    (fix,) = plan_fixes([str(path)])
    apply_fix(fix)
    new = run_on_xla(path)
    assert new.returncode == 0, new.stderr[-2000:]
    assert "rank 0 of 1" in new.stdout
    assert "trained True" in new.stdout
    assert not [f for f in scan_paths([str(path)]).findings if f.status == "removed"]


def test_two_arguments_of_one_call(tmp_path):
    file = tmp_path / "a.py"
    call = "TrainingArguments('out', fp16=True, {})\n"
    file.write_text(
        "from transformers import TrainingArguments\n" + call.format("evaluation_strategy='no'")
    )
    (finding, other) = scan_paths([file], moves="tpu").findings
    assert (finding.old, other.old) == (
        "TrainingArguments(evaluation_strategy=...)",
        "TrainingArguments(fp16=True)",
    )
    apply_fix(plan_fix(file, moves="tpu"))
    assert "TrainingArguments('out', bf16=True, eval_strategy='no')" in file.read_text()
