"""Temporary files of a command: in one folder, which goes with the command however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tpukit.io.files import is_writable

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
