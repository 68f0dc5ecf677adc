"""A test run leaves nothing in the checkout: what tells it, tried on a repository of its own."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "leaves_nothing.sh"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / ".gitignore").write_text("/results/\n__pycache__/\n.cache/\nscripts/\n")
    (tmp_path / "kept.txt").write_text("as it was\n")
    for command in (["init", "-q"], ["add", ".gitignore", "kept.txt"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)

    def run(command):
        done = subprocess.run(
            [script, "bash", "-c", command], check=False, capture_output=True, text=True
        )
        return done.returncode, done.stderr

    return run


def test_caches_are_no_remains(run):
    assert run("mkdir .cache __pycache__ && touch .cache/x __pycache__/x.pyc") == (0, "")


@pytest.mark.parametrize(
    ("command", "named"),
    [("touch left.txt", "left.txt"), ("mkdir results && touch results/x", "results/"),
     ("echo more >> kept.txt", "kept.txt"), ("touch 'of two words'; exit 7", "of two words")],
)  # fmt: skip
def test_what_is_left_fails_and_is_named(run, command, named):
    code, stderr = run(command)
    assert code == (7 if "exit 7" in command else 1)
    assert "left in the checkout:" in stderr and named in stderr


def test_the_commands_own_exit_code_is_passed_on(run):
    assert run("exit 3")[0] == 3
