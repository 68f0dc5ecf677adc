"""The engine's promises on the fake backend: what it asks for, in which order, how often."""

import math
import random
import time
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from tiny_task import Rows, Tiny, Weighted
from torch import nn

from tpukit.errors import ConfigError, JobError, NonFiniteLossError, UsageError
from tpukit.io.interrupts import StopRequest
from tpukit.train import checkpoint_writer, plan
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner, weighted_sums
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder, open_run
from tpukit.train.run_log import read_metrics
from tpukit.train.run_state import RunState
from tpukit.train.task import PlanSettings


@pytest.fixture
def request_for(tmp_path):
    """A request for a run of the tiny task in a folder of its own."""

    def make(task=None, **config):
        settings = {"max_steps": 6, "global_batch_size": 16, "log_every": 2, "ckpt_every": 3,
                    "num_workers": 0, **config}  # fmt: skip
        folder = RunFolder(tmp_path / "run")
        return TrainingRequest(task or Tiny(), TrainConfig(**settings), folder)

    return make


def silent(message):
    pass


def test_gradients_are_reduced_once_a_step(request_for):
    backend = FakeBackend()
    train_run(request_for(accumulate=4, max_steps=1), backend, silent)
    micro_batches = [call for call in backend.calls if call.startswith("micro_batch")]
    assert micro_batches == [
        "micro_batch(first=True, last=False)",
        "micro_batch(first=False, last=False)",
        "micro_batch(first=False, last=False)",
        "micro_batch(first=False, last=True)",
    ]
    assert backend.calls.count("step") == 1


@pytest.mark.parametrize(("steps", "warns"), [(2, True), (4, False)])
def test_a_warmup_longer_than_the_run_is_said(request_for, steps, warns):
    """The highest rate of two steps after a warm-up of three: 2/4 of --lr."""
    lines = []
    train_run(request_for(max_steps=steps, warmup_steps=3, lr=0.5), FakeBackend(), lines.append)
    assert any("ends at 0.25, below --lr 0.5" in line for line in lines) == warns


def test_validation_counts_every_sample_once(request_for):
    """Ten samples in batches of sixteen: the filled rows must not count."""
    backend = FakeBackend()
    request = request_for(max_steps=3, ema_decay=None)
    train_run(request, backend, silent)
    told = [row["valid_loss"] for row in read_metrics(request.folder) if row["kind"] == "valid"]
    run = open_run(request.folder.path, silent)
    model = request.task.build_model(backend)
    model.load_state_dict(run.weights())
    from tpukit.train.task import VALIDATION_EPOCH, sample_rng

    rows = [request.task.draw(Rows(10)[i], sample_rng(0, VALIDATION_EPOCH, i)) for i in range(10)]
    x = torch.from_numpy(np.stack([row["x"] for row in rows]))
    y = torch.from_numpy(np.stack([row["y"] for row in rows]))
    model.eval()
    with torch.no_grad():
        expected = (model(x) - y).square().mean().item()
    assert told[-1] == pytest.approx(expected, rel=1e-5)


def test_an_older_run_goes_on_without_the_warm_up_of_its_ema(request_for, monkeypatch):
    """Its checkpoints do not record one, and its EMA weights had none."""
    older = {"ema_warmup": 0, "ema_updates": "multiples"}
    with monkeypatch.context() as before:
        recorded = tuple(name for name in plan.ARITHMETIC if name not in older)
        before.setattr(plan, "ARITHMETIC", recorded)
        train_run(request_for(max_steps=10, **older), FakeBackend(), silent)
    for steps in (20, 30):
        resumed = request_for(max_steps=steps, ema_warmup=TrainConfig.ema_warmup)
        assert train_run(resumed, FakeBackend(), silent).resumed_from == steps - 10
        again = open_run(resumed.folder.path, silent)
        assert {name: again.checkpoint.state.identity[name] for name in older} == older
        assert {name: again.train_config[name] for name in older} == older
    with pytest.raises(ConfigError, match="ema_warmup was 0, now 7"):
        train_run(request_for(max_steps=40, ema_warmup=7), FakeBackend(), silent)


def test_an_older_run_goes_on_with_the_rates_that_it_had(request_for):
    """Where nothing was said, a schedule ended at its peak: it was constant."""
    cosine = {"max_steps": 10, "schedule": "cosine"}
    older = request_for(**cosine, final_lr_fraction=1.0, max_time=1e-9)
    assert train_run(older, FakeBackend(), silent).steps == 1
    resumed = request_for(**cosine)
    assert train_run(resumed, FakeBackend(), silent).finished
    rates = {row["lr"] for row in read_metrics(resumed.folder) if row["kind"] == "train"}
    assert rates == {resumed.config.lr}


class Uncounted(Tiny):
    """Nothing counts in the steps that it is told."""

    def __init__(self, *steps: int) -> None:
        super().__init__(noise=0.0)
        self.steps, self.passes = steps, 0

    def loss(self, model, batch):
        self.passes += model.training
        counts = float(not model.training or self.passes not in self.steps)
        return {**super().loss(model, batch), "weight": torch.full_like(batch["mask"], counts)}


def test_a_step_in_which_nothing_counts_has_no_gradient(request_for):
    request = request_for(max_steps=3, log_every=1, optimizer="sgd", momentum=0.0, weight_decay=0.0)
    train_run(replace(request, task=Uncounted(2)), FakeBackend(), silent)
    rows = [row for row in read_metrics(request.folder) if row["kind"] == "train"]
    assert rows[1]["gradient_norm"] == 0 and math.isnan(rows[1]["loss"])
    assert all(math.isfinite(row["loss"]) for row in (rows[0], rows[2]))


class Solved(Tiny):
    """A loss of exactly 0."""

    def loss(self, model, batch):
        return {"loss": 0 * super().loss(model, batch)["loss"]}


def test_a_loss_of_zero_is_a_number(request_for):
    lines = []
    train_run(request_for(Solved()), FakeBackend(), lines.append)
    assert "Done: 6 steps, loss 0." in lines


def test_the_host_holds_one_copy_of_the_state(request_for, monkeypatch):
    """The write before has ended when the next copy is made."""
    write, ends = checkpoint_writer._write_files, []

    def slow(partial, state, group):
        time.sleep(0.2)
        write(partial, state, group)
        ends.append(state["plain"].step)

    def copied(self):
        assert ends == [*range(1, self.step)]
        return take(self)

    take = RunState.state_dict
    monkeypatch.setattr(checkpoint_writer, "_write_files", slow)
    monkeypatch.setattr(RunState, "state_dict", copied)
    train_run(request_for(ckpt_every=1), FakeBackend(), silent)
    assert ends == [1, 2, 3, 4, 5, 6]


def test_a_failed_write_ends_the_run_before_the_next_one(request_for, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    class Steps(Tiny):
        made = 0

        def loss(self, model, batch):
            self.made += model.training
            time.sleep(0.01 * (self.made > 50))
            return super().loss(model, batch)

    monkeypatch.setattr(checkpoint_writer, "save_file", full)
    task = Steps()
    with pytest.raises(JobError, match="step-00000050 could not be written"):
        train_run(request_for(task, max_steps=200, ckpt_every=50), FakeBackend(), silent)
    assert task.made < 100


def test_the_best_validation_is_what_open_run_gives(request_for):
    request = request_for(max_steps=12, lr=0.5)
    summary = train_run(request, FakeBackend(), silent)
    rows = [row for row in read_metrics(request.folder) if row["kind"] == "valid"]
    best = min(rows, key=lambda row: row["valid_loss"])
    assert summary.best == {"loss": best["valid_loss"], "step": best["step"]}
    assert open_run(request.folder.path, silent).checkpoint.state.step == best["step"]


def test_a_stop_request_is_seen_between_steps(request_for, monkeypatch):
    request = request_for(max_steps=1000)
    monkeypatch.setattr(StopRequest, "is_set", property(lambda stop: True))
    summary = train_run(request, FakeBackend(), silent)
    assert summary.steps == 1 and not summary.finished
    assert open_run(request.folder.path, silent).checkpoint.state.step == 1


def test_a_large_gradient_is_told(request_for):
    class Steep(Tiny):
        def loss(self, model, batch):
            return {"loss": super().loss(model, batch)["loss"] * 1e6}

    told: list[str] = []
    train_run(request_for(Steep()), FakeBackend(), told.append)
    assert any("gradient norm" in line and "--lr" in line for line in told)


def test_a_non_finite_loss_names_the_first_bad_step(request_for):
    class Bad(Tiny):
        def loss(self, model, batch):
            self.calls = getattr(self, "calls", 0) + 1
            scale = float("nan") if self.calls == 4 else 1.0
            return {"loss": super().loss(model, batch)["loss"] * scale}

    with pytest.raises(NonFiniteLossError, match="in step 4"):
        train_run(request_for(Bad(), ckpt_every=100, log_every=100), FakeBackend(), silent)


class Damaged(Tiny):
    """Sample 20 holds `value`; where it is None `collate` makes it."""

    def __init__(self, value: float | None) -> None:
        super().__init__(noise=0.0)
        self.value = value

    def datasets(self):
        data = [Rows(64)[index] for index in range(64)]
        data[20]["x"][0] = 777 if self.value is None else self.value
        return replace(super().datasets(), train=data)

    def collate(self, samples, micro):
        batch = super().collate(samples, micro)
        batch["x"][batch["x"] == 777] = float("nan")
        return batch


@pytest.mark.parametrize(
    ("value", "told"),
    [(float("nan"), "'x' of training sample 20 holds nan"),
     (float("-inf"), "'x' of training sample 20 holds -inf"),
     (None, r"'x' of a batch of Damaged.collate \(.*\) holds nan")],
)  # fmt: skip
def test_a_sample_that_is_not_finite_is_named(request_for, value, told):
    config = {"ckpt_every": 100, "log_every": 100, "accumulate": 2}
    with pytest.raises(NonFiniteLossError, match=told) as caught:
        train_run(request_for(Damaged(value), **config), FakeBackend(), silent)
    assert "nan_to_num" in caught.value.hint and "--lr" not in caught.value.hint


def test_a_loss_that_diverges_on_finite_samples_gets_other_advice(request_for):
    class Diverging(Tiny):
        def loss(self, model, batch):
            return {"loss": super().loss(model, batch)["loss"] * float("inf")}

    with pytest.raises(NonFiniteLossError) as caught:
        train_run(request_for(Diverging()), FakeBackend(), silent)
    assert "Lower --lr" in caught.value.hint


@pytest.mark.parametrize("task", [Tiny, Weighted])
def test_a_loss_a_row_and_a_mean_weigh_alike(task):
    made = task()
    model = made.build_model(None)
    [batch] = made.probe_batches(PlanSettings(6, 6, 1, 0))
    batch = {**batch, "x": torch.randn(6, 8), "mask": torch.tensor([1.0, 1, 1, 1, 0, 0])}
    sums = weighted_sums(made.loss(model, batch), ["loss"], batch["mask"])
    shorter = {name: value[:4] for name, value in batch.items()}
    expected = weighted_sums(made.loss(model, shorter), ["loss"], shorter["mask"])
    assert torch.allclose(sums, expected, atol=1e-6)


class Renaming(Tiny):
    """A task whose loss gives another entry in its second micro-batch."""

    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        name = "error" if self.calls == 2 else "accuracy"
        return {**super().loss(model, batch), name: torch.ones(())}


def test_other_metrics_in_another_micro_batch_are_an_error(request_for):
    with pytest.raises(UsageError, match=r"accuracy for one micro-batch and .*error for"):
        train_run(request_for(Renaming(), accumulate=2), FakeBackend(), silent)


def test_metrics_keep_their_names_in_any_order():
    class Swapping(Tiny):
        def loss(self, model, batch):
            self.calls = getattr(self, "calls", 0) + 1
            entries = {"one": torch.ones(()), "two": torch.full((), 2.0)}
            if self.calls == 2:
                entries = dict(reversed(entries.items()))
            return {**entries, **super().loss(model, batch)}

    task, backend = Swapping(), FakeBackend()
    learner = build_learner(task, backend, task.build_model(backend), TrainConfig())
    [batch] = task.probe_batches(PlanSettings(4, 4, 1, 0))
    learner.train_step([batch, batch], 0.1)
    means = learner.read_metrics().means
    assert (means["one"], means["two"]) == (1.0, 2.0)


class Digested(Tiny):
    """A task that identifies its data."""

    digest: str | None = None

    def datasets(self):
        identity = {} if self.digest is None else {"data": self.digest}
        return replace(super().datasets(), identity=identity)


def with_digest(digest):
    task = Digested()
    task.digest = digest
    return task


def test_other_data_is_an_error_that_names_the_field(request_for):
    train_run(request_for(with_digest("a"), max_steps=3), FakeBackend(), silent)
    with pytest.raises(ConfigError, match="data was 'a', now 'b'") as caught:
        train_run(request_for(with_digest("b")), FakeBackend(), silent)
    assert caught.value.id == "changed-arithmetic"


def test_a_checkpoint_without_a_digest_gains_one_with_a_warning(request_for):
    request = request_for(with_digest(None), max_steps=3)
    train_run(request, FakeBackend(), silent)
    lines: list[str] = []
    train_run(request_for(with_digest("a")), FakeBackend(), lines.append)
    assert any("Warning" in line and "data" in line for line in lines)
    assert open_run(request.folder.path, silent).checkpoint.state.step == 6
    with pytest.raises(ConfigError, match="data was 'a', now 'b'"):
        train_run(request_for(with_digest("b"), max_steps=9), FakeBackend(), silent)


def test_a_lost_digest_is_an_error(request_for):
    train_run(request_for(with_digest("a"), max_steps=3), FakeBackend(), silent)
    with pytest.raises(ConfigError, match="data was 'a', now None"):
        train_run(request_for(with_digest(None)), FakeBackend(), silent)


@pytest.mark.parametrize(
    ("removed", "successor"),
    [("accumulate", "validation_rows"), ("artifacts", "artifacts"),
     ("example_batches", "probe_batches"), ("restore_artifacts", "artifacts")],
)  # fmt: skip
def test_members_of_earlier_versions_name_their_successors(removed, successor):
    with pytest.raises(TypeError, match=rf"Old\.{removed} is no longer called: .*{successor}"):
        type("Old", (Tiny,), {removed: lambda self, *arguments: {}})


class Taught(Tiny):
    """A student beside a frozen teacher, which `build_model` leaves in eval mode."""

    def build_model(self, ops):
        teacher = nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        normed = nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2))
        normed[1].eval()  # trained, with the statistics that it has
        pretrained = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
        return nn.ModuleList([teacher.requires_grad_(False).eval(), normed, pretrained])

    def loss(self, model, batch):
        teacher, normed, pretrained = model
        assert (pretrained[1].training, normed[0].training) == (model.training,) * 2
        with torch.no_grad():
            wanted = teacher(batch["x"])
        return {"loss": (pretrained(normed(batch["x"])) - wanted).square().mean(1)}


def test_a_frozen_teacher_stays_in_eval_mode(request_for):
    """After a validation too."""
    request = request_for(Taught())
    train_run(request, FakeBackend(), silent)
    weights = open_run(request.folder.path, silent).weights()
    for name in ("0.1", "1.1"):
        assert torch.equal(weights[f"{name}.running_var"], torch.ones(2))
        assert weights[f"{name}.num_batches_tracked"] == 0


class Mixed(Tiny):
    """Mixes samples by numbers of the generators that all code shares, as public scripts do."""

    def loss(self, model, batch):
        share = np.random.beta(0.2, 0.2) * random.random()
        x = share * batch["x"] + (1 - share) * batch["x"].flip(0)
        return super().loss(model, {**batch, "x": x})


def test_a_loss_that_draws_on_the_host_resumes_where_it_was(request_for):
    request = request_for(Mixed())
    train_run(request_for(Mixed(), max_steps=3), FakeBackend(), silent)
    train_run(request, FakeBackend(), silent)
    resumed = open_run(request.folder.path, silent).weights()
    train_run(request_for(Mixed(), resume=False), FakeBackend(), silent)
    whole = open_run(request.folder.path, silent).weights()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_each_step_and_rank_draws_new_numbers_and_a_repeated_step_the_same():
    drawn = {}
    for rank, step in product((0, 1), (0, 1)):
        backend = FakeBackend()
        backend.rank = rank
        task = Tiny(dropout=0.5)
        learner = build_learner(task, backend, task.build_model(backend), TrainConfig())
        learner.steps_done = step
        for _ in range(2):
            torch.rand(3)  # a validation, a callback
            learner.seed_draws()
            found = torch.rand(4)
            assert torch.equal(drawn.setdefault((rank, step), found), found)
    assert not any(torch.equal(*pair) for pair in combinations(drawn.values(), 2))


class TwoRanks(FakeBackend):
    """Rank 0 of two; `calls` lists what it gathers too."""

    def __init__(self):
        super().__init__()
        self.world_size = 2

    def all_gather_objects(self, value):
        self.calls.append("gather")
        return [value, value]

    def agree(self, numbers):
        self.calls.append("ask")

        def wait():
            self.calls.append("read")
            return list(numbers)

        return wait


def test_ranks_exchange_nothing_between_the_micro_batches_of_a_short_step(request_for):
    backend = TwoRanks()
    train_run(request_for(accumulate=4, max_steps=3), backend, silent)
    steps = " ".join(backend.calls).split("micro_batch(first=True, last=False)")[1:]
    first, *others = (step.partition("step")[0].split() for step in steps)
    assert first.count("ask") == 1 and len(others) == 2
    assert not any({"ask", "read", "gather"} & {*calls} for calls in others)


class Parted(TwoRanks):
    """The other rank's largest weight is another one from the second step on."""

    def agree(self, numbers):
        wait = super().agree(numbers)
        if self.calls.count("step") > 1 and len(numbers) > 4:
            numbers[0] += 0.01 * numbers[1]
        return wait


def test_parameters_that_ranks_hold_other_values_of_are_named_once(request_for):
    for backend, count in ((TwoRanks(), 0), (Parted(), 1)):
        lines = []
        train_run(request_for(max_steps=6, ckpt_every=2, resume=False), backend, lines.append)
        found = [line for line in lines if "ranks hold other values of 0.weight: " in line]
        assert len(found) == count


def test_ranks_read_whether_to_stop_a_step_later(request_for):
    """Nothing is gathered in a step, and none waits for the answer of its own step."""
    backend = TwoRanks()
    train_run(request_for(max_steps=6, ckpt_every=6), backend, silent)
    loop = [c for c in backend.calls[backend.calls.index("step") :] if not c.startswith("micro")]
    later = " ".join(loop).split("step ")[2:6]
    assert later == ["ask ", "ask read ", "ask read ", "ask read "], loop


class StoppedElsewhere(TwoRanks):
    """The other rank is asked to stop in its third step."""

    steps = 0

    def agree(self, numbers):
        self.steps += len(numbers) == 2 and numbers[1] > 0
        return super().agree((float(self.steps >= 3) or numbers[0], *numbers[1:]))


def test_a_request_of_another_rank_stops_the_run(request_for):
    result = train_run(request_for(max_steps=6, ckpt_every=6), StoppedElsewhere(), silent)
    assert not result.finished and result.steps in (3, 4)
