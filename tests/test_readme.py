"""README in both languages: its session is what the commands print, its blocks run when pasted."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
from runs import tpukit

import tpukit as package
from tpukit.commands.reports.batch import table

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "README.zh.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORTER = {
    "shapes": "shapes --n 80",
    "--max-time 60s": "--max-steps 2 --log-every 1 --global-batch-size 16 --max-time 60s",
}
"""What the session's commands say, and what a test does instead in seconds."""


@pytest.fixture(scope="module")
def script():
    place = ROOT / "scripts" / "readme_session.py"
    spec = importlib.util.spec_from_file_location("readme_session", place)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def blocks(name):
    """(language, text) of each block."""
    return FENCE.findall((ROOT / name).read_text(encoding="utf-8"))


def session():
    """The commands of the session, each with the lines that README shows of its output."""
    [text] = [text for _, text in blocks("README.md") if text.startswith("$ ")]
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], map(str.splitlines, parts[1::2]), strict=True))


def form(line):
    """A line without what differs from run to run and from machine to machine."""
    line = re.sub(r"device [^,]+,", "device D,", line)
    line = re.sub(r"waits for data \d+%", "", line)
    line = re.sub(r"(\d+h)?(\d+m)?\d+(\.\d+)?s\b", "T", line)
    line = re.sub(r"[\d.,]*\d( [KMG]iB)?", "0", line)
    return " ".join(line.split())


def run(command, folder):
    name, *words = shlex.split(command)
    assert name == "tpukit"
    done = tpukit(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.parametrize("name", PAGES)
def test_the_session_is_the_scripts(name, script):
    assert [*session()] == [step.command for step in script.SESSION]
    [shown] = script.BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
    assert shown.splitlines() == [
        line for command, lines in session().items() for line in (f"$ {command}", *lines)
    ]


def test_the_sessions_images_are_trained_on_and_tested_in_its_words(tmp_path):
    """Every line that README shows has the form of one that the command prints today."""
    commands = [c for c in session() if "doctor" not in c and "probe-batch" not in c]
    assert len(commands) == 3
    for command in commands:
        shorter = command
        for long, short in SHORTER.items():
            shorter = shorter.replace(long, short if "data images" in command or long[0] == "-"
                                      else long)  # fmt: skip
        printed = {form(line) for line in run(shorter, tmp_path)}
        left = [line for line in session()[command] if form(line) not in {*printed, "..."}]
        # What two steps do not reach, or say otherwise because they are two.
        assert [line for line in left if not line.startswith(("Time is up", "Train on"))] == []
    report = tmp_path / "results" / "images" / "report.html"
    assert report.stat().st_size > 1000


def test_the_sessions_doctor_speaks_as_doctor_does(tmp_path):
    shown, printed = session()["tpukit doctor"], run("tpukit doctor --quick", tmp_path)
    assert shown[0].startswith(f"tpukit {package.__version__} on ")
    assert printed[0].startswith(f"tpukit {package.__version__} on ")
    assert form(shown[-2]) == "ok 0 passed, 0 skipped (--verbose lists them)"
    assert shown[-2][:3] == next(line for line in printed if "passed" in line)[:3]


def test_the_sessions_probe_speaks_as_probe_batch_does(script):
    """The frame of a search's report; searches themselves are compiled in tests/probe."""
    first, head, *shown = session()[script.SESSION[1].command]
    assert re.fullmatch(r"images on v5e-1 \(1 device\), by the TPU compiler libtpu [\d.]+", first)
    assert head == next(table(()))
    assert shown[-1].startswith("Train with: tpukit train --task images ")


@pytest.mark.parametrize("name", PAGES)
def test_the_first_lines_are_three_to_paste(name):
    language, text = blocks(name)[0]
    assert language == "" and len(text.splitlines()) == 3
    install, *commands = text.splitlines()
    assert install == "pip install ." and commands[0] in session()
    assert session() and any(command.startswith(commands[1]) for command in session())


def test_the_python_block_runs_where_the_sessions_images_are(tmp_path, monkeypatch):
    """The Chinese page's is the same but for comments (tests/test_translations.py)."""
    [code] = [text for language, text in blocks("README.md") if language == "python"]
    run("tpukit data images --out shapes --n 80", tmp_path)
    monkeypatch.chdir(tmp_path)
    names = {}
    code = code.replace('max_time="60s"', 'max_steps=1, hw="cpu", global_batch_size=16')
    exec(compile(code, "README.md", "exec"), names)
    assert sum(p.numel() for p in names["model"].parameters()) > 1e6
