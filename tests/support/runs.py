"""Running the command line as a user does, and comparing what runs leave."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from forked import (
    CELLS,
    MARK,
    SCRIPT,
    ForkedCommand,
    can_set,
    completed,
    environment,
    stack_of,
)

from tpukit import cli
from tpukit.train.checkpoint import open_checkpoint

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
TINY = f"{SUPPORT / 'tiny_task.py'}:Tiny"
VIRTUAL_TPU = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}


def tpukit(
    *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None,
    ranks: int = 1, timeout: float = 300,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """One command line, its output captured: in a fork where that makes no difference.

    `ranks`: forks that join as the ranks that the command would start with torchrun.
    """
    argv = list(map(str, arguments))
    return run(argv, ["-m", "tpukit", *argv], env, cwd, ranks, timeout)


def run(
    argv: list[str], words: list[str], env: dict[str, str] | None, cwd: Path | None, ranks: int,
    timeout: float,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`argv` in a fork, or `words` in a new process of Python."""
    variables = environment(env)
    stack = stack_of(argv, variables)
    if ranks > 1 or can_set(stack, variables):
        return completed(argv, stack, variables, cwd, timeout, ranks)
    assert ranks == 1, variables
    return python(*words, env=env, cwd=cwd, timeout=timeout)


def python(
    *words: object, env: dict[str, str] | None = None, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A new process of Python, its output captured; `options` as of `subprocess.run`."""
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment(env), timeout=timeout,
        capture_output=True, text=True, check=False, **options,
    )  # fmt: skip


def here(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """One command line in this process, its output captured: for what fails before it begins."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), chdir(cwd or Path.cwd()):
        code = cli.run(list(map(str, arguments)))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def popen(*arguments: object, env: dict[str, str] | None = None, **options: Any) -> ForkedCommand:
    """A command line that runs meanwhile, in a fork; `options` as of `subprocess.Popen`."""
    argv, variables = list(map(str, arguments)), environment(env)
    stack = stack_of(argv, variables)
    assert can_set(stack, variables)
    return ForkedCommand(argv, stack, env=variables, **options)


@contextmanager
def started(*arguments: object, env: dict[str, str] | None = None) -> Iterator[ForkedCommand]:
    """A command line that runs meanwhile, as `popen` has it; it ends with the block."""
    with popen(*arguments, env=env, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def ranks_of(arguments: Sequence[object]) -> int:
    """The ranks that a command line on CPUs or GPUs asks for."""
    words = list(map(str, arguments))
    return int(words[words.index("--devices") + 1]) if "--devices" in words else 1


def script(
    name: str | Path, *arguments: object, env: dict[str, str] | None = None,
    cwd: Path | None = None, ranks: int = 1, timeout: float = 300,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """A script, of `tests/support` or by its path: on virtual devices where `env` has them, or in
    several ranks."""
    words = [str(SUPPORT / name), *map(str, arguments)]
    return run([SCRIPT, *words], words, env, cwd, ranks, timeout)


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """Standard output of what ended well."""
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def last_json(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON value in the last line that a script printed."""
    return json.loads(printed(done).splitlines()[-1])


def killed_sessions(
    folder: Path, sessions: Iterable[tuple[Sequence[object], str | None]],
    env: dict[str, str] | None = None,
) -> list[int]:  # fmt: skip
    """Wait statuses of command lines, each killed at a moment as `killed_run.py` knows them."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps([
        {"argv": [*map(str, argv)], "at": at, "ranks": ranks_of(argv)} for argv, at in sessions
    ]))  # fmt: skip
    done = script("killed_run.py", plan, env=env, timeout=800)
    print(done.stderr[-6000:], file=sys.stderr)  # pytest shows it where the statuses are wrong
    assert "raised RuntimeError" not in done.stderr, "a lost rank is taken for the task's mistake"
    return last_json(done)


def notebook(
    *cells: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """The cells of a notebook, run as its kernel runs them; an error in one ends with code 1."""
    file = cwd / "cells.json"
    file.write_text(json.dumps(cells))
    return completed([CELLS, str(file)], "torch", environment(env), cwd, timeout)


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object of a command line that ended well."""
    lines = printed(done).splitlines()
    assert len(lines) == 1, f"standard output must hold the JSON object alone: {lines}"
    return json.loads(lines[0])


def failure(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """What a failing command line told: short, without a traceback."""
    assert done.returncode == code, (done.returncode, done.stderr[-3000:])
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    told = [line for line in done.stderr.splitlines() if line.strip()]
    start = next(i for i, line in enumerate(told) if line.startswith(("Error:", "Usage:")))
    return "\n".join(told[start:])


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def latest(run: Path) -> Path:
    """The newest checkpoint's folder."""
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def parameters(run: Path, name: str = "model") -> dict[str, torch.Tensor]:
    """Tensors of a run's newest checkpoint."""
    return open_checkpoint(latest(run)).tensors(name)


def relative_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest over all tensors of |left - right| / |right|, in the 2-norm."""
    assert left.keys() == right.keys()
    return max(
        float((left[n].detach().double() - expected).norm() / expected.norm())
        for n in left
        if (expected := right[n].detach().double()).norm() > 0
    )


def joint_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """|left - right| / |right| of all tensors as one vector, in the 2-norm."""
    assert left.keys() == right.keys()
    squares = [((left[n] - right[n]).double().square().sum(), right[n].double().square().sum())
               for n in left]  # fmt: skip
    apart, whole = (sum(each) for each in zip(*squares, strict=True))
    return float(apart / whole) ** 0.5


def same_bytes(left: Path, right: Path) -> bool:
    """Whether two runs' newest checkpoints hold the same weights, average and optimizer."""
    sums = [
        {
            name: value
            for name, value in json.loads((latest(run) / "state.json").read_bytes())[
                "sha256"
            ].items()
            if name.endswith((".safetensors", ".distcp", ".metadata"))
        }
        for run in (left, right)
    ]
    return sums[0] == sums[1] and len(sums[0]) > 2


def marked_processes(mark: str) -> list[psutil.Process]:
    """Live processes that were started with this mark in their environment, or forked from them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and (process.environ().get(MARK) == mark or has_open(process.pid, mark)):
                found.append(process)
    return found


def wait_until(
    is_true: Callable[[], object], process: subprocess.Popen[Any] | None = None,
    seconds: float = 120,
) -> None:  # fmt: skip
    """Returns once `is_true()`; an AssertionError after `seconds`, or where `process` has ended."""
    end = time.monotonic() + seconds
    while not is_true():
        assert process is None or process.poll() is None, process.args
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


def wait_for_end(mark: str, seconds: float = 60) -> None:
    """Returns once no process with this mark is left."""
    wait_until(lambda: not marked_processes(mark), seconds=seconds)


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie, which waits to be collected."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def has_open(pid: int, mark: str) -> bool:
    """Whether a process has the file of a mark open, as forks of a server have."""
    return any(mark in str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir())


def on_torch_tpu(**variables: str) -> dict[str, str]:
    """The variables under which every process sees a TPU that is the CPU, through torch_tpu."""
    paths = [str(SUPPORT / "torch_tpu_on_cpu"), os.environ.get("PYTHONPATH", str(ROOT))]
    return {"PYTHONPATH": os.pathsep.join(paths), **variables}
