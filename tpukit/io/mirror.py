"""Local copies of remote folders and files: the code that reads and writes sees a path."""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.files import write_file
from tpukit.io.folders import cache_folder
from tpukit.io.lock import exclusive
from tpukit.io.remote import Entry, Remote, address_of
from tpukit.io.units import format_bytes

PART_OF_FREE = 0.8
"""Part of the free disk that a copy may take."""
DOWNLOADS_AT_ONCE = 16
MANIFEST, LOCK = "manifest.json", "lock"


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

    Raises DataError where nothing lies there, or more than the disk has room for.
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
        _require_room(folder, address, needed)
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


def _require_room(folder: Path, address: str, needed: int) -> None:
    """Raises DataError where `needed` bytes would fill the disk."""
    allowed = int(PART_OF_FREE * shutil.disk_usage(folder).free)
    if needed > allowed:
        raise DataError(
            f"{address} holds {format_bytes(needed)} more than is here; its copy in"
            f" {folder.parent} may take {format_bytes(allowed)} of the disk.",
            "Remove copies there, or name a larger disk with TPUKIT_CACHE_DIR; mount the bucket, or"
            " read it as a stream.",
            id="mirror-limit",
        )


def _read_manifest(folder: Path) -> dict[str, Entry]:
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
        return {name: Entry(**entry) for name, entry in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_manifest(folder: Path, entries: dict[str, Entry]) -> None:
    text = json.dumps({name: asdict(entry) for name, entry in entries.items()})
    write_file(folder / MANIFEST, text.encode(), sync=False)
