# ruff: noqa: E501 - a case is one line
"""Moving torch_xla code to torch_tpu: every row found, fixed where one replacement is right, and run."""

import ast
import subprocess
import sys

import pytest
from cases import read_cases
from runs import SUPPORT, environment, tpukit
from scanned import ids

from tpukit.knowledge.calls import moves_to_torch_tpu
from tpukit.probe.lint.fix import plan_fix

CASES = read_cases(__file__)
SCRIPTS = CASES["scripts"]


def moves(code: str) -> list[str]:
    return [id for id in ids(code, moves="torch_tpu") if id.startswith("move-")]


def test_every_use_is_found():
    uses = CASES["uses"]
    assert set(uses) == {row.id for row in moves_to_torch_tpu()}
    cases = [(id, code) for id, codes in uses.items() for code in codes]
    assert [(id, code) for id, code in cases if id not in moves(code)] == []


def test_what_is_not_of_torch_xla_is_left_alone():
    assert [code for code in CASES["stays"]["codes"] if moves(code)] == []


def test_one_right_replacement(tmp_path):
    path = tmp_path / "x.py"
    for code, expected in CASES["fixed"].items():
        path.write_text(f"{code}\n")
        planned = plan_fix(path, moves="torch_tpu")
        assert (planned.data.decode() if planned else "") == (expected and f"{expected}\n")


def test_without_the_option_nothing_moves(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("import torch_xla\nd = torch_xla.device()\ntorch_xla.sync()\n")
    assert tpukit("doctor", path).stdout == "1 file: nothing found.\n"
    shown = tpukit("doctor", path, "--to", "torch_tpu")
    assert shown.returncode == 1
    assert "not in torch_tpu: torch_xla.device" in shown.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_moved_script_names_torch_xla_no_more(name, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(SCRIPTS[name])
    done = tpukit("doctor", path, "--to", "torch_tpu", "--fix")
    assert done.returncode == 0, done.stdout
    moved = path.read_text()
    assert "torch_xla" not in moved
    ast.parse(moved)


@pytest.mark.torch_tpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_moved_script_runs(name, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(SCRIPTS[name])
    moved = tpukit("doctor", path, "--to", "torch_tpu", "--fix")
    assert moved.returncode == 0, moved.stdout
    done = subprocess.run(
        [sys.executable, path],
        env=environment({"PYTHONPATH": str(SUPPORT / "torch_tpu_on_cpu"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}),
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "done tpu", done.stderr[-2000:]
