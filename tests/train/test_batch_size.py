"""Splitting a global batch over devices and micro-batches."""

from __future__ import annotations

import pytest

from tpukit.errors import ConfigError
from tpukit.train.batch_size import split_batch


@pytest.mark.parametrize(
    ("size", "devices", "accumulate", "most", "rows", "micro_steps"),
    [(256, 2, None, 16, 16, 8), (256, 1, None, 16, 16, 16), (64, 8, None, 16, 8, 1),
     (64, 8, 4, 16, 2, 4), (7, 1, None, 3, 1, 7)],
)  # fmt: skip
def test_the_effective_batch_stays(size, devices, accumulate, most, rows, micro_steps):
    split = split_batch(size, devices, accumulate, most)
    assert (split.rows_per_device, split.accumulate) == (rows, micro_steps)
    assert split.rows_per_device * split.accumulate * split.devices == size


@pytest.mark.parametrize(
    ("size", "devices", "accumulate", "nearest"),
    [(100, 8, None, "96 or 104"), (3, 8, None, "8"), (60, 4, 4, "48 or 64")],
)
def test_what_does_not_divide_names_the_nearest(size, devices, accumulate, nearest):
    with pytest.raises(ConfigError) as caught:
        split_batch(size, devices, accumulate, 16)
    assert nearest in caught.value.hint
