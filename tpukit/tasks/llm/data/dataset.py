"""Samples out of the token cache, and the batches they are put into."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tpukit.hardware.backend import Batch
from tpukit.tasks.llm.data.packing import RowShape, SetSizes
from tpukit.tasks.llm.data.token_cache import SampleSizes, TokenCache
from tpukit.train.task import VALIDATION_EPOCH, MicroBatch, Sample, SampleKey

Array = np.ndarray[Any, Any]
IGNORED = -100
"""Label of a place that is not a target."""


class TokenSamples:
    """Some samples of a token cache (a SampleSource): `tokens` (length,) and `targets`."""

    def __init__(
        self, cache: TokenCache, indices: Array, set_sizes: SetSizes, *, whole: bool = False,
        pairs: bool = False,
    ) -> None:  # fmt: skip
        """whole: all tokens but the first are targets, the prompt's too.
        pairs: samples hold a completion and a rejected one, each with its prompt."""
        self.cache = cache
        self.indices = indices
        self.whole = whole
        self.pairs = pairs
        self.sizes = sample_sizes(cache, indices, whole=whole)
        self.set_sizes = set_sizes

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Sample:
        tokens, targets, learned = self.cache.example(int(self.indices[index]))
        sample = {"tokens": tokens, "targets": len(tokens) - 1 if self.whole else targets}
        if learned is not None and not self.whole:
            sample["learned"] = learned
        return {**sample, "rejected_at": rejected_at(learned)} if self.pairs else sample

    def prompt_and_targets(self, index: int) -> tuple[Array, Array]:
        """The prompt's tokens and those of the summary, or a last message, with its end token."""
        tokens, targets, learned = self.cache.example(int(self.indices[index]))
        if self.pairs:
            end = rejected_at(learned)
            tokens, learned = tokens[:end], None if learned is None else learned[:end]
        if learned is not None:
            targets = len(tokens) - 1 - int(np.flatnonzero(~learned)[-1])
        return tokens[:-targets].astype(np.int64), tokens[-targets:].astype(np.int64)


def rejected_at(learned: Any) -> int:
    """Where the second half of a pair begins: its prompt follows what is learned of the first."""
    return int(np.flatnonzero(learned[:-1] & ~learned[1:])[0]) + 1


def sample_sizes(cache: TokenCache, indices: Array, *, whole: bool) -> SampleSizes:
    """The sizes of some samples; whole: all tokens but the first are targets."""
    lengths = cache.lengths[indices]
    return SampleSizes(lengths, lengths - 1 if whole else np.asarray(cache.targets[indices]))


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
        self.pairs = np.zeros((devices, places), np.int64)
        self._used, self._samples = [0] * devices, [0] * devices

    def add(self, sample: Sample, device: int, start: int) -> None:
        """A sample that begins at position `start` of a device's flattened rows."""
        length, count = len(sample["tokens"]), int(sample["targets"])
        learned = sample.get("learned")
        at = np.arange(length - count, length) if learned is None else np.flatnonzero(learned)
        places = slice(self._used[device], self._used[device] + count)
        self.wanted[device, places] = start + at - 1
        self.labels[device, places] = sample["tokens"][at]
        self._used[device] += count
        self._samples[device] += 1
        rejected = at >= sample.get("rejected_at", length)
        self.pairs[device, places] = np.where(rejected, -1, 1) * self._samples[device]


def collate_tokens(samples: Sequence[Sample], micro: MicroBatch) -> Batch:
    """The fixed shape `micro.shape`, for the rows of one rank.

    tokens: (rows, length); mask: (rows,), 0 for rows without a sample. wanted, labels:
    (devices, targets): where in the rows of a device the next token is a target, counted over
    their flattened positions, and which token it is; `IGNORED` where a place is not used.
    starts, of packed rows and pairs alone: (rows, length), where in its row each token's sample
    begins. pairs, of pairs alone: (devices, targets), the number of a target's pair on its device,
    from 1, negative in the rejected completion; 0 where a place is not used.
    """
    shape = micro.shape
    assert isinstance(shape, RowShape)
    tokens = np.zeros((micro.rows, shape.length), np.int64)
    # What only fills a row attends to itself.
    starts = np.tile(np.arange(shape.length), (micro.rows, 1))
    targets = Targets(micro.rows // shape.rows, shape.targets)
    mask = np.zeros(micro.rows, np.float32)
    # A rank without samples of its own is given one that must not count.
    remaining = iter(samples[: len(micro.keys)])
    for row, count in enumerate(micro.counts or ()):
        device, row_of_device = divmod(row, shape.rows)
        start = 0
        for _, sample in zip(range(count), remaining, strict=False):
            length = len(sample["tokens"])
            tokens[row, start : start + length] = sample["tokens"]
            starts[row, start : start + length] = start
            middle = start + sample.get("rejected_at", length)
            starts[row, middle : start + length] = middle
            targets.add(sample, device, row_of_device * shape.length + start)
            start += length
            mask[row] = 1.0
    has_pairs = "rejected_at" in samples[0]
    arrays = {"tokens": tokens, "mask": mask, "wanted": targets.wanted, "labels": targets.labels}
    arrays |= {"starts": starts} if shape.packed or has_pairs else {}
    arrays |= {"pairs": targets.pairs} if has_pairs else {}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def example_batch(
    shape: RowShape, devices: int, vocabulary: int, longest: int, *, pairs: bool = False
) -> Batch:
    """A full batch of a shape, of synthetic data: at least two samples to a packed row, none longer
    than `longest`."""
    rows = shape.rows * devices
    each = max(2, -(-shape.length // longest)) if shape.packed else 1
    length = shape.length // each
    targets = min(max(1, shape.targets // (each * shape.rows)), length - 1)
    sample: dict[str, Any] = {"tokens": np.arange(length) % vocabulary, "targets": targets}
    if pairs:
        middle, place = length // 2, np.arange(length)
        rejected = place >= length - targets // 2
        sample |= {
            "rejected_at": middle,
            "learned": rejected | ((place < middle) & (place >= middle - (targets + 1) // 2)),
        }
    keys = (SampleKey(VALIDATION_EPOCH, 0),) * (each * rows)
    micro = MicroBatch(keys, rows, shape, counts=(each,) * rows)
    return collate_tokens([sample] * len(keys), micro)
