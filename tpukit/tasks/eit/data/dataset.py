"""EIT samples as the engine reads them: voltage maps, normalised, and images."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tpukit.errors import CheckpointError, DataError
from tpukit.io.files import write_file
from tpukit.tasks.eit.data.samples import Samples, list_samples, load_samples
from tpukit.tasks.eit.data.voltages import ELECTRODES, MEASUREMENTS, VOLTAGES, voltage_map
from tpukit.train.weights import read_foreign

DEFAULT_FOLDER = Path("data")
SHAPE = (1, ELECTRODES, MEASUREMENTS)
"""Shape of the tensors in `mean.pth` and `std.pth`."""


@dataclass(frozen=True, eq=False)
class EITDataset:
    """`dataset[i]` is `{"voltages": (1, 16, 16), "image": (1, 128, 128)}`, both float32."""

    samples: Samples
    normalisation: Normalisation

    def __len__(self) -> int:
        return len(self.samples.ys)

    def __getitem__(self, index: int, /) -> dict[str, NDArray[np.float32]]:
        maps = voltage_map(self.samples.ys[index], self.normalisation.mean, self.normalisation.std)
        # torch widens half precision three times as fast as numpy.
        image = torch.from_numpy(np.array(self.samples.xs[index])).float().numpy()
        return {"voltages": maps[None], "image": image[None]}


def open_split(
    data_path: Path | str, split: str, normalisation: Normalisation | None = None
) -> EITDataset:
    """The samples of `data_path/split`, with the data's own normalisation unless one is given.

    Raises `DataError` where there is no data, the split is empty, or a file is bad.
    """
    root = existing_data_path(Path(data_path))
    files = split_files(root, split)
    chosen = normalisation or data_normalisation(root)
    return EITDataset(load_samples(files), chosen)


def data_normalisation(root: Path) -> Normalisation:
    """`mean.pth` and `std.pth` beside the split folders, else in the parent, else in `./data`."""
    return find_normalisation(list(dict.fromkeys([root, root.resolve().parent, DEFAULT_FOLDER])))


def existing_data_path(path: Path) -> Path:
    """`path`. Raises `DataError` where it is not a folder."""
    if path.is_dir():
        return path
    if path.exists():
        raise DataError(f"The data path {path} is a file; a folder was expected.", _how_to(path))
    raise DataError(f"There is no data at {path}.", _how_to(path))


def split_files(root: Path, split: str) -> list[Path]:
    """The `.npz` files of one split, at least one."""
    folder = root / split
    if not folder.is_dir():
        raise DataError(f"{root} has no folder {split}/.", _how_to(root))
    files = list_samples(folder)
    if not files:
        raise DataError(f"{folder} holds no .npz file.", _how_to(root))
    return files


def _how_to(path: Path) -> str:
    command = f"tpukit data eit --out {shlex.quote(str(path))} --n 10000"
    return f"`{command}` makes some; --data-path names another folder."


# -- normalisation ---------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Normalisation:
    """What the network's voltages are normalised with; a run keeps its own."""

    mean: NDArray[np.float32]
    """(208,) volts."""
    std: NDArray[np.float32]
    """(208,) volts."""

    def to_bytes(self) -> bytes:
        """An `.npz` with `mean` and `std`, to be kept with a run."""
        stream = io.BytesIO()
        np.savez(stream, mean=self.mean.reshape(SHAPE), std=self.std.reshape(SHAPE))
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Normalisation:
        """The inverse of `to_bytes`. Raises `CheckpointError` for anything else."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as fields:
                mean, std = (fields[name].reshape(VOLTAGES) for name in ("mean", "std"))
        except Exception as error:
            raise CheckpointError(
                f"The run's normalisation cannot be read: {error}.",
                "Use another checkpoint of the run.",
            ) from error
        return cls(mean, std)


def find_normalisation(folders: Sequence[Path]) -> Normalisation:
    """`mean.pth` and `std.pth` of the first of `folders` that has either.

    Raises `DataError` where none has, or where they are not (1, 16, 13) positive numbers.
    """
    for folder in folders:
        if any((folder / name).exists() for name in ("mean.pth", "std.pth")):
            mean, std = _load(folder / "mean.pth"), _load(folder / "std.pth")
            if not (std > 0).all():
                channel = int(np.argmin(std > 0))
                raise DataError(
                    f"{folder / 'std.pth'}: {std[channel]} at {list(divmod(channel, 13))}; "
                    "every value must be positive."
                )
            return Normalisation(mean, std)
    looked = ", ".join(str(folder / "mean.pth") for folder in folders)
    raise DataError(
        f"No mean.pth and std.pth (looked for {looked}).",
        "`tpukit data eit` makes them with its samples; put the data set's own beside train/.",
    )


def _load(path: Path) -> NDArray[np.float32]:
    if not path.exists():
        raise DataError(f"{path} is missing.", "mean.pth and std.pth belong together.")
    try:
        tensor = read_foreign(path)
        values: NDArray[np.float32] = tensor.detach().float().numpy().reshape(-1)
    except Exception as error:
        raise DataError(
            f"{path} is not a tensor that can be loaded without running code.",
            f"Expected one of shape {SHAPE}, saved with torch.save.",
        ) from error
    if values.size != VOLTAGES or not np.isfinite(values).all():
        raise DataError(
            f"{path}: shape {tuple(tensor.shape)}, expected {SHAPE} finite numbers.",
            "`tpukit data eit` makes one of the right form.",
        )
    return values


def save_normalisation(folder: Path, normalisation: Normalisation) -> None:
    """Writes `mean.pth` and `std.pth` as the published data has them."""
    for name, values in (("mean", normalisation.mean), ("std", normalisation.std)):
        stream = io.BytesIO()
        torch.save(torch.from_numpy(values.reshape(SHAPE).copy()), stream)
        write_file(folder / f"{name}.pth", stream.getvalue())
