"""Makes a data set of simulated samples on all cores; a killed run goes on.

The work is cut into chunks of consecutive samples. A chunk's sums are written once its files are
there; the next run skips it, and the normalisation comes from those sums in order of the chunks.
So the files are the same bytes however often the run was killed, with any number of workers.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import ConfigError, DataError
from tpukit.io.files import write_file, writing_errors
from tpukit.io.process import allowed_cores
from tpukit.io.ranges import LARGEST_BATCH, LARGEST_COUNT, SEED, Range, range_problems
from tpukit.io.units import format_bytes
from tpukit.io.workers import map_completed
from tpukit.tasks.eit.data.conditioning import VOLTAGES
from tpukit.tasks.eit.data.normalisation import Normalisation, save_normalisation
from tpukit.tasks.eit.simulation.simulate import SimulationSettings, simulate

if TYPE_CHECKING:
    from tpukit.io.progress import Progress

SPLITS = ("train", "valid", "test")
CHUNK_SAMPLES = 200
Chunk = tuple[int, int]
"""Samples [start, stop)."""
JOURNAL = ".simulation"
"""Beside the splits: `settings.json` and the sums of each chunk."""
BYTES_OF_IMAGE = 4 * 128 * 128
SIMULATOR_VERSION = 1
"""Raised whenever the same seed gives other samples."""


@dataclass(frozen=True)
class DatasetPlan:
    """What is made, and where."""

    folder: Path
    samples: int
    first: int = 0
    """Number of the first sample: several machines can make parts of one set."""
    recon: bool = False
    """Adds the Tikhonov and Gauss-Newton images `TR` and `xs_gn`."""
    settings: SimulationSettings = field(default_factory=SimulationSettings)

    def chunks(self) -> list[Chunk]:
        """All samples, cut at multiples of `CHUNK_SAMPLES`."""
        stop = self.first + self.samples
        cuts = range(self.first // CHUNK_SAMPLES, -(-stop // CHUNK_SAMPLES))
        return [
            (max(self.first, k * CHUNK_SAMPLES), min(stop, (k + 1) * CHUNK_SAMPLES)) for k in cuts
        ]

    @property
    def journal(self) -> Path:
        return self.folder / JOURNAL

    def bytes_needed(self) -> int:
        """Approximate size of all files."""
        images = 3 if self.recon else 1
        return self.samples * (BYTES_OF_IMAGE * images + 2048)


@dataclass(frozen=True)
class SimulatedData:
    """Simulate an EIT data set; the same command continues a stopped one."""

    n: int = 10_000
    """Samples: 80 % train, 10 % valid, 10 % test."""
    seed: int = 0
    """Seed; a sample depends on it and its index."""
    start: int = 0
    """Index of the first sample."""
    labels: Literal["classes", "difference"] = "classes"
    """classes: -1 resistive, +1 conductive; difference: sigma - 1."""
    contrast: Literal["strong", "mild"] = "strong"
    """strong: plastic and metal; mild: sigma 0.01-0.9, 1.1-2."""
    noise: str = "33-60"
    """Signal to noise of a frame in dB: A, or A-B."""
    electrode_degrees: float = 10.2
    """Electrode width: 10.2 real tanks, 4 the published simulation."""
    recon: bool = False
    """Add Tikhonov and Gauss-Newton images (TR, xs_gn)."""
    workers: int | None = None
    """Worker processes (all cores)."""
    marks: ClassVar[tuple[str, ...]] = (".simulation", "mean.pth")

    def __post_init__(self) -> None:
        ranges = {"n": Range(10, LARGEST_BATCH), "seed": SEED, "start": Range(0, LARGEST_COUNT),
                  "workers": Range(1, 1024)}  # fmt: skip
        if problems := range_problems(vars(self), ranges):
            raise ConfigError(" ".join(problems), "Try --n 1000.")

    def write(self, out: Path, progress: Progress, log: Callable[[str], None]) -> dict[str, Any]:
        """Simulates what is not there yet; the JSON fields of `make_dataset`."""
        settings = SimulationSettings(
            self.seed, self.labels, self.contrast, parse_noise(self.noise), self.electrode_degrees
        )
        plan = DatasetPlan(out, self.n, self.start, self.recon, settings)
        check_plan(plan)
        already = self.n - sum(stop - start for start, stop in missing_chunks(plan))
        log(
            f"{self.n:,} samples take about {format_bytes(plan.bytes_needed())} in {out}, and half"
            " as much again once a training has packed them."
        )
        progress.skip(already)
        made = make_dataset(plan, self.workers or allowed_cores(), progress.advance)
        if already:
            log(f"{already:,} samples were there already.")
        log(
            f"{self.n:,} samples in {out} ({made['train']:,} train, {made['valid']:,} valid,"
            f" {made['test']:,} test), {made['seconds']:.1f} s"
        )
        log(f"Train on them: tpukit train --data-path {quote(str(out))}")
        return made


def parse_noise(text: str) -> tuple[float, float]:
    """`33-60` or `40`, in dB."""
    low, _, high = text.partition("-")
    try:
        return float(low), float(high or low)
    except ValueError:
        raise ConfigError(f"--noise {text!r} is not of the form 33-60 or 40.") from None


def split_name(index: int) -> str:
    """80/10/10: of each ten samples the ninth validates and the tenth tests."""
    return SPLITS[max(0, index % 10 - 7)]


def sample_path(folder: Path, index: int) -> Path:
    """The path of sample `index`."""
    return folder / split_name(index) / f"{index:07d}.npz"


def make_dataset(
    plan: DatasetPlan, workers: int, report: Callable[[int], None] = lambda samples: None
) -> dict[str, Any]:
    """Makes what is not there yet; `report` is called with the number of samples of each chunk.

    Returns `samples`, `train`, `valid`, `test`, `made` (this time), `seconds`.
    """
    started = time.monotonic()
    check_plan(plan)
    _prepare(plan)
    missing = missing_chunks(plan)
    _check_space(plan, sum(stop - start for start, stop in missing))
    made = 0
    for (start, stop), _ in map_completed(functools.partial(_make_chunk, plan), missing, workers):
        made += stop - start
        report(stop - start)
    _write_normalisation(plan)
    counts = dict.fromkeys(SPLITS, 0)
    for index in range(plan.first, plan.first + plan.samples):
        counts[split_name(index)] += 1
    seconds = round(time.monotonic() - started, 2)
    return {"samples": plan.samples, **counts, "made": made, "seconds": seconds}


NOISE = {"noise": Range(0, 200, whole=False)}
"""Range of the noise in dB."""


def check_plan(plan: DatasetPlan) -> None:
    """Raises `ConfigError` for numbers out of range."""
    low, high = plan.settings.noise_db
    if plan.samples < 10:
        raise ConfigError(
            f"--n {plan.samples} is too few: 80/10/10 needs at least 10 samples.", "Try --n 1000."
        )
    if plan.first < 0 or plan.settings.seed < 0 or plan.settings.seed >= 2**64:
        raise ConfigError("--start and --seed must be 0 or more (and below 2**64).")
    if problems := range_problems({"noise": low}, NOISE) + range_problems({"noise": high}, NOISE):
        raise ConfigError(problems[0])
    if not low <= high:
        raise ConfigError(f"--noise {low:g}-{high:g}: the first must not exceed the second.")
    if not 1.0 <= plan.settings.electrode_degrees <= 20.0:
        raise ConfigError(
            f"--electrode-degrees {plan.settings.electrode_degrees:g} must lie in 1..20.",
            "16 electrodes share 360 degrees: the real tanks have 10.2.",
        )


def missing_chunks(plan: DatasetPlan) -> list[Chunk]:
    """Chunks without sums, or with a file missing."""
    there = {name: _file_names(plan.folder / name) for name in SPLITS}
    return [
        (start, stop)
        for start, stop in plan.chunks()
        if not _sums_path(plan.journal, start, stop).exists()
        or any(f"{i:07d}.npz" not in there[split_name(i)] for i in range(start, stop))
    ]


def _file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


# -- the folder ------------------------------------------------------------------------------------


def _identity(plan: DatasetPlan) -> dict[str, Any]:
    """What decides the samples' values, as JSON holds it."""
    identity = {
        "recon": plan.recon,
        "version": SIMULATOR_VERSION,
        "settings": dataclasses.asdict(plan.settings),
        "first": plan.first,
    }
    return dict(json.loads(json.dumps(identity)))


def _prepare(plan: DatasetPlan) -> None:
    """Makes the folders and notes the settings, or checks that they are the same as before."""
    identity = _identity(plan)
    settings_path = plan.journal / "settings.json"
    with writing_errors(plan.folder):
        if settings_path.exists():
            _check_identity(plan, json.loads(settings_path.read_text()), identity)
        elif any(_file_names(plan.folder / name) for name in SPLITS):
            raise DataError(
                f"{plan.folder} already holds samples that this command did not make.",
                "Choose another folder with --out.",
            )
        for folder in (plan.journal, *(plan.folder / name for name in SPLITS)):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder)
        write_file(settings_path, json.dumps(identity, indent=1).encode())


def _check_identity(plan: DatasetPlan, before: dict[str, Any], now: dict[str, Any]) -> None:
    flat_before, flat_now = ({**d, **d["settings"]} for d in (before, now))
    changed = [
        f"{name} (was {flat_before.get(name)}, now {value})"
        for name, value in flat_now.items()
        if name != "settings" and flat_before.get(name) != value
    ]
    if changed:
        raise DataError(
            f"{plan.folder} was made with other settings: {', '.join(changed)}.",
            "Choose another folder with --out, or remove that one.",
        )
    held = sum(len(_file_names(plan.folder / name)) for name in SPLITS)
    if held > plan.samples:
        raise DataError(
            f"{plan.folder} already holds {held:,} samples, more than --n {plan.samples:,}.",
            "Choose another folder with --out, or remove that one.",
        )


def _remove_leftovers(folder: Path) -> None:
    for path in [*folder.glob(".*.partial"), *folder.glob(".*.part")]:
        path.unlink(missing_ok=True)


def _check_space(plan: DatasetPlan, samples: int) -> None:
    needed = plan.bytes_needed() * samples // plan.samples
    free = shutil.disk_usage(plan.folder).free
    if needed > free:
        raise DataError(
            f"{plan.folder} has {free / 1e9:.2f} GB free; {samples:,} samples take "
            f"{needed / 1e9:.2f} GB.",
            "Choose a folder on a larger disk with --out, or fewer samples with --n.",
            id="disk-full",
        )


# -- one chunk -------------------------------------------------------------------------------------


def _make_chunk(plan: DatasetPlan, chunk: Chunk) -> None:
    """Writes the files of a chunk's samples, then the sums of its training samples."""
    sums = ChannelSums()
    with writing_errors(plan.folder):
        for index in range(*chunk):
            ys = _write_sample(plan, index)
            if split_name(index) == "train":
                sums.add(ys.astype(np.float64))
        write_file(_sums_path(plan.journal, *chunk), sums.to_bytes(), sync=False)


def _write_sample(plan: DatasetPlan, index: int) -> NDArray[np.float32]:
    """Writes one file; returns its voltages (208,)."""
    sample, degrees = simulate(plan.settings, index), plan.settings.electrode_degrees
    arrays: dict[str, Any] = {"ys": sample.ys[:, None], "xs": sample.xs}
    if plan.recon:
        from tpukit.tasks.eit.baseline import noser, tikhonov

        arrays["TR"] = tikhonov(degrees).images(sample.ys)
        arrays["xs_gn"] = noser(degrees).images(sample.ys)
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    write_file(sample_path(plan.folder, index), stream.getvalue(), sync=False)
    return sample.ys


def _sums_path(journal: Path, start: int, stop: int) -> Path:
    return journal / f"{start:09d}-{stop:09d}.npy"


class ChannelSums:
    """Count, mean and squared deviations of each channel (Welford; Chan et al. to merge)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = np.zeros(VOLTAGES)
        self.squares = np.zeros(VOLTAGES)

    def add(self, values: NDArray[np.float64]) -> None:
        """One more sample (208,)."""
        self.count += 1
        off = values - self.mean
        self.mean += off / self.count
        self.squares += off * (values - self.mean)

    def merge(self, other: ChannelSums) -> None:
        """As if the other's samples had been added."""
        if other.count:
            total = self.count + other.count
            off = other.mean - self.mean
            self.mean += off * (other.count / total)
            self.squares += other.squares + off**2 * (self.count * other.count / total)
            self.count = total

    def std(self) -> NDArray[np.float64]:
        """(208,), unbiased as `torch.std`."""
        deviation: NDArray[np.float64] = np.sqrt(self.squares / max(1, self.count - 1))
        return deviation

    def to_bytes(self) -> bytes:
        stream = io.BytesIO()
        np.save(stream, np.concatenate([[self.count], self.mean, self.squares]))
        return stream.getvalue()

    @classmethod
    def from_file(cls, path: Path) -> ChannelSums:
        values = np.load(path, allow_pickle=False)
        sums = cls()
        sums.count = int(values[0])
        sums.mean, sums.squares = values[1 : 1 + VOLTAGES], values[1 + VOLTAGES :]
        return sums


def _write_normalisation(plan: DatasetPlan) -> None:
    """`mean.pth` and `std.pth`, tensors (1, 16, 13), over the samples that train."""
    files = (_sums_path(plan.journal, start, stop) for start, stop in plan.chunks())
    sums = merged(ChannelSums.from_file(path) for path in files)
    with writing_errors(plan.folder):
        values = (sums.mean.astype(np.float32), sums.std().astype(np.float32))
        save_normalisation(plan.folder, Normalisation(*values))


def merged(parts: Iterable[ChannelSums]) -> ChannelSums:
    """All parts together, in their order."""
    total = ChannelSums()
    for part in parts:
        total.merge(part)
    return total
