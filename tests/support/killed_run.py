"""Runs tpukit command lines in forked sessions that kill themselves at chosen moments.

python killed_run.py PLAN.json: a list of {"argv": [...], "ranks": N, "at": "EVENT:COUNT[:RANK]" or
null}. A session is one process, or N ranks as torchrun starts them: when one fails the others are
ended. Prints the wait statuses as JSON: that of the killed process, else the first that is not 0.

With "at" a process sends itself SIGKILL at the COUNT-th EVENT. `moment:COUNT`, of 1,000, is within
its first four steps, however fast they are. `kill-before`, `kill-within`,
`kill-after` and the same of `fail`, which raises an OSError instead, are faults at a file operation
of the checkpoint of a step (`kill-before@6:3`); a time limit is over at once then. `keep` ends
nothing: COUNT checkpoints are kept.
"""

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forked import variables_of_ranks


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
    from tpukit.train import checkpoint_writer as checkpoint
    from tpukit.train import learner, run_state, shards

    countdown = Countdown(at)
    if countdown.event == "keep":
        checkpoint.KEPT = countdown.left
        return
    if countdown.event.startswith(("kill-", "fail-")):
        FileFaults(countdown, checkpoint).place()
        return
    if countdown.event == "moment":
        die_at_moment(learner.Learner, countdown.left)
        return
    countdown.wrap(os, "fsync", "fsync")
    countdown.wrap(os, "rename", "rename")
    countdown.wrap(os, "rename", "renamed", after=True)
    countdown.wrap(os, "replace", "replace")
    countdown.wrap(shutil, "rmtree", "rmtree")
    countdown.wrap(learner.Learner, "train_step", "step")
    countdown.wrap(learner.BatchSums, "add", "evaluate")
    countdown.wrap(run_state, "build_learner", "build")
    countdown.wrap(run_state.RunState, "state_dict", "copy")
    _cut_a_written_file(countdown, checkpoint, shards)
    if countdown.event == "compile":
        # The first step compiles: milliseconds into it.
        original = learner.Learner.train_step

        def timed(*args, **kwargs):
            threading.Timer(countdown.left / 1000, die).start()
            return original(*args, **kwargs)

        learner.Learner.train_step = timed


MOST_STEPS, OF_STEP = 4, 250
"""Steps that a session makes before it is killed, and moments of each and of what follows it."""
FIRST_SECONDS = 0.2
"""Those of the first one: no step before it says how long it takes."""


def die_at_moment(learner: Any, moment: int) -> None:
    step, part = divmod(moment, OF_STEP)
    original, starts = learner.train_step, []

    def timed(*args, **kwargs):
        starts.append(time.monotonic())
        if len(starts) == step + 1:
            took = starts[-1] - starts[-2] if step else FIRST_SECONDS
            threading.Timer(took * part / OF_STEP, die).start()
        if len(starts) > MOST_STEPS:
            die()
        return original(*args, **kwargs)

    learner.train_step = timed


class FileFaults:
    """A fault before, within or after one file operation of the checkpoint of a step.

    Each operation adds a line to the file `operations` of the run.
    """

    def __init__(self, countdown: Countdown, checkpoint: Any) -> None:
        what, _, step = countdown.event.partition("@")
        self.how, _, self.when = what.partition("-")
        self.step = int(step)
        self.left = countdown.left
        self.checkpoint = checkpoint
        self.log: Path | None = None

    def place(self) -> None:
        from tpukit.io import interrupts

        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            setattr(os, name, self.watched(name, getattr(os, name)))
        Path.write_bytes = self.watched("write", Path.write_bytes, half_written)
        self.checkpoint.save_file = self.watched("save", self.checkpoint.save_file, half_saved)
        writer = self.checkpoint.BackgroundWriter
        write, record = writer._write, writer.record_best

        def writing(own: Any, state: Any, is_best: bool) -> None:
            own._after = int  # the report is no part of a checkpoint
            with self.active(own, state["plain"].step):
                write(own, state, is_best)

        def recording(own: Any, number: int, best: Any) -> None:
            own.wait()
            with self.active(own, number):
                record(own, number, best)

        writer._write, writer.record_best = writing, recording
        late = property(lambda _: 0.0 if "--max-time" in sys.argv else None, lambda *_: None)
        interrupts.StopRequest.deadline = late

    @contextmanager
    def active(self, writer: Any, step: int) -> Iterator[None]:
        self.log = writer.folder.parent / "operations" if step == self.step else None
        yield
        self.log = None

    def watched(self, name: str, operation: Any, half: Any = None) -> Any:
        """The operation with the fault; half: carries a part of it out."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self.log is None:
                return operation(*args, **kwargs)
            self.left -= 1
            with self.log.open("a") as file:
                file.write(f"{name}\n")
            if self.left:
                return operation(*args, **kwargs)
            if self.when == "within" and half is not None:
                half(operation, *args)
            if self.when == "after":
                operation(*args, **kwargs)
            if self.how == "kill":
                die()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return called


def half_written(write: Any, path: Path, content: bytes) -> None:
    write(path, content[: len(content) // 2])


def half_saved(save: Any, tensors: Any, path: Path) -> None:
    save(tensors, path)
    os.truncate(path, Path(path).stat().st_size // 2)


def _cut_a_written_file(countdown: Countdown, checkpoint: object, shards: object) -> None:
    original = checkpoint.save_file

    def cut(tensors, path):
        original(tensors, path)
        if countdown.happened("half"):
            os.truncate(path, Path(path).stat().st_size // 2)
            die()

    checkpoint.save_file = cut
    sum_of = shards.sha256_of

    def cut_shard(path):
        if countdown.happened("half"):  # before the other ranks know that it is written
            os.truncate(path, path.stat().st_size // 2)
            die()
        return sum_of(path)

    shards.sha256_of = cut_shard


def session(argv: list[str], at: str | None, ranks: int) -> int:
    """One command line in child processes; the wait status that counts."""
    own = variables_of_ranks(ranks)
    children = [start(argv, at, rank, own[rank]) for rank in range(ranks)]
    statuses: dict[int, int] = {}
    impatience = threading.Timer(SECONDS_TO_END, end, [children, statuses, signal.SIGKILL])
    while len(statuses) < ranks:
        child, status = os.waitpid(-1, 0)
        statuses[child] = status
        if status and not any(list(statuses.values())[:-1]):
            end(children, statuses, signal.SIGTERM)
            impatience.start()
    impatience.cancel()
    killed = children[rank_of(at)] if at else None
    return statuses[killed] if killed else next(filter(None, statuses.values()), 0)


SECONDS_TO_END = 30
"""What torchrun gives the other ranks."""


def end(children: list[int], ended: dict[int, int], how: signal.Signals) -> None:
    for child in children:
        if child not in ended:
            os.kill(child, how)


def rank_of(at: str) -> int:
    """The rank that is killed; 0 where there is one."""
    return int([*at.split(":"), "0"][2])


def start(argv: list[str], at: str | None, rank: int, own: dict[str, str]) -> int:
    """The process id of one rank."""
    child = os.fork()
    if child:
        return child
    sys.argv = ["tpukit", *argv]
    os.environ |= own
    if at and rank == rank_of(at):
        arm(at)
    from tpukit.cli import run

    os._exit(run(argv))


def main() -> None:
    preload()
    sessions = json.loads(Path(sys.argv[1]).read_text())
    statuses = [session(s["argv"], s["at"], s["ranks"]) for s in sessions]
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
