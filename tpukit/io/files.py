"""Atomic writes (a reader sees the old content or the new, never a part of it), and folders."""

import contextlib
import errno
import glob
import hashlib
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpukit.errors import DataError, JobError
from tpukit.io.process import is_alive


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """A path beside `path` to write a file to; renamed to `path` when the block succeeds.

    With `sync` the file survives a power cut too, and what killed writers of `path` left is
    removed. On any error `path` stays as it was. Raises OSError where it is a device or a pipe: the
    renaming would put a file in its place.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if sync:
        _remove_leftovers(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}@{platform.node()}.partial")
    try:
        yield partial
        if sync:
            sync_file(partial)
        partial.replace(path)
        if sync:
            sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write names no file
        raise


def _remove_leftovers(path: Path) -> None:
    """Removes what killed processes of this host were writing in place of `path`."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*@{platform.node()}.partial"):
        process = leftover.name.rpartition("@")[0].rpartition(".")[2]
        if process.isdecimal() and not is_alive(int(process)):
            leftover.unlink(missing_ok=True)


def write_file(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Writes a whole file atomically; see `replacing`."""
    with replacing(path, sync=sync) as partial:
        partial.write_bytes(content)


def write_picture(path: Path, figure: Any) -> None:
    """Writes a figure of matplotlib to a PNG file atomically."""
    with replacing(path) as partial:
        figure.savefig(partial, dpi=110, format="png")


def partial_of(path: Path) -> Path:
    """Where `replacing_folder` fills what becomes `path`."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` to fill; renamed to `path` when the block succeeds.

    The files in it are not synced. `path` must not exist by then.
    """
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_folder(partial)
        partial.rename(path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync_file(path: Path) -> None:
    """Forces a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Forces a folder's entries (renames) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with require_regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_regular(path: Path) -> Path:
    """`path`. Raises OSError where it is missing, or a device, a pipe or a folder.

    Reading a device may never end, and a pipe cannot be read twice.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def how_to_go_on(error: OSError) -> str:
    """What to do about a file that cannot be read or written."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "Free some space on the disk; the same command then goes on."
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (`ulimit -f unlimited`)."
    return "Name another path."


@contextlib.contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """Turns a failed write below `folder` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise JobError(
                f"The disk is full: {where} could not be written.",
                f"Free some space on the disk of {folder}; the same command then goes on.",
                id="disk-full",
            ) from error
        raise DataError(
            f"{where} cannot be written: {error.strerror}.",
            "Choose a folder you may write with --out.",
        ) from error


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which may have to be made first."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    try:
        # A system administrator has access to what cannot be written (/proc, some network disks).
        Path(tempfile.mkdtemp(prefix=".tpukit-", dir=folder)).rmdir()
    except OSError:
        return False
    return True
