"""Local copies of remote folders and files: the code that reads and writes sees a path."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.files import write_file
from tpukit.io.folders import cache_folder
from tpukit.io.lock import exclusive
from tpukit.io.remote import Entry, Remote, address_of
from tpukit.io.units import format_bytes, parse_bytes

LIMIT_VARIABLE = "TPUKIT_MIRROR_LIMIT"
"""Variable with the most bytes that all copies together take, as `200GB`."""
PART_OF_FREE = 0.8
"""Part of the free disk that copies may take where no limit is given."""
DOWNLOADS_AT_ONCE = 16
MANIFEST, USED, LOCK = "manifest.json", "used", "lock"


def mirror_of(address: str) -> Path:
    """The folder of the copy of an address on this machine; the copy lies in it under its name."""
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    return cache_folder() / "remote" / digest


def path_here(address: str) -> Path:
    """Where the copy of an address lies."""
    return mirror_of(address) / (address.partition("://")[2].rpartition("/")[2] or "root")


def local_copy(place: str | Path, say: Callable[[str], None] | None = None) -> Path:
    """The path of an input on this machine: the path itself, or a copy of what lies at the address,
    brought up to date.

    Raises DataError where nothing lies there, or more than the copies may take.
    """
    address = address_of(place)
    if address is None:
        return Path(place)
    say = say or (lambda line: print(line, file=sys.stderr))
    remote, folder, here = Remote(address), mirror_of(address), path_here(address)
    with exclusive(folder / LOCK, wait=True):
        found, known = remote.find(), _read_manifest(folder)
        if not found:
            raise DataError(f"{address}: nothing is there.", "Check the address.")
        changed = {name: entry for name, entry in found.items() if known.get(name) != entry}
        for name in known.keys() - found.keys():
            (here / name).unlink(missing_ok=True)
        needed = sum(entry.size for entry in changed.values())
        _make_room(folder, address, needed)
        started = time.monotonic()
        try:
            with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
                jobs = {
                    pool.submit(
                        remote.download, name, here / name if name else here, entry.size
                    ): name
                    for name, entry in changed.items()
                }
                try:
                    for job in as_completed(jobs):
                        job.result()
                        known[jobs[job]] = changed[jobs[job]]
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        finally:
            _write_manifest(folder, {name: known[name] for name in found if name in known})
        if changed:
            seconds = time.monotonic() - started
            say(
                f"Copied {len(changed)} of {len(found)} files, {format_bytes(needed)}, from"
                f" {address} to {here} in {seconds:.0f} s."
            )
    return here


def output_here(place: Path | None) -> Path | None:
    """The path to write an output to: the path itself, or one that `send_output` copies from."""
    address = address_of(place)
    if address is None:
        return place
    Remote(address).require_package()  # before hours of work
    here = path_here(address)
    here.parent.mkdir(parents=True, exist_ok=True)
    mark_used(here.parent)
    return here


def send_output(place: Path | None) -> None:
    """Copies the file, or the files of the folder, that were written for an address there."""
    if (address := address_of(place)) is None:
        return
    here, remote = path_here(address), Remote(address)
    for path in [here] if here.is_file() else sorted(here.rglob("*")):
        if path.is_file() and not path.name.startswith(".lock"):
            remote.upload(path, "" if path == here else path.relative_to(here).as_posix())
    print(f"Sent to {address}.", file=sys.stderr)


# -- room ----------------------------------------------------------------------------------------
def mark_used(folder: Path) -> None:
    """Keeps a copy as long as this process lives: the ones that nobody uses go, oldest first."""
    if folder not in _used:
        descriptor = os.open(folder / USED, os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _used[folder] = descriptor
    os.utime(folder / USED)


_used: dict[Path, int] = {}


def _remove_unused(folder: Path) -> bool:
    """Removes a copy that no process uses: whether it could be."""
    with suppress(OSError):
        descriptor = os.open(folder / USED, os.O_WRONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
    return not folder.exists()


def _make_room(folder: Path, address: str, needed: int) -> None:
    """Removes copies that were not used for the longest time, until `needed` bytes have room.

    Raises DataError where they have not.
    """
    mark_used(folder)
    others = [path for path in folder.parent.iterdir() if path != folder and path.is_dir()]
    others.sort(key=lambda path: _time_of(path / USED))
    limit = _limit(folder)
    taken = {path: _bytes_of(path) for path in (folder, *others)}
    while needed + sum(taken.values()) > limit and others:
        oldest = others.pop(0)
        if _remove_unused(oldest):
            del taken[oldest]
    if needed + taken[folder] > limit:
        raise DataError(
            f"{address} holds {format_bytes(needed)} more than is here; its copy in"
            f" {folder.parent} may take {format_bytes(limit)}.",
            f"Raise {LIMIT_VARIABLE} (200GB), or name a larger disk with TPUKIT_CACHE_DIR; mount"
            " the bucket, or read it as a stream.",
            id="mirror-limit",
        )


def _limit(folder: Path) -> int:
    if given := os.environ.get(LIMIT_VARIABLE):
        return parse_bytes(given)
    present = sum(_bytes_of(path) for path in folder.parent.iterdir() if path.is_dir())
    return int(PART_OF_FREE * (shutil.disk_usage(folder).free + present))


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _time_of(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _read_manifest(folder: Path) -> dict[str, Entry]:
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
        return {name: Entry(**entry) for name, entry in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_manifest(folder: Path, entries: dict[str, Entry]) -> None:
    text = json.dumps({name: asdict(entry) for name, entry in entries.items()})
    write_file(folder / MANIFEST, text.encode(), sync=False)
