"""Host batches: what `collate` and `draw` may leave to the engine."""

import io
import itertools
import random

import numpy as np
import pytest
import torch
from tiny_task import Tiny

from tpukit.errors import DataError, UsageError
from tpukit.train.loader import LoaderSettings, example_batches, make_loader
from tpukit.train.task import Datasets, MicroBatch, PlanSettings, SampleKey, Task, stack_samples

LENGTHS = (16, 61)


def load(task, data, *micro_batches):
    """The host batches of these micro-batches."""
    return list(make_loader(task, data, micro_batches, LoaderSettings(workers=0, seed=0)))


def keys(*samples):
    return tuple(SampleKey(0, sample) for sample in samples)


class Numbers:
    """Sample i holds i, `length(i)` times."""

    def __init__(self, count, length=lambda index: 3):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"x": np.full(self.length(index), index, np.float32), "label": index}


class Plain(Tiny):
    """Neither draws nor pads."""

    draw = Task.draw


# -- draws of the data's own ----------------------------------------------------------------------
class Drawn(Numbers):
    """A public script's data: augmented by the generators that all code shares."""

    def __getitem__(self, index):
        drawn = torch.rand(()).item(), np.random.rand(), random.random()
        return {**super().__getitem__(index), "drawn": np.array(drawn, np.float32)}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_data_draw_depends_on_their_samples_alone(workers):
    """Neither on the steps before, which a resumed run leaves out, nor on the rank."""
    micros = [MicroBatch(keys(0, 1), 2), MicroBatch(keys(2, 3), 2), MicroBatch(keys(4, 5), 2)]
    settings = LoaderSettings(workers, seed=0)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    batches = [b["drawn"] for b in make_loader(Plain(), Drawn(6), micros, settings)]
    assert torch.rand(1) == expected, "drop-out draws what it would have drawn"
    resumed = [b["drawn"] for b in make_loader(Plain(), Drawn(6), micros[1:], settings)]
    assert all(map(torch.equal, batches[1:], resumed))
    assert len(torch.cat(batches).unique()) == 18


class Split(Plain):
    """A random split, as a script makes one without a seed."""

    def datasets(self):
        data, order = Numbers(32), np.random.permutation(32)
        parts = torch.utils.data.random_split(data, [24, 8])
        return Datasets(parts[0], {"torch": parts[1], "numpy": order, "python": random.random()})


def test_a_random_split_is_the_same_in_each_rank_run_and_command():
    found = []
    for seed in range(2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        found.append(Split().datasets().valid)
    one, other = found
    assert one["torch"].indices == other["torch"].indices
    assert list(one["numpy"]) == list(other["numpy"]) and one["python"] == other["python"]


# -- the share of a rank ---------------------------------------------------------------------------
class ByLength(Plain):
    """An own plan of two lengths; sample 0 is longer than what a bucket of short ones takes."""

    def collate(self, samples, micro):
        padded = np.zeros((len(samples), micro.shape), np.float32)
        for row, sample in enumerate(samples):
            padded[row, : len(sample["x"])] = sample["x"]
        return {"x": torch.from_numpy(padded)}


def test_a_rank_without_samples_computes_on_one_of_its_micro_batch():
    data = Numbers(12, lambda index: LENGTHS[index % 2 == 0])
    short = MicroBatch(keys(3, 5), rows=8, shape=16)
    first, second = (load(ByLength(), data, short.share(rank, 2))[0] for rank in (0, 1))
    assert first["mask"].tolist() == [1, 1, 0, 0] and second["mask"].tolist() == [0] * 4
    assert second["x"].shape == (4, 16) and second["x"].eq(3).all()


# -- what `collate` leaves to the engine -----------------------------------------------------------
class Collating(Plain):
    """Its `collate` is the function given."""

    def __init__(self, collated):
        super().__init__()
        self.collated = collated

    def collate(self, samples, micro):
        return self.collated(samples, micro)


def rows_of(samples):
    return {"x": torch.tensor(np.stack([sample["x"] for sample in samples]))}


@pytest.mark.parametrize(
    "collated",
    [
        lambda samples, micro: rows_of(samples),
        lambda samples, micro: {**rows_of(samples), "mask": torch.ones(len(samples))},
        lambda samples, micro: stack_samples(samples, len(samples)),
        lambda samples, micro: stack_samples(samples, micro.rows),
        lambda samples, micro: {"x": stack_samples(samples, micro.rows)["x"]},
    ],
    ids=["rows", "rows and mask", "stacked", "filled", "filled without mask"],
)
def test_rows_and_mask_are_added_where_collate_leaves_them_out(collated):
    [batch] = load(Collating(collated), Numbers(9), MicroBatch(keys(4, 2, 8), rows=5))
    assert batch["x"][:, 0].tolist() == [4, 2, 8, 4, 2]
    assert batch["mask"].tolist() == [1, 1, 1, 0, 0]


def test_a_mask_of_the_tasks_own_is_kept():
    def collated(samples, micro):
        return {**rows_of(samples), "mask": torch.tensor([1.0, 0.0, 1.0])}

    [batch] = load(Collating(collated), Numbers(9), MicroBatch(keys(4, 2, 8), rows=5))
    assert batch["mask"].tolist() == [1, 0, 1, 0, 0]


def test_a_batch_that_collate_filled_is_kept():
    """The two entries a device, of two samples, are not rows."""

    def collated(samples, micro):
        return {**stack_samples(samples, micro.rows), "wanted": torch.tensor([[3], [4]])}

    [batch] = load(Collating(collated), Numbers(9), MicroBatch(keys(4, 2), rows=4))
    assert batch["wanted"].tolist() == [[3], [4]]
    assert batch["mask"].tolist() == [1, 1, 0, 0]


def test_entries_with_other_rows_are_left_alone():
    def collated(samples, micro):
        edges = torch.tensor([[0, 1], [1, 0]])
        return {**rows_of(samples), "edges": edges, "scale": torch.tensor(2.0)}

    [batch] = load(Collating(collated), Numbers(9), MicroBatch(keys(4, 2, 8), rows=4))
    assert batch["edges"].shape == (2, 2) and batch["scale"] == 2


def test_too_few_rows_name_the_method():
    def collated(samples, micro):
        return rows_of(samples[:2])

    with pytest.raises(UsageError, match=r"Collating\.collate .* without an entry of 4 rows"):
        load(Collating(collated), Numbers(9), MicroBatch(keys(4, 2, 8), rows=4))


def test_a_collator_of_transformers_needs_no_glue():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="[PAD]"
    )

    class Texts(Plain):
        def collate(self, samples, micro):
            return transformers.DataCollatorWithPadding(tokenizer)(samples)

    data = [{"input_ids": [1, 2, 1], "label": 0}, {"input_ids": [2], "label": 1}]
    [batch] = load(Texts(), data, MicroBatch(keys(0, 1), rows=4))
    assert batch["input_ids"].tolist() == [[1, 2, 1], [2, 0, 0]] * 2
    assert batch["labels"].tolist() == [0, 1, 0, 1] and batch["mask"].tolist() == [1, 1, 0, 0]


# -- draws -----------------------------------------------------------------------------------------
class Files:
    """Samples as bytes."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        file = io.BytesIO()
        np.save(file, np.full(3, index, np.float32))
        return {"npy": file.getvalue()}


class Decoding(Tiny):
    def draw(self, sample, rng):
        return {"x": np.load(io.BytesIO(sample["npy"]))}


def test_draw_may_decode_bytes():
    [batch] = load(Decoding(), Files(), MicroBatch(keys(2, 1), rows=2))
    assert batch["x"][:, 0].tolist() == [2, 1]


def test_bytes_that_nothing_decodes_name_where_they_come_from():
    micro = MicroBatch(keys(2, 1), rows=2)
    with pytest.raises(DataError, match=r"Files\.__getitem__ .* gave sample 2 with 'npy' as a byt"):
        load(Plain(), Files(), micro)


# -- examples -------------------------------------------------------------------------------------
class Longest(Plain):
    probe_batches = Task.probe_batches

    def collate(self, samples, micro):
        longest = max(len(sample["x"]) for sample in samples)
        rows = [np.pad(sample["x"], (0, longest - len(sample["x"]))) for sample in samples]
        return {"x": torch.from_numpy(np.stack(rows))}


class Joined(Plain):
    """Samples of many sizes one behind the other, as graphs are."""

    probe_batches = Task.probe_batches

    def collate(self, samples, micro):
        return {
            "x": torch.from_numpy(np.concatenate([sample["x"] for sample in samples])),
            "label": torch.tensor([sample["label"] for sample in samples]),
        }


@pytest.mark.parametrize("rows", [4, 96])
def test_an_example_is_as_large_as_batches_of_many_sizes_become(rows):
    """Its memory stands for a run's: one sample, however short, decided it."""
    seen = random.Random(0).sample(range(200), 200)
    data = Numbers(200, lambda index: 70 if index == seen[150] else 1 + index % 50)
    settings = PlanSettings(rows, rows, 1, seed=0)
    lengths = sorted((len(data[place]["x"]) for place in seen[:32]), reverse=True)
    padded, short = example_batches(Longest(), settings, data)
    assert padded["x"].shape == (rows, 70)
    assert short["x"].shape == (rows, lengths[-rows] if rows < 32 else lengths[0])
    joined, _ = example_batches(Joined(), settings, data)
    assert len(joined["x"]) == sum(itertools.islice(itertools.cycle([70, *lengths]), rows))
    assert len(joined["label"]) == len(joined["mask"]) == rows
