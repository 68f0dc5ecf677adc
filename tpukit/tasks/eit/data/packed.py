"""A folder's samples packed into two memory-mapped arrays, once.

Opening 100,000 small files each epoch would cost more than training on them. The pack is keyed by
every file's name, size and time; it lies beside the split folders, or in the user's cache folder
where the data cannot be written (a Kaggle input). It is built under a lock that dies with its
process, in a folder of its own, and renamed when whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.io.process import allowed_cores
from tpukit.tasks.eit.data.conditioning import IMAGE_SIZE, VOLTAGES
from tpukit.tasks.eit.data.sample_file import read_sample
from tpukit.tasks.eit.parallel import run_chunks
from tpukit.tasks.eit.progress import Progress

Array = NDArray[np.floating[Any]]

UNPACKED_FILES = 256
"""Up to so many files are simply read into memory."""
CHUNK_FILES = 500
FORMAT = 1


@dataclass
class Samples:
    """All samples of a folder, in order of their files' names; in memory or mapped."""

    ys: Array
    """(n, 208)"""
    xs: Array
    """(n, 128, 128), float16 where that is exact."""

    def __getstate__(self) -> dict[str, Any]:
        """Mapped arrays travel to worker processes as their files' names."""
        return {name: _by_name(array) for name, array in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, np.load(value, mmap_mode="r") if isinstance(value, str) else value)


def _by_name(array: Array) -> Array | str:
    return str(array.filename) if isinstance(array, np.memmap) else array


def list_samples(folder: Path) -> list[Path]:
    """The folder's `.npz` files by name."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.endswith(".npz") and not e.name.startswith(".")]
    return [folder / name for name in sorted(names)]


def load_samples(files: Sequence[Path]) -> Samples:
    """Reads few files, maps the pack of many. All lie in one folder; there is at least one.

    Raises `DataError` naming the first bad file and its field.
    """
    if len(files) <= UNPACKED_FILES:
        return _read_all(files)
    key = _key(files)
    for home in _homes(files[0].parent):
        with contextlib.suppress(OSError):
            home.mkdir(parents=True, exist_ok=True)
            return _open_or_build(home, key, files)
    print(
        f"warning: no room to pack {files[0].parent}; reading its files into memory.",
        file=sys.stderr,
    )
    return _read_all(files)


def _read_all(files: Sequence[Path]) -> Samples:
    pairs = [read_sample(path) for path in files]
    ys, xs = ([pair[k] for pair in pairs] for k in range(2))
    return Samples(np.stack(ys).astype(np.float32), np.stack(xs).astype(np.float32))  # type: ignore[arg-type]


def _key(files: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{FORMAT}".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _homes(folder: Path) -> Iterator[Path]:
    """Where a pack may lie, best first: one folder for each folder of samples."""
    yield folder.parent / ".packed" / folder.name
    # Packs of other folders of the same name must not be taken for old ones of this.
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    name = f"{folder.name}-{place}"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    yield Path(cache) / "tpukit" / "eit" / name
    yield Path(tempfile.gettempdir()) / f"tpukit-{os.getuid()}" / "eit" / name


def _open_or_build(home: Path, key: str, files: Sequence[Path]) -> Samples:
    pack = home / key
    if not pack.is_dir():
        with _locked(home / "lock", files[0].parent):
            if not pack.is_dir():
                _build(home, pack, files)
    return Samples(*(np.load(pack / f"{name}.npy", mmap_mode="r") for name in ("ys", "xs")))


@contextlib.contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting: another process packs {folder}", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(home: Path, pack: Path, files: Sequence[Path]) -> None:
    """Holds the lock: whatever else lies here is old or was left by a killed process."""
    for other in home.iterdir():
        if other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
    beside = home / f"{pack.name}.part"
    try:
        kinds = ["<f2", "<f4"] if _exact_in_half(files[:: max(1, len(files) // 50)]) else ["<f4"]
        # A later file may still need more digits than the first ones looked at.
        while not _fill(beside, files, kinds.pop(0)):
            pass
        beside.rename(pack)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _exact_in_half(files: Sequence[Path]) -> bool:
    return all(_is_exact(image) for _, image in map(read_sample, files) if image is not None)


def _is_exact(image: Array) -> bool:
    with np.errstate(over="ignore"):
        return bool((image.astype(np.float16) == image.astype(np.float32)).all())


def _fill(folder: Path, files: Sequence[Path], kind: str) -> bool:
    """Writes both arrays with images of type `kind`; False where that loses digits."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shapes = {"ys": (VOLTAGES,), "xs": (IMAGE_SIZE, IMAGE_SIZE)}
    size = len(files) * (4 * VOLTAGES + IMAGE_SIZE**2 * np.dtype(kind).itemsize)
    if shutil.disk_usage(folder).free < size + (64 << 20):
        raise OSError(f"{folder}: no room for {size} bytes")
    for name, shape in shapes.items():
        _empty_array(folder / f"{name}.npy", kind if name == "xs" else "<f4", (len(files), *shape))
    chunks: list[list[Any]] = [
        [start, [path.name for path in files[start : start + CHUNK_FILES]]]
        for start in range(0, len(files), CHUNK_FILES)
    ]
    source = files[0].parent
    arguments = {"source": str(source), "pack": str(folder)}
    with Progress(f"packing {source}", len(files)) as progress:
        for position, exact in run_chunks(_pack_chunk, arguments, chunks, allowed_cores()):
            if not exact:
                return False
            progress.advance(len(chunks[position][1]))
    for name in shapes:
        _sync(folder / f"{name}.npy")
    (folder / "meta.json").write_text(json.dumps({"source": str(source), "files": len(files)}))
    return True


def _empty_array(path: Path, kind: str, shape: tuple[int, ...]) -> None:
    """An `.npy` of zeros whose blocks are really on the disk: a full one is noticed here."""
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
    del mapped
    with path.open("r+b") as stream, contextlib.suppress(AttributeError):
        os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)


def _pack_chunk(arguments: dict[str, Any], chunk: list[Any]) -> bool:
    """Packs some files from row `start` on; False where an image is not exact in float16."""
    start, names = chunk
    pairs = [read_sample(Path(arguments["source"]) / name) for name in names]
    rows = slice(start, start + len(names))
    pack = Path(arguments["pack"])
    ys, xs = (np.load(pack / f"{name}.npy", mmap_mode="r+") for name in ("ys", "xs"))
    if xs.dtype == np.float16 and not all(_is_exact(x) for _, x in pairs if x is not None):
        return False
    ys[rows] = np.stack([pair[0] for pair in pairs])
    xs[rows] = np.stack([pair[1] for pair in pairs if pair[1] is not None])
    return True


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
