"""README's three blocks, pasted as a newcomer does, in fewer steps."""

import re
import shlex
from pathlib import Path

import pytest
from runs import tpukit

ROOT = Path(__file__).parent.parent
MOST_WORDS = 700
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORTER = {
    "tpukit data images --out shapes": "--n 80",
    "tpukit data dialogues --out dialogues --n 5000": "--n 120",
    "tpukit train --data-path shapes --preset quick --max-time 2m":
        "--hw cpu --max-steps 2 --global-batch-size 16",
    "tpukit train --data-path dialogues --preset quick --max-time 3m":
        "--hw cpu --max-steps 2 --global-batch-size 8 --set score_samples=0",
    "tpukit predict --run out-summarization --data-path dialogues --out answers.csv":
        "--hw cpu --max-new-tokens 4",
    "tpukit train --task my_task.py:Digits": "--hw cpu --max-steps 2",
    "tpukit probe-batch --task my_task.py:Digits --target t4": "--max 8",
}  # fmt: skip
"""Each command that takes long, and what a test adds to it."""
WRITES = {
    "Images": ["results/images/report.html", "results/images/test-valid/predictions.csv"],
    "A language model": ["out-summarization/report.html", "answers.csv"],
    "A task of your own": ["results/digits/report.html", "results/digits/config.toml"],
}
"""Files that are there after a section's blocks."""


def blocks(title):
    """(language, text) of each block of a section."""
    return FENCE.findall(README.partition(f"### {title}\n")[2].partition("\n#")[0])


@pytest.mark.parametrize("title", WRITES)
def test_a_block_runs_when_it_is_pasted(title, tmp_path):
    ran = []
    for language, text in blocks(title):
        if language == "python":
            (tmp_path / "my_task.py").write_text(text)
            continue
        for line in text.splitlines():
            name, *words = shlex.split(f"{line} {SHORTER.get(line, '')}")
            done = tpukit(*words, cwd=tmp_path)
            assert name == "tpukit" and done.returncode == 0, (line, done.stderr)
            ran.append(line)
    assert len(ran) == 3 and [f for f in WRITES[title] if not (tmp_path / f).exists()] == []


def test_every_shorter_command_is_there():
    assert [line for line in SHORTER if f"\n{line}\n" not in README] == []


def test_a_newcomer_reads_it_in_minutes():
    assert len(README.split()) <= MOST_WORDS
