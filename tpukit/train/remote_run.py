"""A run folder at an address: the run writes to a copy here, which is sent at each checkpoint.

A checkpoint is there once its state file is, which is written last and removed first. The pointers
are for people: readers take the newest state file. One run writes at a time: it keeps renewing a
small file, and ends where another has replaced it.
"""

import hashlib
import json
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tpukit.errors import CheckpointError, UsageError
from tpukit.io.files import write_file
from tpukit.io.lock import exclusive
from tpukit.io.mirror import mark_used, mirror_of
from tpukit.io.process import is_alive
from tpukit.io.remote import Entry, Remote, RemoteError, require_run_writable
from tpukit.train.checkpoint import (
    FOLDER_NAME,
    KEPT,
    STATE_FILE,
    list_checkpoints,
    name_of,
    open_checkpoint,
    point,
)

CHECKPOINTS, CONFIG, LEASE = "checkpoints", "config.toml", ".lock.json"
LEASE_SECONDS, BEAT_SECONDS = 45.0, 15.0
"""Time without a beat after which a run on another host counts as ended, and between beats."""
NOT_PULLED = ("events.out.", "profile/", ".")
"""How names of files begin that a run leaves and nobody here reads."""
SENDINGS = 3
"""Number of times that the files of a checkpoint are sent where some are not there afterwards."""
APPENDED = (".txt", ".jsonl")
"""Suffixes of files that a run appends to: a copy that begins alike and is longer is newer."""

Log = Callable[[str], None]


class RunStore:
    """Where a run folder is kept; of a folder of this machine there is nothing to do."""

    @contextmanager
    def claimed(self, log: Log) -> Iterator[None]:
        """Keeps other runs away; the caller has locked the folder here."""
        yield

    def set_aside(self) -> str | None:
        """Moves an old run to a new address; this, or None where there was none."""
        return None

    def pull(self, *, best: bool = False) -> None:
        """Brings the newest good checkpoint here, or the best one, and the small files."""

    def publish(self) -> None:
        """Sends the checkpoints and the other files that have changed here."""

    def publish_files(self) -> None:
        """Sends what has changed here beside checkpoints."""

    def send_shard(self, path: Path) -> None:
        """Moves a file of a checkpoint that is being written, on another host than the first."""


class RemoteRun(RunStore):
    """A run at an address; `path` is its copy here."""

    def __init__(self, path: Path, address: str) -> None:
        self.path, self.checkpoints = path, path / CHECKPOINTS
        self.remote = Remote(address)
        self._sent: dict[Path, tuple[int, int]] = {}
        """What was sent, or came: time of the last change and size."""
        self._committed: dict[str, tuple[str, Any]] = {}
        """Checkpoint -> digest of its state file there, and the sums of its files."""
        self._lease: Lease | None = None

    @contextmanager
    def claimed(self, log: Log) -> Iterator[None]:
        require_run_writable(self.remote)
        with Lease(self.remote, log) as lease:
            self._lease = lease
            yield
        self._lease = None

    def set_aside(self) -> str | None:
        names, number = sorted(self.remote.find()), 1
        shutil.rmtree(self.path, ignore_errors=True)
        if not any(name.startswith((CHECKPOINTS, CONFIG)) for name in names):
            return None
        while (aside := Remote(f"{self.remote.address}.old-{number}")).find():
            number += 1
        # The state files last: until then the new copy has no checkpoint.
        names = sorted(set(names) - {LEASE}, key=lambda name: name.endswith(STATE_FILE))
        for name in names:
            self.remote.copy(name, aside)
        self.remote.remove(reversed(names))
        return aside.address

    # -- reading ----------------------------------------------------------------------------------
    def pull(self, *, best: bool = False) -> None:
        mirror = mirror_of(self.remote.address)
        with exclusive(mirror / "lock", wait=True):
            mark_used(mirror)
            found = self.remote.find()
            if CONFIG not in found and not _complete(found):
                for path in self.path.glob("*") if self.path.is_dir() else ():
                    _remove_here(path)
                return
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._pull_files(found)
            self._pull_checkpoint(found, best=best)

    def _pull_files(self, found: dict[str, Entry]) -> None:
        for name, entry in found.items():
            path = self.path / name
            if name.startswith((f"{CHECKPOINTS}/", *NOT_PULLED)):
                continue
            if name.endswith(APPENDED):
                content = self.remote.read(name) or b""
                if not (path.is_file() and path.read_bytes().startswith(content)):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_file(path, content, sync=False)
            else:
                self.remote.download(name, path, entry.size)
        self._sent = {
            path: _state_of(path)
            for name, entry in found.items()
            if (path := self.path / name).is_file() and path.stat().st_size == entry.size
        }

    def _pull_checkpoint(self, found: dict[str, Entry], *, best: bool) -> None:
        """The newest good checkpoint, or the best one, and what its state says of the others."""
        names = _complete(found)
        for path in list_checkpoints(self.checkpoints):
            if path.name not in names:
                _remove_here(path)
        wanted = names
        if best and names and (chosen := self._best_by(names[0])) in names:
            wanted = [chosen, *(name for name in names if name != chosen)]
        for name in wanted:
            if self._bring(name, found):
                break
        for pointer, there in (
            ("latest", names[:1]),
            ("best", [self._best_by(n) for n in names[:1]]),
        ):
            if there and there[0] and (self.checkpoints / there[0]).is_dir():
                point(self.checkpoints / pointer, there[0])

    def _best_by(self, name: str) -> str | None:
        """The best checkpoint, as a checkpoint's state file there says."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            body = json.loads(self.remote.read(f"{CHECKPOINTS}/{name}/{STATE_FILE}") or b"")
            return name_of(int(body["best"]["step"]))
        return None

    def _bring(self, name: str, found: dict[str, Entry]) -> bool:
        """Copies a checkpoint here, once more where it does not verify: whether it does."""
        there, here = f"{CHECKPOINTS}/{name}/", self.checkpoints / name
        state = self.remote.read(f"{there}{STATE_FILE}") or b""
        kept = here / STATE_FILE
        if not (kept.is_file() and kept.read_bytes() == state):
            _remove_here(here)
        for _ in range(2):
            for file in (file for file in found if file.startswith(there)):
                path, size = self.path / file, found[file].size
                if file != f"{there}{STATE_FILE}" and not (
                    path.is_file() and path.stat().st_size == size
                ):
                    self.remote.download(file, path, size)
            here.mkdir(parents=True, exist_ok=True)
            write_file(here / STATE_FILE, state, sync=False)
            with suppress(CheckpointError):
                open_checkpoint(here)
                self._committed[name] = _digest(state), _sums(state)
                return True
            _remove_here(here)
        here.mkdir(parents=True, exist_ok=True)
        write_file(here / STATE_FILE, state, sync=False)  # so that the run says which was skipped
        return False

    # -- writing ----------------------------------------------------------------------------------
    def publish(self) -> None:
        if self._lease is not None:
            self._lease.require()
        self._send(self.path / CONFIG)
        newest = list_checkpoints(self.checkpoints)
        for path in reversed(newest):
            self._commit(path)
        if newest:
            self._point_and_prune(newest[0])
        self.publish_files()

    def publish_files(self) -> None:
        for path in sorted(self.path.rglob("*")):
            if not path.is_relative_to(self.checkpoints) and not path.name.startswith("."):
                self._send(path)

    def _send(self, path: Path) -> None:
        """Sends a file, if it is one that has changed."""
        if path.is_file() and self._sent.get(path) != (state := _state_of(path)):
            self.remote.upload(path, path.relative_to(self.path).as_posix())
            self._sent[path] = state

    def _commit(self, path: Path) -> None:
        """Sends a checkpoint whose state file is not there yet."""
        state = (path / STATE_FILE).read_bytes()
        before = self._committed.get(path.name)
        if before and before[0] == _digest(state):
            return
        there = f"{CHECKPOINTS}/{path.name}"
        sums = _sums(state)
        files = {name: path / name for name in sums or () if (path / name).is_file()}
        if not files:
            return  # one that is damaged there
        if before is None or before[1] != sums:
            self.remote.remove([f"{there}/{STATE_FILE}"])
            self._send_whole(there, files, sums)
        self.remote.write(f"{there}/{STATE_FILE}", state)
        self._committed[path.name] = _digest(state), sums

    def _send_whole(self, there: str, files: Mapping[str, Path], names: Iterable[str]) -> None:
        """Sends the files that are here; other hosts have sent the others of these names.

        Raises RemoteError where one is not there in its whole length afterwards.
        """
        own = {name: path.stat().st_size for name, path in files.items()}
        missing = {*files}
        for _ in range(SENDINGS):
            for name in sorted(missing & files.keys()):
                self.remote.upload(files[name], f"{there}/{name}")
            found = self.remote.find(there)
            sizes = {n: found[f"{there}/{n}"].size for n in names if f"{there}/{n}" in found}
            missing = {n for n in names if n not in sizes or sizes[n] != own.get(n, sizes[n])}
            if not missing:
                return
        name = min(missing)
        raise RemoteError(
            f"{self.remote.address}/{there}/{name} has {sizes.get(name, 0)} bytes after it was"
            " written.",
            "The checkpoint before is intact; the same command goes on from it.",
        )

    def send_shard(self, path: Path) -> None:
        name = path.parent.name.removeprefix(".").removesuffix(".partial")
        self.remote.upload(path, f"{CHECKPOINTS}/{name}/{path.name}")
        path.unlink()

    def _point_and_prune(self, newest: Path) -> None:
        """Writes the pointers and removes superseded checkpoints and parts of such there."""
        best = json.loads((newest / STATE_FILE).read_bytes()).get("best", {}).get("step")
        pointers = {"latest": newest.name, **({"best": name_of(int(best))} if best else {})}
        for pointer, name in pointers.items():
            self.remote.write(f"{CHECKPOINTS}/{pointer}", f"{name}\n".encode())
        found = self.remote.find(CHECKPOINTS)
        kept = {*_complete(found)[:KEPT], *pointers.values()}
        doomed = [
            file for file in found
            if FOLDER_NAME.fullmatch(of := file.split("/")[1]) and of not in kept
        ]  # fmt: skip
        self.remote.remove(sorted(doomed, key=lambda file: not file.endswith(STATE_FILE)))
        for name in {file.split("/")[1] for file in doomed}:
            self._committed.pop(name, None)


def _complete(found: Iterable[str]) -> list[str]:
    """The names of the checkpoints whose state file is there, the newest first."""
    parts = (name.split("/") for name in found if name.endswith(f"/{STATE_FILE}"))
    names = [part[1] for part in parts if part[0] == CHECKPOINTS and FOLDER_NAME.fullmatch(part[1])]
    return sorted(names, key=lambda name: int(name[5:]), reverse=True)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sums(state: bytes) -> Any:
    """The sums of a checkpoint's files; of a damaged state file None."""
    with suppress(ValueError, AttributeError):
        return json.loads(state).get("sha256")
    return None


def _state_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _remove_here(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif not path.name.startswith(".lock"):  # its holder is this process
        path.unlink(missing_ok=True)


class Lease:
    """A file at a run's address that its one live run renews."""

    def __init__(self, remote: Remote, log: Log) -> None:
        self._remote, self._log = remote, log
        self._own: dict[str, Any] = {
            "owner": uuid.uuid4().hex, "host": platform.node(), "process": os.getpid(), "beat": 0
        }  # fmt: skip
        self._beats = not remote.address.startswith("hf://")
        """Whether it is renewed: on the hub each write is a commit."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        held = self._read()
        if held and held != self._read_until_changed(held):
            raise self._held_by(held)
        self._write()
        if self._beats:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._beats:
            self._thread.join()
        with suppress(RemoteError):
            if (self._read() or {}).get("owner") == self._own["owner"]:
                self._remote.remove([LEASE])

    def require(self) -> None:
        """Raises UsageError where another run has taken over."""
        held = self._read() or self._own
        if held.get("owner") != self._own["owner"]:
            raise self._held_by(held)

    def _read_until_changed(self, held: dict[str, Any]) -> dict[str, Any]:
        """The lease once it has changed, or has not for long enough; a missing one is the same."""
        here, process = held.get("host") == platform.node(), held.get("process")
        if here and (process == os.getpid() or not is_alive(int(process or 0))):
            return held
        if not self._beats:  # a run that lives ends at its next checkpoint
            return held
        end = time.monotonic() + LEASE_SECONDS
        self._log(
            f"A run on {held.get('host')} (process {process}) was writing to"
            f" {self._remote.address}: waiting {LEASE_SECONDS:.0f} s for a sign of it."
        )
        while time.monotonic() < end:
            time.sleep(1.0)
            if (now := self._read() or held) != held:
                return now
        return held

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(RemoteError):
                held = self._read()
                if held is not None and held.get("owner") != self._own["owner"]:
                    return
                self._write()

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._remote.read(LEASE) or b"")
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _write(self) -> None:
        self._own["beat"] += 1
        self._remote.write(LEASE, json.dumps(self._own).encode())

    def _held_by(self, held: dict[str, Any]) -> UsageError:
        return UsageError(
            f"Another run is writing to {self._remote.address} (process"
            f" {held.get('process')} on {held.get('host')}).",
            "Wait for it, end it, or choose another folder with --results-dir.",
            id="run-locked",
        )


def store_of(path: Path, address: str | None) -> RunStore:
    """Where a run folder is kept: one store an address, which knows what it has sent."""
    if address is None:
        return RunStore()
    return _STORES.setdefault(address, RemoteRun(path, address))


_STORES: dict[str, RunStore] = {}
