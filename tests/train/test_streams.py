"""Training data without a length: order, passes, resuming to the sample, what is refused."""

import random

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from tiny_task import Rows, Tiny
from torch.utils.data import IterableDataset

from tpukit.errors import DataError
from tpukit.train.config import TrainConfig
from tpukit.train.data import StreamPlan
from tpukit.train.loader import example_batches
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder
from tpukit.train.task import Datasets, PlanSettings, named, stack_samples

SETTINGS = PlanSettings(global_batch_size=6, micro_rows=3, devices=1, seed=0)


class Stream(IterableDataset):
    """`count` samples a pass, in an order of the pass' own; counts what was read."""

    def __init__(self, count: int) -> None:
        self.rows = Rows(count)
        self.epoch = 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def start(self) -> int:
        return 0

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(self.rows.count)
        for place in range(self.start(), len(order)):
            self.read += 1
            self.place = place + 1
            yield self.rows[int(order[place])]


class Stateful(Stream):
    """It can go on at any sample."""

    first = 0
    place = 0

    def start(self):
        first, self.first = self.first, 0
        return first

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.first = state["place"]


class Shuffled(Stream):
    """In an order of the generators that all code shares."""

    def __iter__(self):
        order = torch.randperm(self.rows.count) + random.randrange(9) + np.random.randint(9)
        for row in order % self.rows.count:
            self.read += 1
            yield self.rows[int(row)]


class Streaming(Tiny):
    """The tiny task on a stream."""

    name = "streaming"

    def __init__(self, make=Stream, count=20) -> None:
        super().__init__()
        self.make = make
        self.count = count

    def datasets(self):
        self.data = self.make(self.count)
        return Datasets(self.data, Rows(10))


@pytest.fixture
def train(tmp_path):
    """Runs a task in a run folder; the weights' bytes of the last checkpoint, and the log."""

    def run(task, folder="run", **config):
        lines: list[str] = []
        settings = {"max_steps": 6, "global_batch_size": 8, "log_every": 3, "ckpt_every": 3,
                    "num_workers": 0, **config}  # fmt: skip
        request = TrainingRequest(task, TrainConfig(**settings), RunFolder(tmp_path / folder))
        result = train_run(request, FakeBackend(), lines.append)
        newest = request.folder.checkpoints / f"step-{result.steps:08d}"
        return (newest / "model.safetensors").read_bytes(), lines, newest

    return run


def test_passes_are_laid_end_to_end_and_cut_into_equal_steps():
    plan = StreamPlan(Stream(8), SETTINGS)
    keys = [key for step in range(4) for micro in plan.step(step) for key in micro.keys]
    assert [(key.epoch, key.sample) for key in keys] == [(i // 8, i % 8) for i in range(24)]
    assert {len(micro.keys) for micro in plan.step(3)} == {3}


def test_each_rank_keeps_its_rows_of_each_micro_batch():
    whole = StreamPlan(Stream(8), SETTINGS).step(0)[0]
    shares = [StreamPlan(Stream(8), SETTINGS).step(0)[0].share(rank, 3) for rank in range(3)]
    assert [share.keys for share in shares] == [(key,) for key in whole.keys]
    for share, sample in zip(shares, whole.samples, strict=True):
        assert np.array_equal(share.samples[0]["x"], sample["x"])


def test_the_result_depends_neither_on_workers_nor_on_accumulation(train):
    plain, *_ = train(Streaming(), "plain")
    assert train(Streaming(), "workers", num_workers=2)[0] == plain
    assert train(Streaming(count=21), "other")[0] != plain


def test_each_rank_reads_a_shuffled_stream_alike():
    """Two ranks draw other numbers: each would keep its rows of another order."""
    read = []
    for seed in range(2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        plan = StreamPlan(Shuffled(8), SETTINGS)
        read.append([s["x"][0] for step in range(4) for m in plan.step(step) for s in m.samples])
    assert read[0] == read[1] and len(set(read[0])) > 1


@pytest.mark.parametrize("make", [Stream, Stateful, Shuffled])
def test_a_run_goes_on_at_the_sample_where_it_stopped(train, make):
    """20 samples a pass and 24 a part: the second part begins in the middle of a pass."""
    whole, *_ = train(Streaming(make), "whole")
    train(Streaming(make), max_steps=3)
    task = Streaming(make)
    resumed, lines, newest = train(task)
    assert resumed == whole
    kept = (newest / "stream.pt").exists()
    told = any("reading the first 3 steps' samples again" in line for line in lines)
    assert (kept, told) == ((True, False) if make is Stateful else (False, True))
    # Step 0 is read to check the plan; a stateful stream then reads its second half alone.
    assert task.data.read - (8 if kept else 0) == (24 if kept else 48)


def test_what_cannot_be_sent_to_a_worker_is_named(train):
    def odd(count):
        return [{**Rows(count)[i], "file": (x for x in ())} for i in range(count)]

    class Sending(Streaming):
        def datasets(self):
            return Datasets(iter(odd(48)), None)

        def draw(self, sample, rng):
            return super().draw({"x": sample["x"], "y": sample["y"]}, rng)

        def collate(self, samples, micro):
            return stack_samples(samples, micro.rows)

    assert train(Sending(), "here")[0]
    with pytest.raises(DataError, match="cannot be sent to a DataLoader worker"):
        train(Sending(), "sent", num_workers=1)


def test_a_state_that_cannot_be_kept_is_read_again(train):
    class Odd(Stateful):
        def state_dict(self):
            return {"place": self.place, "file": object()}

    whole, *_ = train(Streaming(Odd), "whole")
    train(Streaming(Odd), max_steps=3)
    resumed, lines, _ = train(Streaming(Odd))
    assert resumed == whole and any("again" in line for line in lines)


def test_the_precision_check_takes_no_sample_from_training(train):
    plain, *_ = train(Streaming(), "plain")
    assert train(Streaming(), "checked", check_bf16=True)[0] == plain


def test_epochs_of_a_stream_cannot_be_counted(train):
    with pytest.raises(DataError, match="stream, whose length is not known") as caught:
        train(Streaming(), max_steps=None, epochs=2)
    assert "--max-steps" in caught.value.hint and caught.value.id == "stream-length"


def test_an_iterator_that_ends_is_named_with_its_step(train):
    def once(count):
        return (Rows(count)[i] for i in range(count))

    assert train(Streaming(once, 48), "enough")[0]
    with pytest.raises(DataError, match="ended after 20 samples, in step 3, and cannot be read"):
        train(Streaming(once))


def test_an_empty_stream_is_an_error(train):
    with pytest.raises(DataError, match="yields no sample"):
        train(Streaming(count=0))


def test_a_stream_is_no_validation_set(train):
    class Wrong(Streaming):
        def datasets(self):
            return Datasets(Rows(20), Stream(20))

    with pytest.raises(DataError, match="validation data"):
        train(Wrong())


def test_a_batch_to_probe_comes_from_the_streams_first_sample():
    [batch] = example_batches(Streaming(), PlanSettings(4, 4, 1, 0))
    assert batch["x"].shape == (4, 8) and batch["mask"].tolist() == [1.0] * 4


# -- tuples ----------------------------------------------------------------------------------------
class Pairs:
    """A data set of tuples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        row = Rows(self.count)[index]
        return row["x"], row["y"]


class PairStream(Stateful):
    """A stream of tuples."""

    def __iter__(self):
        return ((row["x"], row["y"]) for row in super().__iter__())


def test_a_data_set_of_tuples_trains_with_one_line(train):
    class Adapted(Tiny):
        def datasets(self):
            return Datasets(named(Pairs(64), "x", "y"), named(Pairs(10), "x", "y"))

    assert train(Adapted(), "pairs")[0] == train(Tiny(), "dicts")[0]


def test_a_stream_of_tuples_keeps_its_state(train):
    def pairs(count):
        return named(PairStream(count), "x", "y")

    expected, *_ = train(Streaming(Stateful), "dicts")
    weights, _, newest = train(Streaming(pairs), "pairs")
    assert weights == expected and (newest / "stream.pt").exists()


def test_names_and_values_must_agree():
    with pytest.raises(DataError, match=r"sample 3 of Pairs: expected a tuple of 3 .*found 2"):
        named(Pairs(5), "x", "y", "z")[3]
    with pytest.raises(DataError, match=r"sample 0 of Rows: .*found dict"):
        named(Rows(5), "x")[0]
