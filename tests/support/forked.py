"""Command lines of tpukit and scripts, in forks of a process that has imported what is slow.

A server has imported torch and accelerate, or torch_xla without opening a device. For each request,
a JSON line, it forks. Modules of tpukit that such a fork starts as children (trials, parts of the
self-test, torchrun and its ranks) are forks in turn. Test processes of one run share two servers:
each has connections of its own to them.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import select
import shutil
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
from pathlib import Path
from typing import IO, ClassVar

from cells import run_cells

CELLS = "--cells"
"""Instead of a command line of tpukit: the cells of a notebook, in a JSON file."""
MODULE, SCRIPT = "--module", "--script"
"""Instead of a command line of tpukit: a module's name or a script's path, and its arguments."""
READ_LATE = (
    "AWS_", "BROKEN_KERNELS", "COLUMNS", "CPU_NUM_DEVICES", "CUDA_VISIBLE_DEVICES",
    "GLOO_", "GROUP_", "HF_TOKEN", "HOME", "JAX_", "LOCAL_", "MASTER_", "NCCL_",
    "PJRT_DEVICE", "PYTEST_", "PYTHONFAULTHANDLER", "RANK", "ROLE_", "SMALL_MACHINE", "STUCK_FILE",
    "TMPDIR", "TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_NCCL_", "TPUKIT_", "WANDB_",
    "WORLD_SIZE", "XDG_CACHE_HOME", "XLA_FLAGS",
)  # fmt: skip
"""Variables, by how they begin, that nothing reads when it is imported: a fork may set them."""
MET_BY_MOST = (
    "jinja2", "matplotlib.backends.backend_agg", "matplotlib.figure", "rouge_score.rouge_scorer",
    "scipy.linalg", "scipy.spatial", "tensorboard.compat.tensorflow_stub.pywrap_tensorflow", "timm",
    "tpukit.cli", "tpukit.commands.test", "tpukit.commands.train", "tpukit.train.report.page",
    "tpukit.train.run", "typer._adapters", "typer.rich_utils",
)  # fmt: skip
"""Modules that most commands import."""
NEW_PATH = tuple(sys.path)
"""`sys.path` when this process was new."""
READ_BY_XLA = ("ALLOW_MULTIPLE_LIBTPU_LOAD", "CXX", "TF_CPP_", "TPU_", "USE_TORCH_XLA", "XLA_")
"""What else a fork may set where torch_xla is not yet imported."""
SET_BY_COMMANDS = ("GRPC_VERBOSITY", "PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL", "TORCH_WARM_POOL")
"""Variables that each command sets for itself: one that ran in a test process has left them."""
UNOPTIMIZED = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
SHARED = "PYTEST_FORK_SERVERS"
"""The variable that names the folder of the servers' sockets."""
MARK = "TPUKIT_TEST_MARK"
"""The variable that marks a command line's processes; see `runs.marked_processes`."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
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


def start_server(stack: str, folder: str) -> subprocess.Popen[bytes]:
    """The server of `stack` at a socket in `folder`; it ends when its standard input does."""
    command = [sys.executable, __file__, stack, str(Path(folder, stack))]
    return subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE)


@functools.cache
def own_server(stack: str) -> tuple[str, subprocess.Popen[bytes]]:
    """A folder with the socket of a server that this process has for itself, and the server."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return folder, start_server(stack, folder)


class Connection:
    """To a fork of a server, which runs one command line at a time."""

    idle: ClassVar[dict[str, list[Connection]]] = {"torch": [], "torch_xla": []}

    def __init__(self, stack: str, seconds: float = 300) -> None:
        path = str(Path(os.environ.get(SHARED) or own_server(stack)[0], stack))
        connection, end = socket.socket(socket.AF_UNIX), time.monotonic() + seconds
        while connection.connect_ex(path) and time.monotonic() < end:
            time.sleep(0.1)  # it imports
        self.stack, self.file = stack, connection.makefile("rwb", 0)

    @classmethod
    def to(cls, stack: str) -> Connection:
        """An idle one, or a new one."""
        return cls.idle[stack].pop() if cls.idle[stack] else cls(stack)

    def release(self) -> None:
        """What was asked for is done."""
        self.idle[self.stack].append(self)


@functools.cache
def begun() -> dict[str, str]:
    """The environment before the first test: what libraries have set by then means nothing."""
    return environment()


def can_set(stack: str, wanted: Mapping[str, str]) -> bool:
    """Whether a fork of this stack's server behaves in an environment as a new process does."""
    before = {**begun(), **{n: wanted[n] for n in SET_BY_COMMANDS if n in wanted}}
    return is_late(wanted, before, with_xla=stack == "torch_xla")


class ForkedCommand(subprocess.Popen[str]):
    """`python -m tpukit *argv`, or what CELLS, MODULE and SCRIPT say, as a fork.

    `ranks`: processes that join as under torchrun; `limits`: their resource limits.
    """

    def __init__(
        self, argv: list[str], stack: str, ranks: int = 1,
        limits: dict[int, int] | None = None, **options,
    ) -> None:  # fmt: skip
        self.connection, self.ranks, self.limits = Connection.to(stack), ranks, limits or {}
        unread = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        super().__init__(argv, **{**unread, "text": True, **options})

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        pipes, session = others[3:9], others[14]
        streams = [
            f"/proc/{os.getpid()}/fd/{stream if own < 0 else own}"
            for stream, own in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        request = [args, env, str(cwd or Path.cwd()), streams, session, self.ranks, self.limits]
        self.connection.file.write(json.dumps(request).encode() + b"\n")
        self.pid = int(self.connection.file.readline())
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _answers(self) -> bool:
        return bool(select.select([self.connection.file], [], [], 0)[0])

    def _status(self) -> int:
        status = int(self.connection.file.readline())
        self.connection.release()
        return status

    def _internal_poll(self, _deadstate=None):
        if self.returncode is None and self._answers():
            self.returncode = os.waitstatus_to_exitcode(self._status())
        return self.returncode

    def _try_wait(self, wait_flags):
        if wait_flags == os.WNOHANG and not self._answers():
            return 0, 0
        return self.pid, self._status()


class CommandsAsForks(subprocess.Popen):
    """Starts command lines of tpukit as forks of a server; all else as it is done."""

    def __new__(cls, args, env=None, **options):
        variables = os.environ if env is None else env
        is_command = args[:3] == [sys.executable, "-m", "tpukit"]
        if is_command and has_only_new_names(variables.get("PYTHONPATH", "")):
            return ForkedCommand(args[3:], stack_of(args, variables), env=variables, **options)
        return super().__new__(cls)


def stack_of(argv: Sequence[str], variables: Mapping[str, str]) -> str:
    """The server of a command line: of torch_xla where it trains or tests on virtual devices."""
    hw = argv[argv.index("--hw") + 1] if "--hw" in argv else "auto"
    return "torch_xla" if "PJRT_DEVICE" in variables and hw in ("auto", "tpu") else "torch"


def completed(
    argv: list[str], stack: str, env: Mapping[str, str], cwd: Path | None, timeout: float,
    ranks: int = 1,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """What a forked command line does, its output captured."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        streams = {"stdout": out, "stderr": err}
        with ForkedCommand(argv, stack, ranks, env=env, cwd=cwd, **streams) as command:
            try:
                status = command.wait(timeout)
            except subprocess.TimeoutExpired:
                command.kill()
                raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(argv, status, out.read(), err.read())


def is_late(wanted: Mapping[str, str], present: Mapping[str, str], *, with_xla: bool) -> bool:
    """Whether the variables that differ are such as a fork may set."""
    late = READ_LATE if with_xla else (*READ_LATE, *READ_BY_XLA)
    changed = {n for n in wanted.keys() | present.keys() if wanted.get(n) != present.get(n)}
    if "PYTHONPATH" in changed and has_only_new_names(wanted.get("PYTHONPATH", "")):
        changed.remove("PYTHONPATH")
    return all(name.startswith(late) for name in changed)


def has_only_new_names(path: str) -> bool:
    """Whether folders of PYTHONPATH hold nothing that would have to be there at the first import.

    Their `sitecustomize.py` is run by a fork; that of torch_tpu would come too late.
    """
    taken = ("torch", "torch_xla", "jax", "timm", "scipy", "matplotlib")
    folders = [*map(Path, path.split(os.pathsep))]
    return not any((folder / name).exists() for folder in folders for name in taken) and not any(
        folder.name == "torch_tpu_on_cpu" for folder in folders
    )


class WarmPopen(subprocess.Popen[bytes]):
    """Starts modules of tpukit, and torchrun, as forks of this process; all else as it is done."""

    at_exit: ClassVar[list[Callable[..., object]]] = []
    """What this process has registered since it was forked."""
    modules: ClassVar[dict[str, dict[str, object]]] = {}
    """The modules of tpukit when it was forked, and what their names stood for."""
    clears: ClassVar[list[Callable[[], None]]] = []
    """What empties the caches of these modules' functions."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        argv = module_in(args)
        with_xla, wanted = "torch_xla" in sys.modules, os.environ if env is None else env
        if not argv or preexec_fn or not is_late(wanted, os.environ, with_xla=with_xla):
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
    leave_to_the_end_of_all()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()


def leave_to_the_end_of_all() -> None:
    """What is finalized at a process's end so far is not in its forks: torch's operators alone take
    half of the time of a short command."""
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False


def join_pages() -> None:
    """Makes huge pages of this process's memory, where Linux can: each fork copies the table of its
    pages and frees it again, which takes longer than a short command."""
    collapse, huge = 25, 2**21  # MADV_COLLAPSE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in span.split("-"))
        begin, end = -(-begin // huge) * huge, end // huge * huge
        if access == "rw-p" and inode == "0" and begin < end:
            madvise(begin, end - begin, collapse)


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
    """From now on children of this process' forks are forks where they can be.

    Done once, before the forks: each object that one looks at costs it a copy of a page.
    """
    register, registered = atexit.register, []

    def noted(function, *arguments, **options):
        registered.append(function)
        return register(function, *arguments, **options)

    atexit.register = noted
    WarmPopen.at_exit = registered
    WarmPopen.modules = {
        name: {**vars(module)} for name, module in sys.modules.items() if name[:6] == "tpukit"
    }
    values = [value for kept in WarmPopen.modules.values() for value in kept.values()]
    WarmPopen.clears = [value.cache_clear for value in values if hasattr(value, "cache_clear")]
    subprocess.Popen = WarmPopen


def serve(stack: str, path: str) -> None:
    """Forks for each connection, and these for each request, until standard input ends."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it, and forks would
    kept = import_torch_xla() if stack == "torch_xla" else import_torch()
    for module in MET_BY_MOST:
        with suppress(ImportError):
            importlib.import_module(module)
    keep_children_warm()
    leave_to_the_end_of_all()
    gc.collect()
    gc.freeze()
    join_pages()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            os.dup2(connection.fileno(), 0)
            listener.close()
            connection.close()
            requests = socket.socket(fileno=0).makefile("rwb", 0)
            for line in requests:
                answer(line, requests, kept)
            os._exit(0)  # without freeing each object
        connection.close()


def answer(line: bytes, answers: IO[bytes], kept: dict[str, str]) -> None:
    """Forks for a request; writes the first child's process id, and then the wait status."""
    argv, environment, cwd, paths, session, ranks, limits = json.loads(line)
    to_write = os.O_WRONLY | os.O_APPEND
    streams = [os.open(path, to_write if n else os.O_RDONLY) for n, path in enumerate(paths)]
    children = []
    for own in variables_of_ranks(ranks):
        pid = os.fork()
        if pid == 0:
            for stream, opened in enumerate(streams):
                os.dup2(opened, stream)
                os.close(opened)
            become({**kept, **environment, **own}, cwd)
            if session:
                os.setsid()
            for limit, value in limits.items():
                resource.setrlimit(int(limit), (value, value))
            os._exit(run(argv))
        children.append(pid)
    for opened in streams:
        os.close(opened)
    answers.write(b"%d\n" % children[0])
    status = wait_for(children)
    # Nobody waits for a command that a test has killed.
    with suppress(BrokenPipeError):
        answers.write(b"%d\n" % status)


def import_torch() -> dict[str, str]:
    """What GPU and CPU runs import; no variables to keep."""
    # As `prepare_environment` does; accelerate would import torch_xla.
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "USE_TORCH_XLA": "0"}
    import accelerate  # noqa: F401
    import torch._dynamo  # noqa: F401

    import tpukit.hardware.eager.backend
    import tpukit.probe.gpu_memory.traced_step  # noqa: F401

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
    for clear in WarmPopen.clears:
        clear()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if mark := environment.get(MARK):
        os.memfd_create(mark)  # an open file: /proc keeps the environment of the server
    os.chdir(cwd)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    changes = [Path(p, "sitecustomize.py") for p in added if p not in sys.path]
    sys.path[:] = [str(cwd), *added, *(p for p in NEW_PATH[1:] if p not in added)]
    for change in filter(Path.is_file, changes):
        runpy.run_path(str(change))


if __name__ == "__main__":
    serve(*sys.argv[1:])
