"""A fault at any file operation of a checkpoint: the same command goes on, from intact bytes.

A process is killed, or an operation fails, before, within and after each of them: while the newest
and best checkpoint is written in the background, and while one that a time limit ended training in
is written and made the best.
"""

import json
import shutil
from pathlib import Path

import pytest
from runs import TINY, killed_sessions

from tpukit.train.checkpoint import newest_good, read_pointer

STEPS = 8
ARGUMENTS = [
    "train", "--task", TINY, "--hw", "cpu", "--max-steps", str(STEPS), "--log-every", "3",
    "--num-workers", "0",
]  # fmt: skip
TENSORS = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
HOW = [f"{how}-{when}" for how in ("kill", "fail") for when in ("before", "within", "after")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The checkpoints of an unbroken run, one of each step."""
    folder = tmp_path_factory.mktemp("whole")
    argv = [*ARGUMENTS, "--ckpt-every", "1", "--results-dir", folder / "run"]
    assert killed_sessions(folder, [(argv, f"keep:{STEPS}")]) == [0]
    return folder / "run" / "checkpoints"


def content(path: Path) -> list[bytes]:
    return [(path / name).read_bytes() for name in TENSORS]


class Faulty:
    """Runs whose checkpoint of one step meets faults; `before`: what they go on from."""

    def __init__(self, folder: Path, step: int, arguments: list[str], before: Path | None = None):
        self.folder, self.step, self.before = folder, step, before
        self.arguments = [*ARGUMENTS, *arguments]

    def operations(self) -> list[str]:
        """Names of the file operations of that checkpoint."""
        [run] = self.faults([ENDLESS])
        return (run / "operations").read_text().split()

    def faults(self, moments: list[str]) -> list[Path]:
        """A run for each fault, which it met."""
        runs = [self.folder / at.replace(":", "-") for at in moments]
        for run in runs if self.before is not None else []:
            shutil.copytree(self.before, run)
        statuses = killed_sessions(self.folder, [
            ([*self.arguments, "--results-dir", run], at.replace(":", f"@{self.step}:"))
            for run, at in zip(runs, moments, strict=True)
        ])  # fmt: skip
        for at, status in zip(moments, statuses, strict=True):
            is_killed = at.startswith("kill") and at != ENDLESS
            assert status == 9 if is_killed else status in (0, 256), (at, status)
        return runs

    def check_left(self, run: Path, whole: Path) -> int:
        """The step of what a fault left, whose bytes are those of an unbroken run."""
        left = newest_good(run / "checkpoints", lambda line: pytest.fail(f"{run.name}: {line}"))
        assert left is not None, run.name
        step = left.state.step
        if not run.name.startswith("fail"):  # to remove something is tried again later
            assert step in range(self.step - 2, self.step + 1), (run.name, step)
        assert content(left.path) == content(whole / f"step-{step:08d}"), run.name
        return step

    def check_resumed(self, run: Path, whole: Path) -> None:
        """What the same command made of it, without a fault."""
        folder = run / "checkpoints"
        last = folder / f"step-{STEPS:08d}"
        assert content(last) == content(whole / last.name), run.name
        best = json.loads((last / "state.json").read_text())["best"]
        assert read_pointer(folder / "best") == f"step-{int(best['step']):08d}", run.name
        assert not list(folder.glob(".*")), run.name


ENDLESS = "kill-before:1000000"


@pytest.fixture
def in_background(tmp_path):
    """The third checkpoint: the best one so far, which supersedes the first."""
    return Faulty(tmp_path, 6, ["--ckpt-every", "2"])


@pytest.fixture
def at_time_limit(tmp_path):
    """A run that a time limit ends after each step; its second one."""
    limited = ["--ckpt-every", "100", "--max-time", "8h"]
    [before] = Faulty(tmp_path, 0, limited).faults([ENDLESS])
    return Faulty(tmp_path, 2, limited, before.rename(tmp_path / "before"))


SOME = {"save": "kill-within", "rename": "fail-before", "replace": "kill-before",
        "rmdir": "kill-before", "fsync": "fail-after"}  # fmt: skip
"""A fault at the last operation of each name."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "where", ["in_background", pytest.param("at_time_limit", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_same_command_goes_on(where, every, whole, request):
    faulty = request.getfixturevalue(where)
    names = faulty.operations()
    assert {"save", "write", "fsync", "rename", "replace"} <= {*names}
    if every:
        chosen = [f"{how}:{place}" for place in range(1, len(names) + 1) for how in HOW]
    else:
        last = {name: place for place, name in enumerate(names, 1)}
        chosen = [f"{how}:{last[name]}" for name, how in SOME.items() if name in last]
    runs = faulty.faults(chosen)
    left = [faulty.check_left(run, whole) for run in runs]
    is_there = names.index("rename") + 1
    late = [step for at, step in zip(chosen, left, strict=True) if int(at.split(":")[1]) > is_there]
    assert late and min(late) >= faulty.step, "it stays, once its folder has its name"
    resumed = [*ARGUMENTS, "--ckpt-every", "2", "--results-dir"]
    assert not any(killed_sessions(faulty.folder, [([*resumed, run], None) for run in runs]))
    for run, step in zip(runs, left, strict=True):
        assert step == STEPS or f", step {step} of {STEPS};" in (run / "log.txt").read_text()
        faulty.check_resumed(run, whole)
