"""CONTRIBUTING.md and the files for a code host: what they name exists."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tpukit.cli import app

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CONFIGS = sorted([*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml"])
FORMS = [path for path in CONFIGS if path.parent.name == "ISSUE_TEMPLATE" and path.stem != "config"]
MAKE = re.compile(r"\bmake ([a-z]+)\b")


def targets():
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def strings(value):
    """Every text in a parsed YAML file."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [text for inner in value for text in strings(inner)]
    return [value] if isinstance(value, str) else []


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_paths_of_the_guide_exist():
    named = re.findall(r"`((?:tpukit|tests|scripts|docs|benchmarks)/[^` ]*)`", GUIDE)
    assert len(named) > 20
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


def test_commands_of_the_guide_and_the_workflows_exist():
    texts = [GUIDE, *(text for path in CONFIGS for text in strings(read(path)))]
    made = {target for text in texts for target in MAKE.findall(text)}
    assert {"test", "lint", "slow", "docs", "wheel"} <= made <= targets()
    shown = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200"}).output
    named = {option for text in texts for option in re.findall(r"tpukit doctor (--[a-z]+)", text)}
    assert "--report" in named and all(option in shown for option in named)


def test_every_mark_is_in_the_guide():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    marks = [mark.split(":")[0] for mark in settings["tool"]["pytest"]["ini_options"]["markers"]]
    assert [mark for mark in marks if f"| `{mark}` |" not in GUIDE] == []


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_forms_ask_for_the_report(form):
    fields = read(form)["body"]
    [report] = [field for field in fields if field["id"] == "report"]
    assert "tpukit doctor --report" in report["attributes"]["label"]
    assert report["validations"] == {"required": True}
    assert len({field["id"] for field in fields}) == len(fields)


def test_workflows_lint_test_and_build():
    jobs = read(ROOT / ".github" / "workflows" / "checks.yml")["jobs"]
    runs = {name: " ".join(step.get("run", "") for step in job["steps"])
            for name, job in jobs.items()}  # fmt: skip
    assert set(runs) == {"lint", "suite", "wheel"}
    assert "make lint" in runs["lint"] and "make test" in runs["suite"]
    assert "make wheel" in runs["wheel"]
