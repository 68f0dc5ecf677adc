"""Command lines of tpukit in forks of one process that has imported what is slow to import.

Each test process starts one server, which reads requests as JSON lines, forks for each, and prints
the child's process id and then its wait status. torch_xla is left to the children: it reads the
environment when it is imported.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cells import run_cells

CELLS = "--cells"
"""Instead of a command line of tpukit: the cells of a notebook, in a JSON file."""
READ_LATE = {
    "CPU_NUM_DEVICES", "CUDA_VISIBLE_DEVICES", "PJRT_DEVICE", "PYTEST_CURRENT_TEST",
    "TPUKIT_CACHE_DIR", "XDG_CACHE_HOME",
}  # fmt: skip
"""Variables that nothing reads when it is imported, so that a fork may set them."""


class ForkServer:
    """The server's process and the environment that it was started in."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip

    def can_set(self, environment: dict[str, str]) -> bool:
        """Whether a fork behaves in `environment` as a new process does."""
        names = environment.keys() | self.environment.keys()
        changed = {n for n in names if environment.get(n) != self.environment.get(n)}
        return changed <= READ_LATE

    def start(
        self, argv: list[str], environment: dict[str, str], cwd: Path | None, folder: Path,
        limits: dict[int, int] | None = None, session: bool = True,
    ) -> Forked:  # fmt: skip
        """`python -m tpukit *argv`, its output in `folder`; one at a time.

        `limits`: resource limits of the process; `session`: whether it leads one of its own.
        """
        out, err = folder / "out", folder / "err"
        request = [argv, environment, str(cwd or Path.cwd()), str(out), str(err),
                   limits or {}, session]  # fmt: skip
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return Forked(int(self.process.stdout.readline()), argv, self.process.stdout, out, err)

    def run(
        self, argv: list[str], environment: dict[str, str], cwd: Path | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """What `python -m tpukit *argv` does, its output captured."""
        with tempfile.TemporaryDirectory() as folder:
            forked = self.start(argv, environment, cwd, Path(folder), session=False)
            try:
                status = forked.wait(timeout)
            except subprocess.TimeoutExpired:
                os.kill(forked.pid, signal.SIGKILL)
                forked.wait(timeout)
                raise
            return subprocess.CompletedProcess(argv, status, *forked.output())


@dataclass
class Forked:
    """A running command line."""

    pid: int
    argv: list[str]
    answers: IO[bytes]
    out: Path
    err: Path

    def output(self) -> tuple[str, str]:
        """Standard output and standard error so far."""
        return self.out.read_text(), self.err.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """The exit code, negative after a signal; raises `subprocess.TimeoutExpired`."""
        ended, _, _ = select.select([self.answers], [], [], timeout)
        if not ended:
            raise subprocess.TimeoutExpired(self.argv, timeout, *self.output())
        return os.waitstatus_to_exitcode(int(self.answers.readline()))


def serve() -> None:
    """Forks for each request until standard input ends."""
    os.environ["USE_TORCH_XLA"] = "0"  # accelerate would import torch_xla
    import accelerate  # noqa: F401
    import torch._dynamo  # noqa: F401

    import tpukit.commands.train
    import tpukit.hardware.eager.backend
    import tpukit.train.run  # noqa: F401

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        argv, environment, cwd, out, err, limits, session = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(environment, cwd, out, err)
            if session:
                os.setsid()
            for limit, value in limits.items():
                resource.setrlimit(int(limit), (value, value))
            os._exit(run(argv))
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def run(argv: list[str]) -> int:
    """The exit code of `python -m tpukit *argv`, after everything's clean-up at exit."""
    sys.argv = ["tpukit", *argv]
    code = 1
    try:
        if argv[0] == CELLS:
            run_cells(json.loads(Path(argv[1]).read_text()))
            code = 0
        else:
            runpy.run_module("tpukit", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    # What an interpreter does at its end, but for freeing each object: that takes a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def become(environment: dict[str, str], cwd: str, out: str, err: str) -> None:
    """Gives this fork the environment, the folder and the streams of a new process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[0] = cwd
    for stream, path in ((0, os.devnull), (1, out), (2, err)):
        flags = os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, stream)
        os.close(opened)


if __name__ == "__main__":
    serve()
