"""The cache folder, and temporary files of a command."""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tpukit.errors import UsageError
from tpukit.io.files import is_writable, write_file

VARIABLE = "TPUKIT_CACHE_DIR"


def cache_folder() -> Path:
    """`$TPUKIT_CACHE_DIR`, else `tpukit` in the user's cache folder (`$XDG_CACHE_HOME`).

    Where the home folder cannot be written, a temporary folder of this user. Raises `UsageError`
    where another user may write to it: what it holds would be theirs.
    """
    if given := os.environ.get(VARIABLE):
        folder = Path(given)
    else:
        from platformdirs import user_cache_path

        folder = user_cache_path("tpukit", appauthor=False)
        if not is_writable(folder):
            return _temporary_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH:
            raise UsageError(
                f"The cache folder {folder} can be written by other users.",
                f"Run `chmod o-w {shlex.quote(str(folder))}`, or name a folder of your own with"
                f" {VARIABLE}.",
                id="cache-folder",
            )
    return folder


def _temporary_folder() -> Path:
    """The same one in every process of this user, so that ranks share it."""
    folder = lasting_temporary_folder() / f"tpukit_cache_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        # Somebody else's folder of that name must not be read from.
        return Path(tempfile.mkdtemp(prefix="tpukit_cache_"))
    return folder


class JsonCache:
    """A folder of JSON objects, each in a file by everything that decides it."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version
        """Raised when what is stored changes its meaning."""

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of an object."""
        text = json.dumps({"format": self.version, **key}, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def read(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The object, or None; a damaged file counts as none."""
        try:
            found = json.loads(self.path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, key: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Keeps an object; errors of writing the cache are ignored."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.path(key), json.dumps(found).encode(), sync=False)


# -- temporary files: in one folder, which goes with the command however it ends -----------------
PREFIX = "tpukit-"
LOCK = ".owner"
"""File in the folder that its process keeps locked; the kernel unlocks it when the process ends."""
LONGEST = 60
"""Maximum length of a folder's path in characters; multiprocessing's sockets have 104 in all."""


@contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Sends the temporary files of this process and its children to a folder of its own.

    Removed at the end; folders of commands that were killed are removed at the start. A child of
    such a command uses its parent's folder; where none can be made, nothing changes.
    """
    try:
        base = Path(tempfile.gettempdir())
        is_own = (base / LOCK).exists() or len(str(base)) > LONGEST
        made = None if is_own else _create(base)
    except OSError:
        made = None
    if made is None:
        yield
        return
    remove_abandoned(base)
    # torch keeps what it compiled there, for later commands too.
    compiled = base / f"torchinductor_{os.environ.get('USER') or os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    former = os.environ.get("TMPDIR")
    folder, descriptor = made
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    home = os.environ.get("HOME", "/")
    settings = os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    if not is_writable(Path(settings, "matplotlib")):
        # Its own folder would lie in this one, and its removal at exit end with a traceback.
        os.environ.setdefault("MPLCONFIGDIR", str(folder / "matplotlib"))
    try:
        yield
    finally:
        os.environ["TMPDIR"], tempfile.tempdir = former or str(base), None
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
        with suppress(OSError):
            # torch 2.15 makes it where nothing is compiled too; it goes if it is empty.
            compiled.rmdir()


def lasting_temporary_folder() -> Path:
    """Where temporary files outlive the command that makes them."""
    folder = Path(tempfile.gettempdir())
    return folder.parent if (folder / LOCK).exists() else folder


def _create(base: Path) -> tuple[Path, int]:
    """The folder and the descriptor of its lock; it gets its name when it is locked."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    descriptor = os.open(hidden / LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return hidden.rename(base / hidden.name.removeprefix(".")), descriptor


def remove_abandoned(base: Path) -> None:
    """Removes the folders below `base` whose processes have ended."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(folder / LOCK, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
