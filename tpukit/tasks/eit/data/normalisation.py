"""The voltages' mean and standard deviation: `mean.pth` and `std.pth`, tensors (1, 16, 13)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import CheckpointError, DataError
from tpukit.io.files import write_file
from tpukit.tasks.eit.data.conditioning import ELECTRODES, MEASUREMENTS, VOLTAGES

SHAPE = (1, ELECTRODES, MEASUREMENTS)


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
    from tpukit.train.storage.foreign import read_foreign

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
    import torch

    for name, values in (("mean", normalisation.mean), ("std", normalisation.std)):
        stream = io.BytesIO()
        torch.save(torch.from_numpy(values.reshape(SHAPE).copy()), stream)
        write_file(folder / f"{name}.pth", stream.getvalue())
