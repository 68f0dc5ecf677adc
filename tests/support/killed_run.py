"""Runs tpukit command lines in forked sessions that kill themselves at chosen moments.

python killed_run.py PLAN.json: a list of {"argv": [...], "at": "EVENT:COUNT" or null}. Each
session is one process; with "at" it sends itself SIGKILL at the COUNT-th EVENT. Prints the exit
statuses as JSON. Under torchrun, TPUKIT_KILL_AT="EVENT:COUNT:RANK" and the arguments of one
session are used instead.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Ends the process when `event` has happened `count` times."""

    def __init__(self, at: str) -> None:
        self.event, count, *_ = at.split(":")
        self.left = int(count)

    def happened(self, event: str) -> bool:
        if event != self.event:
            return False
        self.left -= 1
        return self.left == 0

    def wrap(self, owner: object, name: str, event: str, *, after: bool = False) -> None:
        """Lets a call of owner.name be an event, before or after it is carried out."""
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            due = self.happened(event)
            if due and not after:
                die()
            result = original(*args, **kwargs)
            if due:
                die()
            return result

        setattr(owner, name, counted)


def arm(at: str) -> None:
    """Places the events: each file written, synced, renamed, removed; steps; compilation."""
    from tpukit.train import checkpoint, engine, restore, step

    countdown = Countdown(at)
    countdown.wrap(os, "fsync", "fsync")
    countdown.wrap(os, "rename", "rename")
    countdown.wrap(os, "rename", "renamed", after=True)
    countdown.wrap(os, "replace", "replace")
    countdown.wrap(shutil, "rmtree", "rmtree")
    countdown.wrap(step.Learner, "train_step", "step")
    countdown.wrap(step.Learner, "evaluation_step", "evaluate")
    countdown.wrap(restore, "build_learner", "build")
    countdown.wrap(engine.Engine, "snapshot", "snapshot")
    _cut_a_written_file(countdown, checkpoint)
    if countdown.event == "compile":
        # The first step compiles: milliseconds into it.
        original = step.Learner.train_step

        def timed(*args, **kwargs):
            threading.Timer(countdown.left / 1000, die).start()
            return original(*args, **kwargs)

        step.Learner.train_step = timed


def _cut_a_written_file(countdown: Countdown, checkpoint: object) -> None:
    original = checkpoint.save_file

    def cut(tensors, path):
        original(tensors, path)
        if countdown.happened("half"):
            os.truncate(path, Path(path).stat().st_size // 2)
            die()

    checkpoint.save_file = cut


def session(argv: list[str], at: str | None) -> int:
    """One command line in a child process; its wait status."""
    child = os.fork()
    if child == 0:
        sys.argv = ["tpukit", *argv]
        if at:
            arm(at)
        from tpukit.cli import run

        os._exit(run(argv))
    return os.waitpid(child, 0)[1]


def main() -> None:
    rank_kill = os.environ.get("TPUKIT_KILL_AT")
    if rank_kill is not None:
        event, count, rank = rank_kill.split(":")
        if os.environ["RANK"] == rank:
            arm(f"{event}:{count}")
        from tpukit.cli import run

        sys.exit(run(sys.argv[1:]))
    preload()
    sessions = json.loads(Path(sys.argv[1]).read_text())
    statuses = [session(s["argv"], s["at"]) for s in sessions]
    print(json.dumps(statuses))


def preload() -> None:
    """Imports what every session needs, once, before it forks."""
    import tpukit.commands.train
    import tpukit.train.run

    if os.environ.get("PJRT_DEVICE") == "CPU":
        import tpukit.hardware.xla.backend
    else:
        os.environ["USE_TORCH_XLA"] = "0"
        import accelerate  # noqa: F401

        import tpukit.hardware.eager.backend  # noqa: F401


if __name__ == "__main__":
    main()
