"""Starts torchrun with one rank a device, passes signals on, returns the failed rank's exit code.

torchrun exits 1 whenever a rank fails, with a page of traceback, and ends the other ranks at once,
which may be printing an error of their own. Here each rank writes how it ends to a folder, and the
launcher prints one rank's error.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from tpukit.errors import HardwareError, JobError
from tpukit.hardware.options import HardwareOptions
from tpukit.io.files import write_file
from tpukit.io.interrupts import STOPPED_CODES, handling, is_impatient
from tpukit.io.process import PARENT_VARIABLE, allowed_cores

STATUS_VARIABLE = "TPUKIT_STATUS"
"""The folder where each rank of a launch writes its process id, exit code and output."""
LOOPBACK = "127.0.0.1"
SHOWN_LINES = 20
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_END = 5.0
"""Time that the other ranks have to end after a failure, before it is printed all the same."""
FOLLOWING = ("rank-failed", "node-lost")
"""Ids of errors that another rank's end causes."""


@dataclass(frozen=True)
class RankStatus:
    """How one rank ended, and the error that it leaves to the launcher to print."""

    rank: int
    attempt: int
    exit_code: int
    ended_at: float
    error_id: str = ""
    stderr: str = ""
    stdout: str = ""

    @property
    def is_cause(self) -> bool:
        """Whether it failed by itself: the others were asked to stop, by a signal or torchrun."""
        return self.exit_code not in (0, *STOPPED_CODES)


def is_launched() -> bool:
    """Whether torchrun (ours or the user's) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    arguments: Sequence[str], ranks: int, options: HardwareOptions, *, module: str = "tpukit"
) -> int:
    """Runs `python -m MODULE ARGUMENTS` as `ranks` processes of this host; their exit code.

    Signals are passed on: after SIGINT, SIGTERM and SIGHUP the code is 130, 143 and 129.

    Raises:
        HardwareError: the port is taken.
        JobError: a rank was killed before it could write its error.
    """
    if options.master_port is not None:
        check_port(options.master_port)
    with tempfile.TemporaryDirectory(prefix="tpukit-launch-") as folder:
        status = Path(folder)
        torchrun = subprocess.Popen(
            torchrun_command(
                [module, *arguments], ranks, options.master_port, options.max_restarts
            ),
            env=_environment(status, ranks),
            # A Ctrl-C at the terminal must reach the ranks once, through this process.
            start_new_session=True,
        )
        with _passing_signals_on(torchrun, status) as received:
            code, printed = _wait(torchrun, status)
        return _exit_code(code, read_statuses(status), received, status, printed)


def _wait(torchrun: subprocess.Popen[bytes], status: Path) -> tuple[int, set[int]]:
    """torchrun's exit code, and the attempts whose failure was printed meanwhile.

    A rank that hangs in another one's absence is killed by torchrun after 30 s.
    """
    printed: set[int] = set()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return torchrun.wait(SECONDS_BETWEEN_LOOKS), printed
        ended = [s for s in read_statuses(status) if s.attempt not in printed]
        failed = [s for s in ended if s.is_cause]
        if failed and time.time() - failed[0].ended_at > SECONDS_TO_END:
            printed.add(failed[0].attempt)
            _print_failure(status, [s for s in failed if s.attempt == failed[0].attempt])


def torchrun_command(
    arguments: Sequence[str], ranks: int, master_port: int | None, max_restarts: int = 0
) -> list[str]:
    """torchrun's command line; each rank runs `tpukit.hardware.launch.rank ARGUMENTS`."""
    rendezvous = (
        ["--standalone"]
        if master_port is None
        else [f"--master-addr={LOOPBACK}", f"--master-port={master_port}"]
    )
    return [
        *(sys.executable, "-m", "tpukit.hardware.launch.torchrun"),
        *(f"--nproc-per-node={ranks}", f"--local-addr={LOOPBACK}", *rendezvous),
        f"--max-restarts={max_restarts}",
        # After "--" torchrun does not read our options (--run, say) as abbreviations of its own.
        *("-m", "--", "tpukit.hardware.launch.rank", *arguments),
    ]


def check_port(port: int) -> None:
    """Raises `HardwareError` where another program has the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise HardwareError(
                f"--master-port {port}: {error.strerror or error}.",
                "Leave --master-port out to use a free port.",
                id="port-in-use",
            ) from error


def read_statuses(folder: Path) -> list[RankStatus]:
    """What the ranks wrote, in the order in which they ended."""
    statuses = [RankStatus(**json.loads(f.read_text())) for f in folder.glob("exit-*.json")]
    return sorted(statuses, key=lambda status: (status.attempt, status.ended_at))


def leave_status(exit_code: int, *, error_id: str = "", stderr: str = "", stdout: str = "") -> bool:
    """Leaves to the launcher how this rank ends; what was left first stays.

    Returns whether there is a launcher: a rank's child processes have none.
    """
    if not (folder := os.environ.get(STATUS_VARIABLE)):
        return False
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if (Path(folder) / f"pid-{rank}").read_text() != str(os.getpid()):
        return False
    file = Path(folder) / f"exit-{attempt}-{rank}.json"
    if not file.exists():
        status = RankStatus(rank, attempt, exit_code, time.time(), error_id, stderr, stdout)
        write_file(file, json.dumps(asdict(status)).encode(), sync=False)
    return True


def _environment(status: Path, ranks: int) -> dict[str, str]:
    threads = max(1, allowed_cores() // ranks)
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    return {
        "OMP_NUM_THREADS": str(threads),
        # The ranks of one host need no other interface.
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        **os.environ,
        STATUS_VARIABLE: str(status),
        PARENT_VARIABLE: str(os.getpid()),
    }


@contextmanager
def _passing_signals_on(torchrun: subprocess.Popen[bytes], status: Path) -> Iterator[list[int]]:
    """Passes signals to the ranks as SIGTERM: torchrun would kill them after 30 s.

    A later SIGINT reaches them as such (those that are not saving end), and then torchrun.
    """
    received: list[int] = []
    started = time.monotonic()

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal started
        if not received:
            started = time.monotonic()
        elif not is_impatient(number, time.monotonic() - started):
            return
        received.append(number)
        files = status.glob("pid-*") if len(received) <= 2 else ()
        ranks = [int(file.read_text()) for file in files]
        for process in ranks or [torchrun.pid]:
            _send(process, signal.SIGINT if ranks and len(received) == 2 else signal.SIGTERM)

    with handling(pass_on):
        yield received


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _exit_code(
    torchrun_code: int, statuses: list[RankStatus], received: list[int], folder: Path,
    printed: set[int],
) -> int:  # fmt: skip
    last = [s for s in statuses if s.attempt == statuses[-1].attempt]
    failed = [s for s in last if s.exit_code != 0]
    causes = [s for s in failed if s.is_cause]
    if causes:
        if killed := _killed(folder):
            # The others fail because of it: their errors are not the cause.
            print(f"{killed}.", file=sys.stderr)
        if causes[0].attempt not in printed:
            _print_failure(folder, causes)
        return _first(causes).exit_code
    if received and (failed or torchrun_code != 0):
        return 128 + received[0]
    if failed:
        return failed[0].exit_code
    if torchrun_code == 0:
        return 0
    raise JobError(
        f"{_killed(folder) or 'a rank was killed'} before it could write its error.",
        "Run the same command again to resume from the last checkpoint. SIGKILL often means that "
        "the host ran out of memory (see `dmesg`): lower --num-workers.",
        id="process-killed",
    )


def _first(causes: list[RankStatus]) -> RankStatus:
    """Rank 0 where it made the mistake itself, else the rank that failed first."""
    own = (s for s in causes if s.rank == 0 and s.error_id not in ("", *FOLLOWING))
    return next(own, causes[0])


def _print_failure(folder: Path, causes: list[RankStatus]) -> None:
    """Prints the error of one rank: others often make the same mistake."""
    first = _first(causes)
    print(first.stdout, end="", flush=True)
    mark = f"[rank {first.rank}] " if first.rank else ""
    # Rank 0 prints other errors than tpukit's by itself; other ranks write to a file.
    output = folder / f"output-{first.rank}.txt"
    lines = output.read_text(errors="replace").splitlines()[-SHOWN_LINES:] if first.rank else []
    for line in [*lines, *first.stderr.splitlines()]:
        print(mark + line, file=sys.stderr, flush=True)


def _killed(folder: Path) -> str:
    """The ranks that a signal ended, as text; empty where there are none."""
    files = sorted(folder.glob("killed-*"))
    ends = [f"rank {f.name.removeprefix('killed-')} ended by {f.read_text()}" for f in files]
    return ", ".join(ends)
