"""Command lines of tpukit and scripts, in forks of a process that has imported what is slow.

Each test process starts a server that has imported torch and accelerate, and one that has imported
torch_xla and opened no device. A server reads requests as JSON lines, forks for each, and prints
the first child's process id and then the wait status.
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
import socket
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
SCRIPT = "--script"
"""Instead of a command line of tpukit: a script's path and its arguments."""
READ_LATE = {
    "CPU_NUM_DEVICES", "CUDA_VISIBLE_DEVICES", "PJRT_DEVICE", "PYTEST_CURRENT_TEST",
    "TPUKIT_CACHE_DIR", "XDG_CACHE_HOME",
}  # fmt: skip
"""Variables that nothing reads when it is imported, so that a fork may set them."""


class ForkServer:
    """The server's process and the environment that it was started in."""

    def __init__(self, environment: dict[str, str], stack: str = "torch") -> None:
        self.environment = environment
        self.process = subprocess.Popen(
            [sys.executable, __file__, stack], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip

    def can_set(self, environment: dict[str, str]) -> bool:
        """Whether a fork behaves in `environment` as a new process does."""
        names = environment.keys() | self.environment.keys()
        changed = {n for n in names if environment.get(n) != self.environment.get(n)}
        return changed <= READ_LATE

    def start(
        self, argv: list[str], environment: dict[str, str], cwd: Path | None, folder: Path,
        limits: dict[int, int] | None = None, session: bool = True, ranks: int = 1,
    ) -> Forked:  # fmt: skip
        """`python -m tpukit *argv`, its output in `folder`; one at a time.

        `limits`: resource limits of the process; `session`: whether it leads one of its own;
        `ranks`: processes that join as under torchrun.
        """
        out, err = folder / "out", folder / "err"
        request = [argv, environment, str(cwd or Path.cwd()), str(out), str(err),
                   limits or {}, session, ranks]  # fmt: skip
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return Forked(int(self.process.stdout.readline()), argv, self.process.stdout, out, err)

    def run(
        self, argv: list[str], environment: dict[str, str], cwd: Path | None, timeout: float,
        ranks: int = 1,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """What `python -m tpukit *argv` does, its output captured."""
        with tempfile.TemporaryDirectory() as folder:
            forked = self.start(argv, environment, cwd, Path(folder), session=False, ranks=ranks)
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


def serve(stack: str) -> None:
    """Forks for each request until standard input ends."""
    kept = import_torch_xla() if stack == "torch_xla" else import_torch()
    import tpukit.commands.train
    import tpukit.train.run  # noqa: F401

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        argv, environment, cwd, out, err, limits, session, ranks = json.loads(line)
        joining = variables_of_ranks(ranks)
        children = []
        for own in joining:
            pid = os.fork()
            if pid == 0:
                become({**kept, **environment, **own}, cwd, out, err)
                if session:
                    os.setsid()
                for limit, value in limits.items():
                    resource.setrlimit(int(limit), (value, value))
                os._exit(run(argv))
            children.append(pid)
        print(children[0], flush=True)
        print(wait_for(children), flush=True)


def import_torch() -> dict[str, str]:
    """What GPU and CPU runs import; no variables to keep."""
    os.environ["USE_TORCH_XLA"] = "0"  # accelerate would import torch_xla
    import accelerate  # noqa: F401
    import torch._dynamo  # noqa: F401

    import tpukit.hardware.eager.backend  # noqa: F401

    return {}


def import_torch_xla() -> dict[str, str]:
    """What XLA runs import; the variables that the import sets, for XLA to read in the forks."""
    before = dict(os.environ)
    # As `prepare_environment` does.
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TORCH_WARM_POOL": "0", "USE_TORCH_XLA": "1"}
    import tpukit.hardware.xla.backend  # noqa: F401

    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def variables_of_ranks(ranks: int) -> list[dict[str, str]]:
    """What torchrun sets for each rank; nothing for a single one."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
         "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(ranks)
    ]  # fmt: skip


def wait_for(children: list[int]) -> int:
    """The wait status of the first that fails, which ends the others, or 0."""
    statuses = []
    while children:
        pid, status = os.wait()
        children.remove(pid)
        statuses.append(status)
        if status:
            for child in children:
                os.kill(child, signal.SIGKILL)
    return next(filter(None, statuses), 0)


def run(argv: list[str]) -> int:
    """The exit code of `python -m tpukit *argv`, after everything's clean-up at exit."""
    sys.argv = ["tpukit", *argv]
    code = 1
    try:
        if argv[0] == CELLS:
            run_cells(json.loads(Path(argv[1]).read_text()))
        elif argv[0] == SCRIPT:
            sys.argv = argv[1:]
            sys.path[0] = str(Path(argv[1]).parent)
            runpy.run_path(argv[1], run_name="__main__")
        else:
            runpy.run_module("tpukit", run_name="__main__", alter_sys=True)
        code = 0
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
        flags = os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, stream)
        os.close(opened)


if __name__ == "__main__":
    serve(sys.argv[1])
