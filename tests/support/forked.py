"""Command lines of tpukit and scripts, in forks of a process that has imported what is slow.

A server has imported torch and accelerate, or torch_xla without opening a device. It reads requests
as JSON lines, forks for each, and prints the first child's process id and then the wait status.
Modules of tpukit that such a fork starts as children (trials, parts of the self-test, torchrun and
its ranks) are forks in turn. Test processes of one run share two servers: each talks to a fork of
its own of them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
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
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from cells import run_cells

CELLS = "--cells"
"""Instead of a command line of tpukit: the cells of a notebook, in a JSON file."""
MODULE, SCRIPT = "--module", "--script"
"""Instead of a command line of tpukit: a module's name or a script's path, and its arguments."""
READ_LATE = (
    "COLUMNS", "CPU_NUM_DEVICES", "CUDA_VISIBLE_DEVICES", "GLOO_", "GROUP_", "HOME", "LOCAL_",
    "MASTER_", "NCCL_", "PJRT_DEVICE", "PYTEST_", "PYTHONFAULTHANDLER", "RANK", "ROLE_", "TMPDIR",
    "TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_NCCL_", "TPUKIT_", "WORLD_SIZE",
    "XDG_CACHE_HOME", "XLA_FLAGS",
)  # fmt: skip
"""Variables, by how they begin, that nothing reads when it is imported: a fork may set them."""
MET_BY_MOST = (
    "jinja2", "matplotlib.backends.backend_agg", "matplotlib.figure", "scipy.linalg",
    "scipy.spatial", "tensorboard.compat.tensorflow_stub.pywrap_tensorflow", "timm",
    "tpukit.cli", "tpukit.commands.test", "tpukit.commands.train", "tpukit.train.report.page",
    "tpukit.train.run", "typer._adapters",
)  # fmt: skip
"""Modules that most commands import."""
NEW_PATH = tuple(sys.path)
"""`sys.path` when this process was new."""
READ_BY_XLA = ("ALLOW_MULTIPLE_LIBTPU_LOAD", "JAX_", "TF_CPP_", "TPU_", "USE_TORCH_XLA", "XLA_")
"""What else a fork may set where torch_xla and jax are not yet imported."""


UNOPTIMIZED = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
SHARED = "PYTEST_FORK_SERVERS"
"""The variable that names the folder of the shared servers' sockets."""


def start_shared(environment: dict[str, str], folder: str) -> list[subprocess.Popen[bytes]]:
    """A server of each stack for all test processes; it ends when its standard input does."""
    return [
        subprocess.Popen(
            [sys.executable, __file__, stack, str(Path(folder, stack))], env=environment,
            stdin=subprocess.PIPE,
        )
        for stack in ("torch", "torch_xla")
    ]  # fmt: skip


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process' environment without what would steer tpukit.

    Programs for virtual devices are compiled without optimization: most of their time is LLVM's.
    """
    fast = {"XLA_FLAGS": UNOPTIMIZED} if "PJRT_DEVICE" in (extra or {}) else {}
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PJRT_", "XLA_", "TPU_", "CPU_NUM", "USE_TORCH", "RANK", "WORLD"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", **fast, **(extra or {})}


class ForkServer:
    """A server, shared or this process' own, and the environment that it was started in."""

    def __init__(self, environment: dict[str, str], stack: str = "torch") -> None:
        if SHARED in environment:
            requests = answers = connected(Path(environment[SHARED], stack)).makefile("rwb", 0)
        else:
            command = [sys.executable, __file__, stack]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
            self.process = subprocess.Popen(command, env=environment, **pipes)
            requests, answers = self.process.stdin, self.process.stdout
        self.requests, self.answers = requests, answers
        self.environment = json.loads(answers.readline())

    def can_set(self, environment: dict[str, str]) -> bool:
        """Whether a fork behaves in `environment` as a new process does."""
        return is_late(environment, self.environment)

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
        self.requests.write(json.dumps(request).encode() + b"\n")
        return Forked(int(self.answers.readline()), argv, self.answers, out, err)

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
    status: int | None = None

    def output(self) -> tuple[str, str]:
        """Standard output and standard error so far."""
        return self.out.read_text(), self.err.read_text(errors="replace")

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        if self.status is None and select.select([self.answers], [], [], 0)[0]:
            self.status = os.waitstatus_to_exitcode(int(self.answers.readline()))
        return self.status

    def wait(self, timeout: float) -> int:
        """The exit code; raises `subprocess.TimeoutExpired`."""
        if self.status is None:
            select.select([self.answers], [], [], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.argv, timeout, *self.output())
        return status

    def send_signal(self, number: int) -> None:
        """As `subprocess.Popen.send_signal`."""
        if self.poll() is None:
            os.kill(self.pid, number)


def is_late(wanted: Mapping[str, str], present: Mapping[str, str]) -> bool:
    """Whether the variables that differ are such as a fork may set."""
    late = READ_LATE if "torch_xla" in sys.modules else (*READ_LATE, *READ_BY_XLA)
    changed = {n for n in wanted.keys() | present.keys() if wanted.get(n) != present.get(n)}
    if "PYTHONPATH" in changed and has_only_new_names(wanted.get("PYTHONPATH", "")):
        changed.remove("PYTHONPATH")
    return all(name.startswith(late) for name in changed)


def has_only_new_names(path: str) -> bool:
    """Whether folders of PYTHONPATH hold nothing that would take an imported module's place."""
    taken = ("sitecustomize.py", "torch", "torch_xla", "jax", "timm", "scipy", "matplotlib")
    folders = map(Path, path.split(os.pathsep))
    return not any((folder / name).exists() for folder in folders for name in taken)


class WarmPopen(subprocess.Popen[bytes]):
    """Starts modules of tpukit, and torchrun, as forks of this process; all else as it is done."""

    at_exit: ClassVar[list[Callable[..., object]]] = []
    """What this process has registered since it was forked."""
    modules: ClassVar[dict[str, dict[str, object]]] = {}
    """The modules of tpukit when it was forked, and what their names stood for."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        argv = module_in(args)
        if not argv or preexec_fn or not is_late(os.environ if env is None else env, os.environ):
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env)
            super()._execute_child(*given, *others)
            return
        pipes, session = others[3:9], others[14]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)
            return
        code = 1
        try:
            if session:
                os.setsid()
            forget_parent()
            replace_files([pipes[0], pipes[3], pipes[5]], pass_fds)
            become(dict(os.environ if env is None else env), cwd or Path.cwd())
            code = run([MODULE, *argv])
        finally:
            os._exit(code)


def module_in(args: object) -> list[str]:
    """MODULE and its arguments in `python -m MODULE ...`, where a fork can run it; else nothing."""
    if not isinstance(args, (list, tuple)) or args[0] != sys.executable:
        return []
    option, *argv = [str(word) for word in args[1:] if word != "-u"] or [""]
    known = option == "-m" and argv[0].split(".")[0] in ("tpukit", "torch")
    return argv if known else []


def forget_parent() -> None:
    """Leaves nothing of what the parent would do at its end, or by a signal, or has kept."""
    for name in [name for name in sys.modules if name[:6] == "tpukit"]:
        if kept := WarmPopen.modules.get(name):
            vars(sys.modules[name]).clear()
            vars(sys.modules[name]).update(kept)
        else:
            del sys.modules[name]
    while WarmPopen.at_exit:
        atexit.unregister(WarmPopen.at_exit.pop())
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()


def replace_files(streams: Sequence[int], passed: Sequence[int]) -> None:
    """Gives this fork its standard streams (-1: the parent's) and of other files those passed."""
    copies = [fd if fd < 0 else os.dup(fd) for fd in streams]
    for stream, copy in enumerate(copies):
        if copy >= 0:
            os.dup2(copy, stream)
    before = 3
    for kept in sorted(passed):
        os.closerange(before, kept)
        before = kept + 1
    os.closerange(before, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)


def keep_children_warm() -> None:
    """From now on this fork's children are forks where they can be."""
    register, registered = atexit.register, []

    def noted(function, *arguments, **options):
        registered.append(function)
        return register(function, *arguments, **options)

    atexit.register = noted
    WarmPopen.at_exit = registered
    WarmPopen.modules = {
        name: {**vars(module)} for name, module in sys.modules.items() if name[:6] == "tpukit"
    }
    subprocess.Popen = WarmPopen


def connected(path: Path, seconds: float = 300) -> socket.socket:
    """A connection to the server of this socket, which may still import what it needs."""
    connection, end = socket.socket(socket.AF_UNIX), time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(str(path))
            return connection
        time.sleep(0.1)
    raise TimeoutError(f"no server at {path}")


def serve_each(path: str) -> None:
    """Returns in a fork for each connection, which is its input and output; ends with its input."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            for stream in (0, 1):
                os.dup2(connection.fileno(), stream)
            listener.close()
            connection.close()
            return
        connection.close()
    sys.exit()


def serve(stack: str, path: str | None = None) -> None:
    """Forks for each request until standard input, or each connection to `path`, ends."""
    begun = dict(os.environ)
    kept = import_torch_xla() if stack == "torch_xla" else import_torch()
    for module in MET_BY_MOST:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    if path:
        serve_each(path)
    print(json.dumps(begun), flush=True)
    for line in sys.stdin:
        argv, environment, cwd, out, err, limits, session, ranks = json.loads(line)
        joining = variables_of_ranks(ranks)
        children = []
        for own in joining:
            pid = os.fork()
            if pid == 0:
                open_streams(out, err)
                become({**kept, **environment, **own}, cwd)
                keep_children_warm()
                if session:
                    os.setsid()
                for limit, value in limits.items():
                    resource.setrlimit(int(limit), (value, value))
                os._exit(run(argv))
            children.append(pid)
        print(children[0], flush=True)
        print(wait_for(children), flush=True)
    os._exit(0)  # without freeing each object


def import_torch() -> dict[str, str]:
    """What GPU and CPU runs import; no variables to keep."""
    # As `prepare_environment` does; accelerate would import torch_xla.
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "USE_TORCH_XLA": "0"}
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
        elif argv[0] == MODULE:
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
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


def become(environment: dict[str, str], cwd: str | Path) -> None:
    """Gives this fork the environment and the folder of a new process, which has found nothing."""
    for module in [m for name, m in sys.modules.items() if name[:6] == "tpukit"]:
        for value in [*vars(module).values()]:
            getattr(value, "cache_clear", int)()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(cwd)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(cwd), *added, *(p for p in NEW_PATH[1:] if p not in added)]


def open_streams(out: str, err: str) -> None:
    """No input, and two files for the outputs."""
    for stream, path in ((0, os.devnull), (1, out), (2, err)):
        flags = os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, stream)
        os.close(opened)


if __name__ == "__main__":
    serve(*sys.argv[1:])
