"""The cache folder."""

import hashlib
import json
import os
import shlex
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
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
    folder = Path(tempfile.gettempdir()) / f"tpukit_cache_{os.getuid()}"
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
