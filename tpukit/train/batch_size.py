"""How a global batch is split over devices and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from tpukit.errors import ConfigError


@dataclass(frozen=True)
class BatchSplit:
    """global_batch_size = accumulate x devices x rows_per_device."""

    global_batch_size: int
    devices: int
    accumulate: int

    @property
    def rows_per_device(self) -> int:
        return self.global_batch_size // (self.devices * self.accumulate)

    @property
    def micro_rows(self) -> int:
        """Rows of one micro-batch over all devices."""
        return self.global_batch_size // self.accumulate

    def describe(self) -> str:
        return (
            f"{self.global_batch_size} = {self.rows_per_device} samples x {self.devices} device(s)"
            f" x {self.accumulate} micro-batch(es)"
        )


def split_batch(
    global_batch_size: int, devices: int, accumulate: int | None, most_rows_per_device: int
) -> BatchSplit:
    """The requested split, or the one with the fewest accumulation steps.

    Raises ConfigError naming the nearest sizes that divide.
    """
    if accumulate is not None:
        _require_multiple(global_batch_size, devices * accumulate, devices, accumulate)
        return BatchSplit(global_batch_size, devices, accumulate)
    _require_multiple(global_batch_size, devices, devices, 1)
    rows = global_batch_size // devices
    fewest = next(
        n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most_rows_per_device
    )
    return BatchSplit(global_batch_size, devices, fewest)


def _require_multiple(size: int, unit: int, devices: int, accumulate: int) -> None:
    if size % unit == 0:
        return
    below, above = size // unit * unit, (size // unit + 1) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    parts = f"{devices} device(s)" + (
        f" x {accumulate} accumulation steps" if accumulate > 1 else ""
    )
    raise ConfigError(
        f"--global-batch-size {size} does not divide over {parts}.",
        f"The nearest sizes that do: {nearest}.",
    )
