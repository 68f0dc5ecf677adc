"""Files in object stores and on other machines: any address that fsspec opens (`s3://...`).

No rename, lock or partial write is relied on: a file is written whole or not at all. Each request
is tried again until a deadline, and given up where nothing moves.
"""

import asyncio
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tpukit.errors import ConfigError, JobError, UsageError
from tpukit.io.files import replacing
from tpukit.io.secrets import HIDDEN, without_secrets

FULL, COLLAPSED = re.compile(r"([a-z][a-z0-9+.-]+)://.+"), re.compile(r"([a-z][a-z0-9+.-]+):/[^/]")
"""An address, and what `Path` makes of one."""
LOCAL = ("file", "local")
"""Schemes of folders of this machine: its tests, and mounted ones that do not rename."""
ATTEMPT_SECONDS, DEADLINE_SECONDS = 12.0, 40.0
"""Time without progress after which a request is sent again, and after which it has failed."""
SLOWEST_BYTES, PART_BYTES = 2**20, 64 * 2**20
"""Bytes a second of the slowest link that is waited for, and bytes between signs of progress."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between a failed attempt and the next one: doubled up to the longest."""
DOWNLOADS = 3
"""Downloads of a file that comes cut short."""
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
"""What another attempt would not change."""


def address_of(place: str | Path | None) -> str | None:
    """The address that a text, or a path made of one, names; None for a path of this machine.

    Raises ConfigError for one that holds a password: it would be kept in the run's files.
    """
    text = str(place or "")
    if isinstance(place, Path) and (scheme := COLLAPSED.match(text)):
        text = text.replace(":/", ":///" if scheme[1] in LOCAL else "://", 1)
    found = FULL.fullmatch(text)
    if found is None:
        return None
    if re.match(r"[^/]*:[^/]*@", text.partition("://")[2]):
        raise ConfigError(
            f"{without_secrets(text)}: its password would be kept in the files of the run.",
            "Give it as the package of this scheme takes it: in its variables or files.",
        )
    return text.rstrip("/")


class RemoteError(JobError):
    """A request failed, and again until the deadline."""

    default_id = "remote"


@dataclass(frozen=True)
class Entry:
    """A file at an address."""

    size: int
    version: str
    """Changes with its content: a digest of what the store says of it."""


@dataclass(frozen=True)
class Remote:
    """A folder (or one file, whose name is "") at an address."""

    address: str

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """fsspec's file system and the path in it."""
        import fsspec

        scheme = self.address.partition("://")[0]
        options = {"auto_mkdir": True} if scheme in LOCAL else {}
        try:
            system, path = fsspec.core.url_to_fs(self.address, use_listings_cache=False, **options)
        except ImportError as error:
            package = re.search(r"[Ii]nstall (?:the )?([\w-]+)", str(error))
            raise ConfigError(
                f"{self.address}: the package that opens {scheme}:// is not installed.",
                f"pip install {package[1]}" if package else str(error),
                id="remote-package",
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{self.address}: {scheme}:// is not a scheme that fsspec knows.",
                "Give a folder, or an address such as s3://BUCKET/FOLDER, gs://..., hf://...",
            ) from error
        return system, str(path).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._opened[1]}/{name}" if name else self._opened[1]

    def require_package(self) -> None:
        """Raises ConfigError where the package that opens such addresses is missing."""
        _ = self._opened

    # -- requests ---------------------------------------------------------------------------------
    def find(self, below: str = "") -> dict[str, Entry]:
        """All files by their name from here, below a folder; empty where there are none."""
        system, root = self._opened
        system.invalidate_cache()
        try:
            found = self._request("list", below, 0, "find", self._path(below), detail=True)
        except FileNotFoundError:
            return {}
        start, files = f"{root}/", {}
        for path, info in found.items():
            name = "" if path == root else path.removeprefix(start)
            # A store may hold any name, and the copy here is made of it.
            if name == path or ".." in name.split("/") or info.get("type") == "directory":
                continue
            files[name] = _entry(info)
        return files

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None where it is missing."""
        try:
            content: bytes = self._request("read", name, 0, "cat_file", self._path(name))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        self._make_parent(name)
        self._request("write", name, len(content), "pipe_file", self._path(name), content)

    def upload(self, source: Path, name: str) -> None:
        """Writes a file with the content of one that is here."""
        size = source.stat().st_size
        self._make_parent(name)
        self._request("write", name, size, "put_file", str(source), self._path(name), moves=True)

    def download(self, name: str, target: Path, size: int) -> None:
        """Copies a file here, by renaming. Raises RemoteError where it is not `size` bytes long."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, sync=False) as partial:
            for _ in range(DOWNLOADS):
                path = self._path(name)
                self._request("read", name, size, "get_file", path, str(partial), moves=True)
                if (found := partial.stat().st_size) == size:
                    return
            raise self._error("read", name, f"{found} of {size} bytes came")

    def remove(self, names: Iterable[str]) -> None:
        """Removes files; those that are missing are no error."""
        for name in names:
            with suppress(FileNotFoundError):
                self._request("remove", name, 0, "rm_file", self._path(name))

    def copy(self, name: str, other: "Remote") -> None:
        """Copies a file to the same name at another address of the same store."""
        other._make_parent(name)
        self._request("copy", name, 0, "cp_file", self._path(name), other._path(name))

    def _make_parent(self, name: str) -> None:
        """Folders are made where there are such; of an object store it would make the bucket."""
        system = self._opened[0]
        if not system.async_impl:
            parent = self._path(name).rpartition("/")[0]
            self._request("write", name, 0, "makedirs", parent, exist_ok=True)

    # -- attempts ---------------------------------------------------------------------------------
    def _request(
        self,
        verb: str,
        name: str,
        size: int,
        method: str,
        *args: Any,
        moves: bool = False,
        **more: Any,
    ) -> Any:
        """What a method of the file system returns, tried again until the deadline.

        moves: it reports its progress. Raises FileNotFoundError, and RemoteError for the rest.
        """
        allowed = min(size, PART_BYTES) / SLOWEST_BYTES
        end, pause = time.monotonic() + DEADLINE_SECONDS + allowed, FIRST_PAUSE
        while True:
            patience = min(ATTEMPT_SECONDS + allowed, max(1.0, end - time.monotonic()))
            try:
                return _attempt(self._opened[0], method, args, more, patience, moves=moves)
            except FileNotFoundError:
                raise
            except Exception as error:  # of any package: botocore's, aiohttp's, ours
                if isinstance(error, FINAL) or _is_final(error) or time.monotonic() + pause > end:
                    raise self._error(verb, name, _first_line(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _error(self, verb: str, name: str, reason: str) -> RemoteError:
        place = f"{self.address}/{name}" if name else self.address
        return RemoteError(
            without_secrets(_without_credentials(f"cannot {verb} {place}: {reason}.")),
            "Check the address, the network and the credentials; the same command then goes on.",
        )


def _entry(info: Mapping[str, Any]) -> Entry:
    known = {key: value for key, value in info.items() if key not in ("name", "Key", "islink")}
    text = json.dumps(known, sort_keys=True, default=str)
    return Entry(int(info.get("size") or 0), hashlib.sha256(text.encode()).hexdigest()[:16])


def _is_final(error: Exception) -> bool:
    """Whether credentials are missing or refused."""
    return type(error).__name__ in (
        "NoCredentialsError",
        "DefaultCredentialsError",
        "ParamValidationError",
    )


def _without_credentials(text: str) -> str:
    """The text without values of the environment that are credentials: a server may repeat them."""
    for name, value in os.environ.items():
        if len(value) > 7 and re.search("KEY|SECRET|TOKEN|PASSW|CREDENTIAL", name.upper()):
            text = text.replace(value, HIDDEN)
    return text


def _first_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:200]}".rstrip(".: ")


def _attempt(
    system: Any,
    method: str,
    args: tuple[Any, ...],
    more: dict[str, Any],
    patience: float,
    *,
    moves: bool,
) -> Any:
    """One call, given up (TimeoutError) once nothing has moved for `patience` seconds."""
    from fsspec.callbacks import Callback

    last = time.monotonic()

    def moved(*sizes: object) -> None:
        nonlocal last
        last = time.monotonic()

    if moves:
        more = {**more, "callback": Callback(hooks={"moved": moved})}
    if system.async_impl:
        # `find` and others go through coroutines, which can be cancelled.
        call = getattr(system, f"_{method}")(*args, **more)
        future: Any = asyncio.run_coroutine_threadsafe(call, system.loop)
    else:
        future = _in_thread(lambda: getattr(system, method)(*args, **more))
    while True:
        try:
            return future.result(timeout=max(0.05, last + patience - time.monotonic()))
        except CancelledError as error:
            raise TimeoutError("cancelled") from error
        except TimeoutError:
            if future.done():
                return future.result()
            if time.monotonic() >= last + patience:
                future.cancel()
                raise TimeoutError(f"no answer for {patience:.0f} s") from None


def _in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """The call's result, on a thread that does not keep the process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            with suppress(Exception):
                future.set_exception(error)

    threading.Thread(target=run, name="remote", daemon=True).start()
    return future


def require_run_writable(remote: Remote) -> None:
    """Raises UsageError where nothing can be written there."""
    try:
        remote.write(".writable", b"")
        remote.remove([".writable"])
    except (RemoteError, FileNotFoundError) as error:
        message = error.message if isinstance(error, RemoteError) else f"{error} is missing"
        raise UsageError(
            f"The run folder {remote.address} cannot be written: {message}",
            "Check the address and the credentials, or choose another one with --results-dir.",
            id="run-folder",
        ) from None
