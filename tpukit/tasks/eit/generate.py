"""Makes a data set of simulated samples on all cores; a killed run goes on.

A sample is a pure function of (settings, index): workers and order do not matter. The ranges of
contrast, size and noise were chosen after looking at the real sets' voltages.

A run makes the samples whose files are missing, and computes the normalisation from all files at
the end. So the files are the same bytes however often it was killed, with any number of workers.
"""

from __future__ import annotations

import functools
import io
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import ConfigError, DataError
from tpukit.io.files import write_file, writing_errors
from tpukit.io.process import allowed_cores
from tpukit.io.ranges import LARGEST_BATCH, LARGEST_COUNT, SEED, Range, range_problems, setting
from tpukit.io.units import format_bytes
from tpukit.io.workers import map_ordered
from tpukit.tasks.eit.simulation.forward import forward_model
from tpukit.tasks.eit.simulation.inclusions import draw_image, draw_inclusions, sigma_on

if TYPE_CHECKING:
    from tpukit.io.progress import Progress

SPLITS = ("train", "valid", "test")
CHUNK_SAMPLES = 200
"""Samples that a worker makes at a time."""
JOURNAL = ".simulation"
"""Folder of `settings.json`, beside the splits."""
BYTES_OF_IMAGE = 4 * 128 * 128
SIMULATOR_VERSION = 2
"""Raised whenever the same seed gives other samples."""
NOISE = Range(0, 200, whole=False)
"""What each end of the noise may be."""


@dataclass(frozen=True)
class SimulatedData:
    """Simulate an EIT data set; the same command continues a stopped one."""

    n: int = setting(10_000, Range(10, LARGEST_BATCH))
    """Samples: 80 % train, 10 % valid, 10 % test."""
    seed: int = setting(0, SEED)
    """Seed; a sample depends on it and its index."""
    start: int = setting(0, Range(0, LARGEST_COUNT))
    """Index of the first sample."""
    labels: Literal["classes", "difference"] = "classes"
    """classes: -1 resistive, +1 conductive; difference: sigma - 1."""
    contrast: Literal["strong", "mild"] = "strong"
    """strong: plastic and metal; mild: sigma 0.01-0.9, 1.1-2."""
    noise: str = "33-60"
    """Signal to noise of a frame in dB: A, or A-B."""
    # 16 electrodes share 360 degrees.
    electrode_degrees: float = setting(10.2, Range(1, 20, whole=False))
    """Electrode width: 10.2 real tanks, 4 the published simulation."""
    recon: bool = False
    """Add Tikhonov and Gauss-Newton images (TR, xs_gn)."""
    workers: int | None = setting(None, Range(1, 1024))
    """Worker processes (all cores)."""
    marks: ClassVar[tuple[str, ...]] = (".simulation", "mean.pth")

    def __post_init__(self) -> None:
        low, high = self.noise_db
        problems = range_problems(self)
        problems += [NOISE.problem("--noise", end) for end in (low, high) if end not in NOISE]
        if low > high:
            problems.append(f"--noise {self.noise}: the first must not exceed the second.")
        if problems:
            raise ConfigError(" ".join(problems), "`tpukit data eit --help` lists the options.")

    @property
    def noise_db(self) -> tuple[float, float]:
        """Least and most signal to noise."""
        low, _, high = self.noise.partition("-")
        try:
            return float(low), float(high or low)
        except ValueError:
            text = f"--noise {self.noise!r} is not of the form 33-60 or 40."
            raise ConfigError(text) from None

    @property
    def indices(self) -> range:
        """All samples."""
        return range(self.start, self.start + self.n)

    def bytes_needed(self) -> int:
        """Approximate size of all files."""
        return self.n * (BYTES_OF_IMAGE * (3 if self.recon else 1) + 2048)

    def identity(self) -> dict[str, Any]:
        """What decides the samples' values, as JSON holds it."""
        names = ("seed", "labels", "contrast", "electrode_degrees")
        settings = {**{n: getattr(self, n) for n in names}, "noise_db": list(self.noise_db)}
        return {"recon": self.recon, "version": SIMULATOR_VERSION, "settings": settings,
                "first": self.start}  # fmt: skip

    def write(self, out: Path, progress: Progress, log: Callable[[str], None]) -> dict[str, Any]:
        """Simulates what is not there yet; the JSON fields of `make_dataset`."""
        already = self.n - len(missing_samples(self, out))
        log(
            f"{self.n:,} samples take about {format_bytes(self.bytes_needed())} in {out}, and half"
            " as much again once a training has packed them."
        )
        progress.skip(already)
        made = make_dataset(self, out, progress.advance)
        if already:
            log(f"{already:,} samples were there already.")
        log(
            f"{self.n:,} samples in {out} ({made['train']:,} train, {made['valid']:,} valid,"
            f" {made['test']:,} test), {made['seconds']:.1f} s"
        )
        log(f"Train on them: tpukit train --data-path {quote(str(out))}")
        return made


class SimulatedSample(NamedTuple):
    """One sample as its file holds it."""

    ys: NDArray[np.float32]
    """(208,) volts: with the objects minus without, with noise."""
    xs: NDArray[np.float32]
    """(128, 128) labels."""


def simulate(settings: SimulatedData, index: int) -> SimulatedSample:
    """Sample number `index`."""
    rng = np.random.Generator(np.random.Philox(key=[settings.seed, index]))
    inclusions = draw_inclusions(rng, settings.contrast)
    model = forward_model(settings.electrode_degrees)
    voltages = model.change(sigma_on(model.mesh, inclusions))
    decibel = rng.uniform(*settings.noise_db)
    noise = rng.standard_normal(len(voltages)) * noise_level(voltages, decibel)
    ys = (voltages + noise).astype(np.float32)
    return SimulatedSample(ys, draw_image(inclusions, settings.labels))


def noise_level(voltages: NDArray[np.float64], decibel: float) -> float:
    """Volts: the noise's standard deviation at `decibel` below the frame's root mean square."""
    return float(np.sqrt((voltages**2).mean()) * 10 ** (-decibel / 20))


# -- the folder ------------------------------------------------------------------------------------
def split_name(index: int) -> str:
    """80/10/10: of each ten samples the ninth validates and the tenth tests."""
    return SPLITS[max(0, index % 10 - 7)]


def make_dataset(
    data: SimulatedData, folder: Path, report: Callable[[int], None] = lambda samples: None
) -> dict[str, Any]:
    """Makes what is not there yet; `report` is called with the number of samples of each chunk.

    Returns `samples`, `train`, `valid`, `test`, `made` (this time), `seconds`.
    """
    started = time.monotonic()
    _prepare(data, folder)
    missing = missing_samples(data, folder)
    _check_space(data, folder, len(missing))
    chunks = [missing[k : k + CHUNK_SAMPLES] for k in range(0, len(missing), CHUNK_SAMPLES)]
    make = functools.partial(_make_samples, data, folder)
    for made in map_ordered(make, chunks, data.workers or allowed_cores()):
        report(made)
    _write_normalisation(data, folder)
    splits = [split_name(index) for index in data.indices]
    counts = {name: splits.count(name) for name in SPLITS}
    seconds = round(time.monotonic() - started, 2)
    return {"samples": data.n, **counts, "made": len(missing), "seconds": seconds}


def missing_samples(data: SimulatedData, folder: Path) -> list[int]:
    """Samples without a file."""
    there = {name: _file_names(folder / name) for name in SPLITS}
    return [i for i in data.indices if f"{i:07d}.npz" not in there[split_name(i)]]


def _file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _prepare(data: SimulatedData, out: Path) -> None:
    """Makes the folders and notes the settings, or checks that they are the same as before."""
    settings_path = out / JOURNAL / "settings.json"
    with writing_errors(out):
        if settings_path.exists():
            _check_identity(data, out, json.loads(settings_path.read_text()))
        elif any(_file_names(out / name) for name in SPLITS):
            raise DataError(
                f"{out} already holds samples that this command did not make.",
                "Choose another folder with --out.",
            )
        for folder in (out / JOURNAL, *(out / name for name in SPLITS)):
            folder.mkdir(parents=True, exist_ok=True)
            for path in [*folder.glob(".*.partial"), *folder.glob(".*.part")]:
                path.unlink(missing_ok=True)
        write_file(settings_path, json.dumps(data.identity(), indent=1).encode())


def _check_identity(data: SimulatedData, folder: Path, before: dict[str, Any]) -> None:
    was, now = ({**d, **d["settings"], "settings": None} for d in (before, data.identity()))
    changed = [
        f"{name} (was {was.get(name)}, now {value})"
        for name, value in now.items()
        if was.get(name) != value
    ]
    held = sum(len(_file_names(folder / name)) for name in SPLITS)
    problem = ""
    if changed:
        problem = f"was made with other settings: {', '.join(changed)}."
    elif held > data.n:
        problem = f"already holds {held:,} samples, more than --n {data.n:,}."
    if problem:
        hint = "Choose another folder with --out, or remove that one."
        raise DataError(f"{folder} {problem}", hint)


def _check_space(data: SimulatedData, folder: Path, samples: int) -> None:
    needed = data.bytes_needed() * samples // data.n
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{folder} has {free / 1e9:.2f} GB free; {samples:,} samples take "
            f"{needed / 1e9:.2f} GB.",
            "Choose a folder on a larger disk with --out, or fewer samples with --n.",
            id="disk-full",
        )


# -- files ---------------------------------------------------------------------------------------
def _make_samples(data: SimulatedData, folder: Path, indices: Sequence[int]) -> int:
    degrees = data.electrode_degrees
    for index in indices:
        sample, stream = simulate(data, index), io.BytesIO()
        arrays: dict[str, Any] = {"ys": sample.ys[:, None], "xs": sample.xs}
        if data.recon:
            from tpukit.tasks.eit.baseline import noser, tikhonov

            arrays["TR"] = tikhonov(degrees).images(sample.ys)
            arrays["xs_gn"] = noser(degrees).images(sample.ys)
        np.savez(stream, **arrays)
        with writing_errors(folder):
            write_file(_file_of(folder, index), stream.getvalue(), sync=False)
    return len(indices)


def _file_of(folder: Path, index: int) -> Path:
    return folder / split_name(index) / f"{index:07d}.npz"


def _write_normalisation(data: SimulatedData, folder: Path) -> None:
    """`mean.pth` and `std.pth`, tensors (1, 16, 13), over the samples that train."""
    # Here: the workers start without torch.
    from tpukit.tasks.eit.data.dataset import Normalisation, save_normalisation
    from tpukit.tasks.eit.data.samples import read_sample

    trained = (index for index in data.indices if split_name(index) == "train")
    of_all = np.stack([read_sample(_file_of(folder, index))[0] for index in trained])
    mean, std = of_all.mean(0, np.float64), of_all.std(0, np.float64, ddof=1)
    with writing_errors(folder):
        values = Normalisation(mean.astype(np.float32), std.astype(np.float32))
        save_normalisation(folder, values)
