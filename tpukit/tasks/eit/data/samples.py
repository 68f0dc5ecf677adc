"""A folder's samples: each file read and checked, all of them packed into two arrays, once.

Opening 100,000 small files each epoch would cost more than training on them. The pack is keyed by
every file's name, size and time; it lies beside the split folders, or in the cache folder where the
data cannot be written (a Kaggle input). A pack whose own files changed is built again, unless their
content is still that of its digest.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import DataError
from tpukit.io.files import replacing_folder, sync_file
from tpukit.io.folders import VARIABLE, cache_folder
from tpukit.io.lock import exclusive
from tpukit.io.process import allowed_cores
from tpukit.io.progress import Progress
from tpukit.io.workers import map_ordered
from tpukit.tasks.eit.data.voltages import IMAGE_SIZE, VOLTAGES

Array = NDArray[np.floating[Any]]
EXPECTED = "A sample is an .npz with `ys` (208, 1) voltages and `xs` (128, 128) image."
UNPACKED_FILES = 256
"""Up to this many files are read into memory instead."""
CHUNK_FILES = 500
FORMAT = 3
ARRAYS = ("ys", "xs")
IMAGE_SHAPE = (IMAGE_SIZE, IMAGE_SIZE)
META = "meta.json"


# -- one file --------------------------------------------------------------------------------------
def read_sample(path: Path, *, image: bool = True) -> tuple[Array, Array | None]:
    """`ys` (208,) and `xs` (128, 128) of one file, as stored.

    image: whether it must have `xs`; else they are None where it has none.

    Raises `DataError` naming file and field. Pickled arrays are never loaded.
    """
    try:
        # Of another file than an .npz numpy gives an array, or refuses to unpickle it.
        with np.load(path, allow_pickle=False) as fields:
            there = list(fields)
            found = {name: fields[name] for name in ARRAYS if name in there}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.", EXPECTED) from error
    except Exception as error:  # zip archives and headers are damaged in many ways
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} is not an .npz of plain numbers: {reason}", EXPECTED) from error
    for name in ARRAYS if image else ("ys",):
        if name not in found:
            listed = ", ".join(there) or "none"
            raise DataError(f"{path} has no field `{name}` (it has: {listed}).", EXPECTED)
    if found["ys"].shape == (VOLTAGES, 1):
        found["ys"] = found["ys"][:, 0]
    ys = _checked(path, "ys", found["ys"], (VOLTAGES,))
    return ys, _checked(path, "xs", found["xs"], IMAGE_SHAPE) if "xs" in found else None


def _checked(path: Path, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> Array:
    if array.shape != shape:
        raise DataError(f"{path}, field `{name}`: shape {array.shape}, expected {shape}.", EXPECTED)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{path}, field `{name}`: type {array.dtype}, expected numbers.", EXPECTED)
    if not np.isfinite(array).all():
        first = np.argwhere(~np.isfinite(array))[0]
        raise DataError(
            f"{path}, field `{name}`: {array[tuple(first)]} at {first.tolist()}; "
            f"every value must be finite.",
            "Remove or repair that file.",
        )
    return array


# -- a folder --------------------------------------------------------------------------------------
@dataclass
class Samples:
    """All samples of a folder, in order of their files' names; in memory or mapped."""

    ys: Array
    """(n, 208)"""
    xs: Array
    """(n, 128, 128), float16 where that is exact."""
    digest: str
    """SHA-256 of the content."""

    def __getstate__(self) -> dict[str, Any]:
        """Mapped arrays travel to worker processes as their files' names."""
        return {
            name: Path(str(value.filename)) if isinstance(value, np.memmap) else value
            for name, value in vars(self).items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, np.load(value, mmap_mode="r") if isinstance(value, Path) else value)


def _digest(*arrays: Array) -> str:
    content = hashlib.sha256()
    for array in arrays:
        content.update(f"{array.dtype.str}{array.shape}".encode())
        content.update(np.ascontiguousarray(array).data)
    return content.hexdigest()


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
    for home in _homes(files[0].parent):
        with contextlib.suppress(OSError):
            return _open_or_build(home, files)
    print(
        f"Warning: no room to pack {files[0].parent}; reading its files into memory. "
        f"Set {VARIABLE} to a folder with more room.",
        file=sys.stderr,
    )
    return _read_all(files)


def _read_all(files: Sequence[Path]) -> Samples:
    ys, xs = _read(files)
    images: Array = xs.astype(np.float16) if _is_exact(xs) else xs
    return Samples(ys, images, _digest(ys, images))


def _read(files: Sequence[Path]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Voltages (n, 208) and images (n, 128, 128)."""
    pairs = [read_sample(path) for path in files]
    ys = np.stack([ys for ys, _ in pairs])
    xs = np.stack([xs for _, xs in pairs if xs is not None])
    return ys.astype(np.float32), xs.astype(np.float32)


def _key(files: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{FORMAT}".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _homes(folder: Path) -> Iterator[Path]:
    """Folders that may hold a pack, best first: one folder for each folder of samples."""
    yield folder.parent / ".packed" / folder.name
    # Packs of other folders of the same name must not be taken for old ones of this.
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    yield cache_folder() / "eit" / f"{folder.name}-{place}"


def _open_or_build(home: Path, files: Sequence[Path]) -> Samples:
    home.mkdir(parents=True, exist_ok=True)
    pack, source = home / _key(files), files[0].parent
    if found := _open(pack):
        return found
    waiting = functools.partial(
        print, f"waiting: another process packs {source}", file=sys.stderr, flush=True
    )
    with exclusive(home / "lock", wait=True, on_wait=waiting):
        return _open(pack) or _build(home, pack, files)


def _open(pack: Path) -> Samples | None:
    """A pack that is as it was built: by its files' times, else (copied, say) by its content."""
    try:
        meta = json.loads((pack / META).read_text())
        samples = Samples(*_arrays(pack), meta["digest"])
        if meta["times"] == _times(pack) or _digest(samples.ys, samples.xs) == samples.digest:
            return samples
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        pass
    return None


def _arrays(pack: Path, mode: Literal["r", "r+"] = "r") -> tuple[Array, Array]:
    ys, xs = (np.load(pack / f"{name}.npy", mmap_mode=mode) for name in ARRAYS)
    return ys, xs


def _times(pack: Path) -> list[list[int]]:
    """Size and time of change of each array's file."""
    found = [(pack / f"{name}.npy").stat() for name in ARRAYS]
    return [[status.st_size, status.st_mtime_ns] for status in found]


def _build(home: Path, pack: Path, files: Sequence[Path]) -> Samples:
    """Holds the lock: whatever else lies here is old or was left by a killed process."""
    for other in home.iterdir():
        if other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
    with replacing_folder(pack) as partial:
        if not _fill(partial, files, "<f2"):
            _fill(partial, files, "<f4")
        for name in ARRAYS:
            sync_file(partial / f"{name}.npy")
        digest = _digest(*_arrays(partial))
        meta = {"digest": digest, "times": _times(partial)}
        (partial / META).write_text(json.dumps(meta))
    return Samples(*_arrays(pack), digest)


def _is_exact(images: NDArray[np.float32]) -> bool:
    """Whether float16 holds the images without loss."""
    with np.errstate(over="ignore"):
        return bool((images.astype(np.float16) == images).all())


def _fill(folder: Path, files: Sequence[Path], kind: str) -> bool:
    """Writes both arrays with images of type `kind`; False where that loses digits."""
    shapes = {"ys": ("<f4", (VOLTAGES,)), "xs": (kind, IMAGE_SHAPE)}
    for name, (dtype, shape) in shapes.items():
        _empty_array(folder / f"{name}.npy", dtype, (len(files), *shape))
    with Progress(f"packing {files[0].parent}", len(files)) as progress:
        pack = functools.partial(_pack_chunk, folder)
        starts = range(0, len(files), CHUNK_FILES)
        chunks = [(start, files[start : start + CHUNK_FILES]) for start in starts]
        packed = map_ordered(pack, chunks, allowed_cores())
        for (_, chunk), exact in zip(chunks, packed, strict=True):
            if not exact:
                return False
            progress.advance(len(chunk))
    return True


def _empty_array(path: Path, kind: str, shape: tuple[int, ...]) -> None:
    """An `.npy` of zeros whose blocks are really on the disk: a full one is noticed here."""
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
    del mapped
    with path.open("r+b") as stream, contextlib.suppress(AttributeError):
        os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)


def _pack_chunk(pack: Path, chunk: tuple[int, Sequence[Path]]) -> bool:
    """Packs files from a row on; False where an image is not exact in float16."""
    start, files = chunk
    rows = slice(start, start + len(files))
    ys, xs = _arrays(pack, "r+")
    ys[rows], images = _read(files)
    if xs.dtype == np.float16 and not _is_exact(images):
        return False
    xs[rows] = images
    return True
