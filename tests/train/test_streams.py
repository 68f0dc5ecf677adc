"""Training data without a length: order, passes, resuming to the sample, what is refused."""

import random
from contextlib import nullcontext as ok

import numpy as np
import pytest
import torch
from fake_backend import trained
from runs import SUPPORT, tpukit
from tiny_task import Rows, Tiny
from torch.utils.data import IterableDataset

from tpukit.errors import ConfigError, DataError
from tpukit.train.loader import example_batches
from tpukit.train.streams import StreamPlan, pack_positions
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
        settings = {"global_batch_size": 8, "log_every": 3, "ckpt_every": 3, **config}
        result, lines, folder = trained(task, tmp_path / folder, **settings)
        newest = folder.checkpoints / f"step-{result.steps:08d}"
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


# -- parts of the ranks --------------------------------------------------------------------------
def of_datasets():
    from datasets import Dataset

    return Dataset.from_dict({"number": range(64)}).to_iterable_dataset(num_shards=8)


def of_webdataset(tmp_path):
    import io
    import tarfile

    import webdataset

    for shard in range(8):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(shard * 8, shard * 8 + 8):
                content = str(number).encode()
                info = tarfile.TarInfo(f"{number:03d}.cls")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    urls = str(tmp_path / "{0..7}.tar")
    return webdataset.WebDataset(urls, shardshuffle=False).decode().rename(number="cls")


def plan_of(stream, rank, world_size):
    """A rank's plan of steps of 16 samples."""
    plan = StreamPlan(stream, PlanSettings(16, 16, world_size, 0))
    part = Tiny().shard(stream, rank, world_size)
    if part is not None:
        plan.split(part, rank, world_size)
    return plan


def numbers(plan, steps, rank, world_size):
    micros = [plan.share(m, rank, world_size) for step in steps for m in plan.step(step)]
    return [int(sample["number"]) for micro in micros for sample in micro.samples]


@pytest.mark.parametrize("library", ["datasets", "webdataset"])
def test_each_rank_reads_its_part_alone(library, monkeypatch, tmp_path):
    """A pass of 64 samples over four ranks: each one once, and goes on where it stood."""
    pytest.importorskip(library)
    stream = of_datasets() if library == "datasets" else of_webdataset(tmp_path)
    found = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        whole = plan_of(stream, rank, 4)
        assert whole.is_split
        own = numbers(whole, range(4), rank, 4)
        first = plan_of(stream, rank, 4)
        assert numbers(first, range(2), rank, 4) == own[:8]
        packed = pack_positions([first.position()] * 4)
        again = plan_of(stream, rank, 4)
        assert again.seek(2, packed) == (2 if first.keeps_positions else 0)
        again.step(1)
        assert numbers(again, range(2, 4), rank, 4) == own[8:]
        found += own
        keys = {key.sample for micro in whole.step(3) for key in micro.keys}
        assert {key % 4 for key in keys} == {rank}
    assert sorted(found) == list(range(64))


@pytest.mark.parametrize("splits", [True, False])
def test_a_stream_that_splits_itself_by_rank_is_refused(splits):
    """Every rank would keep its rows of its own part, and lose the others."""
    digests: list[str] = []
    for rank in range(2):
        stream = Stream(40)
        stream.start = lambda rank=rank: rank * splits
        StreamPlan(stream, SETTINGS).require_alike(lambda own: digests.append(own) or [own])
    refused = pytest.raises(DataError, match="Stream yields other samples in each rank")
    with refused if splits else ok():
        StreamPlan(Stream(40), SETTINGS).require_alike(lambda own: digests)


def test_parts_of_another_number_of_ranks_are_refused():
    pytest.importorskip("datasets")
    packed = pack_positions([plan_of(of_datasets(), rank, 2).position() for rank in range(2)])
    for world_size in (1, 4):
        with pytest.raises(ConfigError, match="split over 2 ranks"):
            plan_of(of_datasets(), 0, world_size).seek(0, packed)


def test_a_run_of_one_rank_goes_on_with_several():
    """Each then reads all samples and keeps its rows, as the run began."""
    pytest.importorskip("datasets")
    one = plan_of(of_datasets(), 0, 1)
    expected = numbers(one, range(4), 0, 1)
    first = plan_of(of_datasets(), 0, 1)
    first.step(1)
    packed, found = first.position(), []
    for rank in range(2):
        plan = plan_of(of_datasets(), rank, 2)
        plan.seek(2, packed)
        plan.step(1)
        found.append(numbers(plan, range(2, 4), rank, 2))
    assert found[0][:8] + found[1][:8] + found[0][8:] + found[1][8:] == expected[32:]


class Heavy(Stateful):
    """Counts how often its state is taken."""

    taken = 0

    def state_dict(self):
        Heavy.taken += 1
        return super().state_dict()


def test_a_position_is_taken_for_saves_alone(train):
    """Twelve steps, saved after six and twelve; stopped in between, the steps are read again."""
    Heavy.taken = 0
    whole, *_ = train(Streaming(Heavy), "whole", max_steps=12, ckpt_every=6)
    assert Heavy.taken == 2
    train(Streaming(Heavy), max_steps=12, ckpt_every=6, max_time=1e-9)  # one step
    resumed, lines, _ = train(Streaming(Heavy), max_steps=12, ckpt_every=6)
    assert resumed == whole
    assert any("reading the first 1 steps' samples again" in line for line in lines)


@pytest.mark.slow
def test_four_ranks_with_two_workers_use_each_sample_once(tmp_path):
    """A pass in two sessions; another number of ranks is refused."""
    pytest.importorskip("datasets")
    task = f"{SUPPORT / 'stream_task.py'}:Numbered"

    def session(steps, ranks, folder):
        used = tmp_path / folder
        used.mkdir(exist_ok=True)
        return tpukit(
            "train", "--task", task, "--hw", "cpu", "--devices", ranks, "--max-steps", steps,
            "--set", "schedule=constant", "--ckpt-every", "100", "--num-workers", "2",
            "--results-dir", tmp_path / "run", ranks=ranks, env={"TPUKIT_TEST_USED": str(used)},
        )  # fmt: skip

    for steps, folder in ((3, "first"), (8, "second")):
        done = session(steps, 4, folder)
        assert done.returncode == 0, done.stderr
    used = [
        int(number)
        for folder in ("first", "second")
        for rank in range(4)
        for number in (tmp_path / folder / str(rank)).read_text().split()
    ]
    assert sorted(used) == list(range(128))
    refused = session(10, 2, "third")
    assert refused.returncode and "split over 4 ranks" in refused.stderr
