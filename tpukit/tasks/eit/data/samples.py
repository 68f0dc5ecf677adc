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
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import DataError
from tpukit.io.files import replacing_folder, sync_file, write_file
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
FORMAT = 2
ARRAYS = ("ys", "xs")
META = "meta.json"


# -- one file --------------------------------------------------------------------------------------
def read_sample(path: Path, *, image: bool = True) -> tuple[Array, Array | None]:
    """`ys` (208,) and `xs` (128, 128) of one file, as stored.

    image: whether it must have `xs`; else they are None where it has none.

    Raises `DataError` naming file and field. Pickled arrays are never loaded.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(f"{path} is a single array, not an .npz.", EXPECTED)
        with loaded as fields:
            ys = _field(path, fields, "ys")
            xs = _field(path, fields, "xs") if image or "xs" in fields.files else None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.", EXPECTED) from error
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise DataError(f"{path} is not an .npz file, or a damaged one.", EXPECTED) from error
    return _checked(path, "ys", ys.reshape(-1) if ys.shape == (VOLTAGES, 1) else ys, (VOLTAGES,)), (
        None if xs is None else _checked(path, "xs", xs, (IMAGE_SIZE, IMAGE_SIZE))
    )


def _field(path: Path, fields: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = fields[name]
    except KeyError:
        there = ", ".join(fields.files) or "none"
        raise DataError(f"{path} has no field `{name}` (it has: {there}).", EXPECTED) from None
    except ValueError as error:
        if "pickle" in str(error):
            raise DataError(
                f"{path}, field `{name}`: a pickled array, which is never loaded.",
                "Save it as plain numbers: numpy.savez(file, ys=array.astype('float32'), ...).",
            ) from None
        raise
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"{path}, field `{name}`: damaged ({error}).", EXPECTED) from error
    return array


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

    def digest(self) -> str:
        """SHA-256 of the content; of a pack it was computed when that was built."""
        if not isinstance(self.xs, np.memmap):
            return _digest(self.ys, self.xs)
        meta = Path(str(self.xs.filename)).with_name(META)
        return str(json.loads(meta.read_text())["digest"])

    def __getstate__(self) -> dict[str, Any]:
        """Mapped arrays travel to worker processes as their files' names."""
        return {
            name: str(array.filename) if isinstance(array, np.memmap) else array
            for name, array in vars(self).items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, np.load(value, mmap_mode="r") if isinstance(value, str) else value)


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
    key = _key(files)
    for home in _homes(files[0].parent):
        with contextlib.suppress(OSError):
            home.mkdir(parents=True, exist_ok=True)
            return _open_or_build(home, key, files)
    print(
        f"Warning: no room to pack {files[0].parent}; reading its files into memory. "
        f"Set {VARIABLE} to a folder with more room.",
        file=sys.stderr,
    )
    return _read_all(files)


def _read_all(files: Sequence[Path]) -> Samples:
    ys, xs = _read(files)
    return Samples(ys, xs.astype(np.float16) if _is_exact(xs) else xs)


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


def _open_or_build(home: Path, key: str, files: Sequence[Path]) -> Samples:
    pack, source = home / key, files[0].parent
    if not _is_whole(pack):
        waiting = functools.partial(
            print, f"waiting: another process packs {source}", file=sys.stderr, flush=True
        )
        with exclusive(home / "lock", wait=True, on_wait=waiting):
            if not _is_whole(pack):
                _build(home, pack, files)
    return _open(pack)


def _open(pack: Path) -> Samples:
    return Samples(*(np.load(pack / f"{name}.npy", mmap_mode="r") for name in ARRAYS))


def _is_whole(pack: Path) -> bool:
    """Whether a pack is as it was built: by its files' times, else (copied, say) by its content."""
    try:
        meta = json.loads((pack / META).read_text())
        seal = _seal(pack, meta["digest"])
        if meta["seal"] == seal:
            return True
        samples = _open(pack)
        if _digest(samples.ys, samples.xs) != meta["digest"]:
            return False
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return False
    with contextlib.suppress(OSError):
        write_file(pack / META, json.dumps({**meta, "seal": seal}).encode())
    return True


def _seal(pack: Path, digest: str) -> str:
    """The sum of a digest and of each array file's size and time of change."""
    found = [(pack / f"{name}.npy").stat() for name in ARRAYS]
    times = [(status.st_size, status.st_mtime_ns) for status in found]
    return hashlib.sha256(f"{digest} {times}".encode()).hexdigest()


def _build(home: Path, pack: Path, files: Sequence[Path]) -> None:
    """Holds the lock: whatever else lies here is old or was left by a killed process."""
    for other in home.iterdir():
        if other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
    with replacing_folder(pack) as partial:
        if not _fill(partial, files, "<f2"):
            _fill(partial, files, "<f4")
        for name in ARRAYS:
            sync_file(partial / f"{name}.npy")
        samples = _open(partial)
        digest = _digest(samples.ys, samples.xs)
        meta = {"source": str(files[0].parent), "digest": digest, "seal": _seal(partial, digest)}
        (partial / META).write_text(json.dumps(meta))


def _is_exact(images: NDArray[np.float32]) -> bool:
    """Whether float16 holds the images without loss."""
    with np.errstate(over="ignore"):
        return bool((images.astype(np.float16) == images).all())


def _fill(folder: Path, files: Sequence[Path], kind: str) -> bool:
    """Writes both arrays with images of type `kind`; False where that loses digits."""
    shapes = {"ys": ("<f4", (VOLTAGES,)), "xs": (kind, (IMAGE_SIZE, IMAGE_SIZE))}
    size = len(files) * (4 * VOLTAGES + IMAGE_SIZE**2 * np.dtype(kind).itemsize)
    if shutil.disk_usage(folder).free < size + (64 << 20):
        raise OSError(f"{folder}: no room for {size} bytes")
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
    ys, xs = (np.load(pack / f"{name}.npy", mmap_mode="r+") for name in ARRAYS)
    ys[rows], images = _read(files)
    if xs.dtype == np.float16 and not _is_exact(images):
        return False
    xs[rows] = images
    return True
