"""Reading a sample's `.npz`, and saying what is wrong with it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import DataError
from tpukit.tasks.eit.data.conditioning import IMAGE_SIZE, VOLTAGES

Array = NDArray[np.floating[Any]]
EXPECTED = "A sample is an .npz with `ys` (208, 1) voltages and `xs` (128, 128) image."


def read_sample(path: Path, *, image: bool = True) -> tuple[Array, Array | None]:
    """`ys` (208,) and `xs` (128, 128) of one file, as stored; `xs` None without `image`.

    Raises `DataError` naming file and field. Pickled arrays are never loaded.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(f"{path} is a single array, not an .npz.", EXPECTED)
        with loaded as fields:
            ys = _field(path, fields, "ys")
            xs = _field(path, fields, "xs") if image else None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.", EXPECTED) from error
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise DataError(f"{path} is not an .npz file, or a damaged one.", EXPECTED) from error
    return _checked(path, "ys", ys.reshape(-1) if ys.shape == (VOLTAGES, 1) else ys, (VOLTAGES,)), (
        None if xs is None else _checked(path, "xs", xs, (IMAGE_SIZE, IMAGE_SIZE))
    )


def has_image(path: Path) -> bool:
    """Whether the file holds an image beside its voltages."""
    try:
        with zipfile.ZipFile(path) as archive:
            return "xs.npy" in archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not an .npz file, or a damaged one.", EXPECTED) from error


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
