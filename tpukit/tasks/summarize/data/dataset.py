"""Samples out of the token cache, and the batches they are put into."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tpukit.hardware.backend import Batch
from tpukit.tasks.summarize.data.buckets import Bucket, Bucketing
from tpukit.tasks.summarize.data.token_cache import SampleSizes, TokenCache
from tpukit.tasks.summarize.model.decoder import IGNORED
from tpukit.train.task import VALIDATION_EPOCH, MicroBatch, Sample, SampleKey

Array = np.ndarray[Any, Any]


@runtime_checkable
class SizedSamples(Protocol):
    """Samples whose lengths are known without reading them."""

    sizes: SampleSizes
    bucketing: Bucketing


class TokenSamples:
    """Some samples of a token cache (a SampleSource): `tokens` (length,) and `targets`."""

    def __init__(
        self, cache: TokenCache, indices: Array, bucketing: Bucketing, *, whole: bool = False
    ) -> None:
        """whole: all tokens but the first are targets, the prompt's too."""
        self.cache = cache
        self.indices = indices
        self.whole = whole
        self.sizes = sample_sizes(cache, indices, whole=whole)
        self.bucketing = bucketing

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Sample:
        tokens, targets = self.cache.example(int(self.indices[index]))
        if self.whole:
            return {"tokens": tokens, "targets": len(tokens) - 1}
        learned = self.cache.learned(int(self.indices[index]))
        flags = {} if learned is None else {"learned": learned}
        return {"tokens": tokens, "targets": targets, **flags}

    def prompt_and_targets(self, index: int) -> tuple[Array, Array]:
        """The prompt's tokens and those of the summary, or a last message, with its end token."""
        tokens, targets = self.cache.example(int(self.indices[index]))
        learned = self.cache.learned(int(self.indices[index]))
        if learned is not None:
            targets = len(tokens) - 1 - int(np.flatnonzero(~learned)[-1])
        return tokens[:-targets].astype(np.int64), tokens[-targets:].astype(np.int64)


def sample_sizes(cache: TokenCache, indices: Array, *, whole: bool) -> SampleSizes:
    """The sizes of some samples; whole: all tokens but the first are targets."""
    sizes = cache.sizes(indices)
    return SampleSizes(sizes.lengths, sizes.lengths - 1) if whole else sizes


def split_indices(count: int, valid_fraction: float, seed: int) -> tuple[Array, Array]:
    """Training and validation samples, shuffled with a seed; each part keeps the file's order."""
    kept = round(count * valid_fraction)
    if valid_fraction > 0 and count > 1:
        kept = min(max(kept, 1), count - 1)
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(count)
    return np.sort(order[kept:]), np.sort(order[:kept])


class Targets:
    """Positions and tokens of the targets of each device's rows."""

    def __init__(self, devices: int, places: int) -> None:
        self.wanted = np.zeros((devices, places), np.int64)
        self.labels = np.full((devices, places), IGNORED, np.int64)
        self._used = [0] * devices

    def add(self, sample: Sample, device: int, start: int) -> None:
        """A sample that begins at position `start` of a device's flattened rows."""
        length, count = len(sample["tokens"]), int(sample["targets"])
        learned = sample.get("learned")
        at = np.arange(length - count, length) if learned is None else np.flatnonzero(learned)
        places = slice(self._used[device], self._used[device] + count)
        self.wanted[device, places] = start + at - 1
        self.labels[device, places] = sample["tokens"][at]
        self._used[device] += count


def collate_tokens(samples: Sequence[Sample], micro: MicroBatch) -> Batch:
    """The fixed shapes of the bucket `micro.shape`, for the rows of one rank.

    tokens: (rows, length); mask: (rows,), 0 for rows without a sample. wanted, labels:
    (devices, targets): where in the rows of a device the next token is a target, counted over
    their flattened positions, and which token it is; `IGNORED` where a place is not used.
    """
    bucket = micro.shape
    assert isinstance(bucket, Bucket)
    devices = micro.rows // bucket.rows
    tokens = np.zeros((micro.rows, bucket.length), np.int64)
    targets = Targets(devices, bucket.targets)
    mask = np.zeros(micro.rows, np.float32)
    # A rank without samples of its own is given one that must not count.
    for row, sample in enumerate(samples[: len(micro.keys)]):
        device, row_of_device = divmod(row, bucket.rows)
        length = len(sample["tokens"])
        tokens[row, :length] = sample["tokens"]
        targets.add(sample, device, row_of_device * bucket.length)
        mask[row] = 1.0
    arrays = {"tokens": tokens, "mask": mask, "wanted": targets.wanted, "labels": targets.labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def spread_labels(labels: Tensor, wanted: Tensor, positions: int) -> Tensor:
    """`labels` (groups, count) put where `wanted` says among all positions, `IGNORED` elsewhere:
    (groups, positions / groups)."""
    groups = labels.shape[0]
    size = positions // groups
    places = torch.where(labels == IGNORED, size, wanted)
    everywhere = labels.new_full((groups, size + 1), IGNORED)
    return everywhere.scatter(1, places, labels)[:, :size]


def example_batch(bucket: Bucket, devices: int, vocabulary: int) -> Batch:
    """A full batch of a bucket, of synthetic data."""
    targets = max(1, bucket.targets // bucket.rows)
    sample = {
        "tokens": np.arange(bucket.length) % vocabulary,
        "targets": min(targets, bucket.length - 1),
    }
    rows = bucket.rows * devices
    keys = (SampleKey(VALIDATION_EPOCH, 0),) * rows
    return collate_tokens([sample] * rows, MicroBatch(keys, rows, bucket))
