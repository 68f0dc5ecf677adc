"""Sets to test on: the simulated test split, the two measured sets, any folder of samples."""

import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import DataError
from tpukit.tasks.eit.data.dataset import DEFAULT_FOLDER, Normalisation, existing_data_path
from tpukit.tasks.eit.data.samples import EXPECTED, list_samples, read_sample
from tpukit.train.requests import EvaluationOptions

Floats = NDArray[np.float32]

REAL_ELECTRODE_DEGREES = 10.2


@dataclass(frozen=True)
class KnownSet:
    """A data set with a name that `--data` takes."""

    title: str
    folders: tuple[str, ...]
    """Folders of its files below the data path, of this project and of the published code."""
    voltage_scale: float = 1.0
    """Divides the stored voltages: they then come out in volts at 1 mA, as simulated."""
    real: bool = True


KNOWN = {
    "simulated": KnownSet("simulated test split", ("test",), real=False),
    "uef2017": KnownSet("UEF2017", ("uef2017", "test2017", "data2017"), 1040.856),
    "ktc2023": KnownSet("KTC2023", ("ktc2023", "test2023", "data2023"), 1978.0),
}
"""UEF2017: Hauptmann et al., open data of the Finnish Inverse Problems Society. KTC2023: Kuopio
Tomography Challenge, doi 10.5281/zenodo.8252370. Files and scales as published with CDEIT."""


@dataclass(frozen=True)
class TestSet:
    """Frames in the units of the simulation."""

    __test__ = False

    title: str
    names: list[str]
    ys: Floats
    """(n, 208) volts."""
    xs: Floats | None
    """(n, 128, 128), or None where a file has no image."""
    real: bool
    electrode_degrees: float = REAL_ELECTRODE_DEGREES


def open_test_set(
    data: str | Path, data_path: Path | None = None, options: EvaluationOptions | None = None
) -> TestSet:
    """The set that `--data` and `--data-path` mean, and of it the frames that `--limit` leaves.

    data: a known set's name or a folder; a Path is a folder.

    Raises `DataError` where there is none, or a file of it is bad.
    """
    known = KNOWN.get(data) if isinstance(data, str) else None
    if known is None:
        folder = _folder_of_samples(_existing_folder(data), ("test",))
        known = KnownSet(str(folder), (), real=False)
    else:
        root = existing_data_path(data_path or DEFAULT_FOLDER)
        folder = _folder_of_samples(root, known.folders)
    files = (options or EvaluationOptions()).chosen(list_samples(folder))
    if not files:
        raise DataError(f"{folder} holds no .npz file.", EXPECTED)
    pairs = [read_sample(path, image=False) for path in files]
    ys = np.stack([ys for ys, _ in pairs]) / known.voltage_scale
    images = [xs for _, xs in pairs if xs is not None]
    return TestSet(
        known.title,
        [path.stem for path in files],
        ys.astype(np.float32),
        np.stack(images).astype(np.float32) if len(images) == len(files) else None,
        known.real,
        REAL_ELECTRODE_DEGREES if known.real else _electrode_degrees(folder),
    )


def _existing_folder(data: str | Path) -> Path:
    path = Path(data)
    if not path.is_dir():
        near = difflib.get_close_matches(str(data), KNOWN, n=1)
        raise DataError(
            f"There is no folder {data}, and no set of that name ({', '.join(KNOWN)}).",
            f"Did you mean {near[0]}?" if near else "Give a folder of .npz files.",
        )
    return path


def _folder_of_samples(root: Path, names: tuple[str, ...]) -> Path:
    """`root/name` of the first name that holds samples, or `root` itself."""
    candidates = [root / name for name in names] + [root]
    for folder in candidates:
        if folder.is_dir() and list_samples(folder):
            return folder
    looked = ", ".join(str(folder) for folder in candidates)
    raise DataError(
        f"No .npz files (looked in {looked}).", f"--data-path names a folder. {EXPECTED}"
    )


def _electrode_degrees(folder: Path) -> float:
    """The electrode width a simulated set was made with, where it says so."""
    for place in (folder, folder.parent):
        note = place / ".simulation" / "settings.json"
        if note.is_file():
            try:
                degrees = float(json.loads(note.read_bytes())["settings"]["electrode_degrees"])
            except (ValueError, LookupError, TypeError, RecursionError):
                degrees = math.nan
            if not 1 <= degrees <= 20:
                raise DataError(
                    f"{note} is damaged: it names no electrode width.",
                    f"Without it a width of {REAL_ELECTRODE_DEGREES} degrees is taken.",
                )
            return degrees
    return REAL_ELECTRODE_DEGREES


UNIT_FACTOR = 30.0


def check_units(frames: TestSet, normalisation: Normalisation) -> str | None:
    """A warning where the voltages are in other units than the network learned."""
    typical = float(np.median(np.abs(frames.ys)))
    learned = float(np.median(normalisation.std))
    if typical > UNIT_FACTOR * learned:
        return (
            f"the voltages of {frames.title} are about {typical / learned:.0f} times those the "
            "network learned; a measured set needs its scale: --data uef2017 or ktc2023 with "
            "--data-path."
        )
    return None
