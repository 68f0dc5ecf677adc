"""The script that counts how wide the code is."""

import ast
import json
from pathlib import Path

from runs import python

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "structure.py"


def test_the_counts_are_those_of_the_sources():
    found = json.loads(python(SCRIPT, "--json").stdout)
    files = [*(ROOT / "tpukit").rglob("*.py")]
    assert found["files"]["package"] == len(files)
    assert found["lines"]["package"] == sum(len(f.read_text().splitlines()) for f in files)
    assert found["lines"]["tests"] == sum(found["rooms"]["tests"].values())
    [task] = [
        node
        for node in ast.parse((ROOT / "tpukit" / "train" / "task.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Task"
    ]
    public = {n.name for n in task.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"}
    assert found["task_methods"] == len(public)
    assert found["seam_members"] >= 10 and found["loop"]["names"] >= found["loop"]["modules"] >= 5
    assert found["loop"]["names"] <= 30 and found["loop"]["modules"] <= 15
    assert found["circles"] == []


def test_circles_are_found(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import structure

    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert structure.circles(arrows) == [["b", "c"]]
    assert structure.circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
