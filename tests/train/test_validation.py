"""Validation: metrics from rows, several sets, the best metric, early stopping, the hook."""

import multiprocessing
import os
import shutil
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from tiny_task import Rows, Tiny
from torch import nn

from tpukit.errors import ConfigError, DataError, UsageError
from tpukit.hardware.backend import TorchOps
from tpukit.train.clocks import CompilationWatch
from tpukit.train.config import TrainConfig, build
from tpukit.train.evaluation import in_data_order, infer, metrics_of, metrics_of_run
from tpukit.train.learner import BatchSums, weighted_sums
from tpukit.train.loader import LoaderSettings
from tpukit.train.plan import TrainingRequest
from tpukit.train.requests import EvaluationRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder, TrainedRun, open_run
from tpukit.train.run_log import read_metrics
from tpukit.train.schedule import BestMetric, parse_best_metric
from tpukit.train.task import VALIDATION_EPOCH, Datasets, MicroBatch, PlanSettings, SampleKey


@pytest.fixture
def train(tmp_path):
    """Runs a task in one run folder; the result, the metrics, the log."""

    def run(task, **config):
        lines: list[str] = []
        settings = {"max_steps": 6, "global_batch_size": 16, "log_every": 2, "ckpt_every": 2,
                    "num_workers": 0, **config}  # fmt: skip
        request = TrainingRequest(task, TrainConfig(**settings), RunFolder(tmp_path / "run"))
        result = train_run(request, FakeBackend(), lines.append)
        return result, read_metrics(request.folder), lines

    return run


class Renormalized(nn.Module):
    """Writes to its weights in each pass, in eval mode too: torch's way, or by itself. Or in eval
    mode alone, to a frozen one and where no counter of writes sees it."""

    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(40, 8, max_norm=1.0 if kind == "by torch" else None)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)
        self.shift = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.kind = kind

    def forward(self, x):
        if self.kind == "by itself":
            with torch.no_grad():
                self.head.weight.mul_(0.9)
        if self.kind == "in eval mode" and not self.training:
            self.head.weight.data.mul_(0.9)
            self.shift.data.add_(0.1)
        rows = self.embedding((x[:, 0] * 20).abs().long() % 40) + x + self.shift
        return self.head(self.norm(rows))


class Freezing(Tiny):
    """Freezes the statistics after a step."""

    def after_step(self, model):
        model.norm.eval()


@pytest.mark.parametrize("kind", ["by torch", "by itself", "in eval mode", "modes"])
def test_weights_and_modes_are_put_back_after_a_validation(tmp_path, kind):
    task, found = Freezing() if kind == "modes" else Tiny(), []
    task.build_model = lambda ops: Renormalized(kind)
    for every in (1, 6):
        config = TrainConfig(max_steps=6, global_batch_size=16, num_workers=0, lr=0.01,
                             ckpt_every=every, ema_decay=0.5, ema_warmup=0)  # fmt: skip
        folder = RunFolder(tmp_path / str(every))
        train_run(TrainingRequest(task, config, folder), FakeBackend(), lambda line: None)
        checkpoint = folder.checkpoints / "step-00000006"
        found.append([(checkpoint / f"{n}.safetensors").read_bytes() for n in ("model", "ema")])
    assert found[0] == found[1]


def test_gradients_that_a_metric_switches_off_are_on_in_the_next_step(train):
    task = Tiny()
    task.validation_rows = lambda model, batch: {"x": batch["x"][:, 0]}
    task.compute = lambda rows: {"one": float(torch.set_grad_enabled(False) is not None)}
    try:
        result, *_ = train(task)
    finally:
        torch.set_grad_enabled(True)
    assert result.steps == 6


class Ranked(Tiny):
    """Row i of a validation set scores i, and the last `positive` of its rows are positive."""

    name = "ranked"

    def datasets(self):
        return Datasets(Rows(64), {"even": Numbered(20, 10), "rare": Numbered(7, 2)})

    def validation_rows(self, model, batch):
        return {"score": batch["number"], "label": batch["label"]}

    def compute(self, rows):
        assert np.array_equal(rows["score"], np.sort(rows["score"])), "in the order of the data"
        positive = rows["score"][rows["label"] == 1]
        negative = rows["score"][rows["label"] == 0]
        auc = (positive[:, None] > negative[None]).mean()
        return {"auc": auc, "positive": np.int64(len(positive)), "mean": rows["score"].mean()}


class Numbered(Rows):
    """Rows with their number and a label."""

    def __init__(self, count: int, positive: int) -> None:
        super().__init__(count)
        self.positive = positive

    def __getitem__(self, index):
        label = int(index >= self.count - self.positive)
        return {**super().__getitem__(index), "number": float(index), "label": label}


def test_metrics_are_computed_over_all_rows_of_each_set(train):
    _, metrics, _ = train(Ranked(), max_steps=2)
    [found] = [row for row in metrics if row["kind"] == "valid"]
    assert found["valid_even_auc"] == 1.0 and found["valid_rare_auc"] == 1.0
    assert (found["valid_even_positive"], found["valid_rare_positive"]) == (10, 2)
    assert (found["valid_even_mean"], found["valid_rare_mean"]) == (9.5, 3.0)
    assert {"valid_even_loss", "valid_rare_worst"} <= found.keys()


def test_rows_of_ranks_come_in_the_order_of_the_data():
    """Two ranks, two batches of four rows out of order, the last row of the second filled."""
    keys = [SampleKey(VALIDATION_EPOCH, sample) for sample in (6, 1, 3, 2, 0, 5, 4)]
    micro_batches = [MicroBatch(tuple(keys[:4]), 4), MicroBatch(tuple(keys[4:]), 4)]

    def part(*samples):
        real = np.array([sample >= 0 for sample in samples], np.float32)
        return {"sample": np.array(samples), "mask": real}

    parts = [[part(6, 1), part(0, 5)], [part(3, 2), part(4, -1)]]
    assert in_data_order(parts, micro_batches)["sample"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    parts[0][0]["mask"][1] = 0.0  # a row that the task itself masks
    assert in_data_order(parts, micro_batches)["sample"].tolist() == [0, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda batch: {"score": batch["number"].sum()}, r"'score' as a tensor of shape \(\)"),
        (lambda batch: {"score": 1.0}, "'score' as a float"),
    ],
)
def test_what_is_not_one_value_a_row_is_named(train, returned, told):
    class Wrong(Ranked):
        def validation_rows(self, model, batch):
            return returned(batch)

    with pytest.raises(UsageError, match=told) as caught:
        train(Wrong(), max_steps=2)
    assert "Wrong.validation_rows" in caught.value.message


def test_rows_of_several_shapes_are_named(train):
    """Of a task that pads each batch to its longest sample."""

    class Padded(Ranked):
        def validation_rows(self, model, batch):
            return {"score": batch["x"][:, : int(batch["number"].max()) % 3 + 1]}

    with pytest.raises(
        UsageError, match=r"rows of the shapes .*\(1,\).* in one batch and .*\(2,\)"
    ):
        train(Padded(), max_steps=2)


def test_what_is_not_a_number_is_named(train):
    class Wrong(Ranked):
        def compute(self, rows):
            return {"auc": "high"}

    with pytest.raises(UsageError, match=r"Wrong\.compute.*numbers by name"):
        train(Wrong(), max_steps=2)


# -- a loss that is a mean -------------------------------------------------------------------------
class Mean(Tiny):
    """Its loss is the batch's mean; the second half of its rows are far from the first."""

    name = "mean"

    def __init__(self, samples: int = 21, loss_a_row: bool = False) -> None:
        super().__init__(noise=0.0)
        self.loss_a_row = loss_a_row
        self.valid = [Rows(samples)[index] for index in range(samples)]
        for index, row in enumerate(self.valid):
            row["y"] += index

    def datasets(self):
        return Datasets(Rows(64), self.valid)

    def loss(self, model, batch):
        losses = super().loss(model, batch)
        loss, worst = losses["loss"], losses["worst"]
        return {"loss": loss if self.loss_a_row else loss.mean(), "worst": worst.mean()}


class Recorded(FakeBackend):
    """One rank of several; the sums that it would add to the others' are kept."""

    def __init__(self, rank, ranks):
        super().__init__(devices=ranks)
        self.rank, self.world_size = rank, ranks
        self.rows_seen: list[int] = []

    def batches(self, loader):
        for batch in super().batches(loader):
            self.rows_seen.append(len(batch["mask"]))
            yield batch

    def all_reduce_sum(self, tensor):
        self.sums = tensor.clone()
        return tensor


@pytest.mark.parametrize("loss_a_row", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    ("ranks", "samples", "rows"),
    [(1, 21, 16), (2, 21, 16), (4, 17, 16), (4, 15, 16), (2, 21, 5), (4, 3, 16)],
)
def test_a_mean_counts_every_sample_once(ranks, samples, rows, loss_a_row, compiles):
    """The last batch of 16 rows has 5 samples, 1 or 15: a rank's rows are all samples, or none.

    Nothing is known of the loss before, as in `tpukit test`, whose batch need not divide.
    """
    task, sums, rows_seen = Mean(samples, loss_a_row), [], []
    for rank in range(ranks):
        backend = Recorded(rank, ranks)
        backend.compiles = compiles
        torch.manual_seed(0)
        model = task.build_model(backend).eval()
        evaluation = BatchSums(task, backend, model)
        settings = PlanSettings(rows, rows, ranks, 0)
        data = task.datasets().valid
        batches = list(task.evaluation_batches(data, settings))
        metrics_of(evaluation, data, batches, LoaderSettings(0, 0), CompilationWatch(backend))
        sums.append(backend.sums)
        rows_seen.append(backend.rows_seen)
    weight, loss, worst = torch.stack(sums).sum(0)[:3].tolist()
    assert weight == samples and all(seen == rows_seen[0] for seen in rows_seen)
    with torch.no_grad():
        outputs = [model(torch.from_numpy(row["x"])[None])[0] for row in task.valid]
    wanted = [torch.from_numpy(row["y"]) for row in task.valid]
    errors = [(y - found).square().mean() for y, found in zip(wanted, outputs, strict=True)]
    assert loss / weight == pytest.approx(float(torch.stack(errors).mean()), rel=1e-5)
    assert worst / weight == pytest.approx(float(torch.stack(errors).sqrt().mean()), rel=1e-5)


class Placed(Ranked):
    """Keeps what it makes of its data path; its artifact is a number of samples."""

    def __init__(self, data_path=Path("20"), more: int = 0) -> None:
        super().__init__()
        self.samples = int(Path(data_path).name) + more

    def datasets(self):
        return Datasets(Rows(64), Numbered(self.samples, 5))


@dataclass
class Described(Placed):
    data_path: str = "20"
    more: int = 0
    samples: int = field(init=False)

    def __post_init__(self):
        Placed.__init__(self, self.data_path, self.more)


@pytest.mark.parametrize("task", [Placed(more=1), Described(more=1)])
def test_another_data_path_replaces_all_that_a_task_made_of_its_own(task):
    request = EvaluationRequest(data_path=Path("a/11"))
    fields = metrics_of_run(task, task.build_model(None).eval(), FakeBackend(), request, print)
    assert (fields["samples"], task.samples) == (12, 21)


def test_another_data_path_of_a_task_without_one_is_refused():
    with pytest.raises(UsageError, match="takes no `data_path` that --data-path could replace"):
        metrics_of_run(Mean(), None, FakeBackend(), EvaluationRequest(data_path=Path("a")), print)


def test_data_that_the_run_was_not_trained_with_is_said(train, tmp_path):
    class Dated(Tiny):
        day = "first"

        def datasets(self):
            return replace(super().datasets(), identity={"data": self.day})

    train(Dated())
    run, told = open_run(tmp_path / "run", print), []
    task, backend = Dated(), FakeBackend()
    model = backend.prepare(task.inference_model(TorchOps(), run.weights()))
    metrics_of_run(task, model, backend, EvaluationRequest(run=run), told.append)
    assert not any("Warning" in line for line in told)
    Dated.day = "second"
    metrics_of_run(task, model, backend, EvaluationRequest(run=run), told.append)
    assert any("not the data that the run was trained with" in line for line in told)


@pytest.mark.parametrize(
    ("data", "data_path", "name", "folder"),
    [
        ("valid", None, "valid", "test-valid"),
        ("valid", "own", "valid", "test-valid"),
        ("valid", "a/b", "a/b/valid", "test-a-b-valid"),
        ("/c/valid", "a", "/c/valid", "test-c-valid"),
        ("", None, "", "test"),
        ("", "a", "a", "test-a"),
    ],
)
def test_each_data_path_has_a_folder_of_its_own(tmp_path, data, data_path, name, folder):
    run = TrainedRun(tmp_path, "tiny", None, {}, {"data_path": "./own"}, None)
    request = EvaluationRequest(data_path=data_path and Path(data_path), run=run)
    assert (request.named(data), request.folder(data)) == (name, tmp_path / folder)


@pytest.mark.parametrize(("packed", "limit"), [(False, 4), (False, 100), (True, 4)])
def test_a_limit_takes_samples_evenly(packed, limit):
    """Of data that are sorted by class; in full batches of the plan's shapes."""

    class Sorted(Ranked):
        def evaluation_batches(self, data, settings):
            for micro in super().evaluation_batches(data, settings):
                yield replace(micro, counts=(len(micro.keys), 0, 0, 0)) if packed else micro

        def datasets(self):
            return Datasets(Rows(64), Numbered(20, 5))

        def collate(self, samples, micro):
            seen.append(tuple(int(sample["number"]) for sample in samples))
            return super().collate(samples, micro)

    seen: list[tuple[int, ...]] = []
    task, backend = Sorted(), FakeBackend()
    request = EvaluationRequest(limit=limit, batch_size=4)
    fields = metrics_of_run(task, task.build_model(None).eval(), backend, request, print)
    assert fields["samples"] == min(limit, 20)
    if limit == 4:
        assert seen == [(2, 7, 12, 17)] and fields["metrics"]["positive"] == 1
    else:
        assert [*chain(*seen)] == [*range(20)]


def test_what_weighs_nothing_may_be_nan():
    """The mean over no label at all, of a rank whose rows all fill up."""
    nothing = {"loss": torch.tensor(float("nan"), requires_grad=True), "weight": torch.tensor(0)}
    sums = weighted_sums(nothing, ["loss"], torch.zeros(4))
    sums[1].backward()
    assert sums.tolist() == [0.0] * len(sums) and nothing["loss"].grad == 0
    rows = {"loss": torch.tensor([2.0, float("nan")])}
    assert weighted_sums(rows, ["loss"], torch.tensor([1.0, 0.0]))[:2].tolist() == [1.0, 2.0]


def test_outputs_are_of_each_sample_in_the_order_of_the_data():
    """Micro-batches out of order, one in the middle not full, a rank without samples."""

    class Shuffled(Mean):
        def evaluation_batches(self, data, settings):
            assert settings.compiles is backend.compiles
            for samples in ([6, 1, 3], [2], [0, 5, 4, 7]):
                keys = tuple(SampleKey(VALIDATION_EPOCH, sample) for sample in samples)
                yield MicroBatch(keys, settings.micro_rows)

    backend = FakeBackend()
    for backend.compiles in (False, True):
        task = Shuffled(8)
        found = infer(task, task.valid, lambda batch: batch["x"], backend, rows_per_device=4)
        assert np.array_equal(found, [row["x"] for row in task.valid])


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (lambda batch: batch["x"].flatten(), r"a tensor of shape \(32,\) for a batch of 4 rows"),
        (lambda batch: batch["x"].mean(), r"a tensor of shape \(\)"),
        (lambda batch: {"scores": batch["x"]}, "'outputs' as a dict"),
    ],
)
def test_outputs_that_are_not_one_a_row_are_named(forward, told):
    task = Mean(8)
    with pytest.raises(UsageError, match=told):
        infer(task, task.valid, forward, FakeBackend(), rows_per_device=4)


def test_outputs_keep_whole_numbers_and_data_without_samples_is_named():
    """float32 holds whole numbers up to 2^24."""
    task, ids = Mean(), [{**Rows(5)[i], "id": 20_000_001 + i} for i in range(5)]
    found = infer(task, ids, lambda batch: batch["id"], FakeBackend())
    assert found.tolist() == [sample["id"] for sample in ids]
    with pytest.raises(DataError, match="no samples"):
        infer(task, [], lambda batch: batch["id"], FakeBackend())


def test_a_validation_in_which_nothing_counts_is_nan(train):
    class Uncounted(Tiny):
        def loss(self, model, batch):
            weight = torch.full_like(batch["mask"], float(model.training))
            return {**super().loss(model, batch), "weight": weight}

    result, metrics, _ = train(Uncounted())
    assert all(np.isnan(row["valid_loss"]) for row in metrics if row["kind"] == "valid")
    assert result.finished and result.best == {}


# -- the best metric -------------------------------------------------------------------------------
class Scripted(Tiny):
    """Its validations score what the list says."""

    name = "scripted"

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = list(values)

    def score(self, model, backend, data):
        value = self.values.pop(0)
        return {"accuracy": value, "spread": value}


@pytest.mark.parametrize(("how", "step"), [("max:valid_accuracy", 6), ("min:valid_spread", 4)])
def test_the_best_checkpoint_is_that_of_the_metric(train, tmp_path, how, step):
    result, *_ = train(Scripted(0.5, 0.3, 0.8), best_metric=how)
    assert result.best == {how[10:]: {6: 0.8, 4: 0.3}[step], "step": step}
    assert open_run(tmp_path / "run", print).checkpoint.state.step == step


def test_of_several_sets_the_first_decides(train):
    result, metrics, _ = train(Ranked())
    losses = [row["valid_even_loss"] for row in metrics if row["kind"] == "valid"]
    assert result.best["even_loss"] == min(losses)


def test_an_unknown_metric_is_named_after_the_checkpoint_is_written(train, tmp_path):
    with pytest.raises(UsageError, match=r"'valid_acc' is not among .*: valid_loss, .*accuracy"):
        train(Scripted(0.5), best_metric="max:valid_acc")
    assert open_run(tmp_path / "run", print).checkpoint.state.step == 2
    result, *_ = train(Scripted(0.5, 0.6), best_metric="max:valid_accuracy")
    assert (result.resumed_from, result.best["step"]) == (2, 6)


class Judged(Tiny):
    """Its own metric is declared; dropout draws from the generators."""

    name = "judged"
    metric_names: ClassVar = {"worst": "worst ↓", "bias": "bias ↑"}

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def validation_rows(self, model, batch):
        return {"error": (model(batch["x"]) - batch["y"]).mean(1)}

    def compute(self, rows):
        if len(rows["error"]) < 10:
            raise ValueError("too few")
        return {"bias": rows["error"].mean()}


def test_a_metric_that_no_validation_gives_is_named_before_the_first_step(train, tmp_path):
    with pytest.raises(UsageError, match=r"'valid_wurst' is not among .*: valid_loss, valid_worst"):
        train(Tiny(), best_metric="valid_wurst")
    assert not (tmp_path / "run").exists()
    result, *_ = train(Tiny(), best_metric="valid_worst")
    assert (result.resumed_from, result.finished) == (None, True)


def test_looking_for_the_metric_draws_nothing(train, tmp_path):
    runs = []
    for how in (None, "valid_bias"):
        result, metrics, _ = train(Judged(), best_metric=how)
        runs.append([row["loss"] for row in metrics if row["kind"] == "train"])
        assert result.best.keys() == {"bias" if how else "loss", "step"}
        (tmp_path / "run").rename(tmp_path / f"run-{how}")
    assert runs[0] == runs[1]


class Compared(Tiny):
    """What metrics by name take: targets and predictions."""

    name = "compared"

    def validation_rows(self, model, batch):
        return {"target": batch["y"], "prediction": model(batch["x"])}


def test_a_metric_by_name_decides_and_a_test_finds_it_again(train, tmp_path):
    (tmp_path / "mine.py").write_text("def worst(true, made):\n    return abs(true - made).max()\n")
    names = f"r2,rmse,min:{tmp_path / 'mine.py'}:worst"
    result, metrics, _ = train(Compared(), metric=names)
    rows = [row for row in metrics if row["kind"] == "valid"]
    assert result.best["r2"] == max(row["valid_r2"] for row in rows)
    run = open_run(tmp_path / "run", print)
    task, backend = Compared(), FakeBackend()
    model = task.inference_model(TorchOps(), run.weights())
    for asked, expected in ((None, {"r2", "rmse", "worst"}), ("mae", {"mae"})):
        request = EvaluationRequest(run=run, metric=asked)
        found = metrics_of_run(task, backend.prepare(model), backend, request, print)["metrics"]
        assert expected < found.keys() and "loss" in found
        for name in expected & {"r2", "rmse", "worst"}:
            at_best = next(row for row in rows if row["step"] == result.best["step"])
            assert found[name] == pytest.approx(at_best[f"valid_{name}"], rel=1e-5)


def test_a_metric_that_the_rows_cannot_give_is_an_error_before_the_first_step(train, tmp_path):
    for task, told in (
        (Tiny(), "needs 'target' of each validation sample"),
        (Judged(), "needs 'target' of each validation sample"),
        (Compared(), "auc needs classes or labels"),
    ):
        with pytest.raises(UsageError, match=told):
            train(task, metric="auc")
        assert not (tmp_path / "run" / "config.toml").exists()


def test_the_declared_arrow_is_the_direction(train):
    for wrong, right in {"max:valid_worst": "min:valid_worst", "min:valid_bias": "max:valid_bias",
                         "max:valid_loss": "min:valid_loss"}.items():  # fmt: skip
        with pytest.raises(ConfigError, match=r"the (most|least) is the best") as caught:
            train(Judged(), best_metric=wrong)
        assert f"best_metric={right}" in caught.value.hint
    result, metrics, _ = train(Judged(), best_metric="valid_bias")
    assert result.best["bias"] == max(row["valid_bias"] for row in metrics if "valid_bias" in row)


def test_the_last_validation_is_always_shown(train):
    _, metrics, lines = train(Tiny(), max_steps=40, ckpt_every=1, log_every=40)
    shown = [line for line in lines if "valid_loss" in line]
    assert len([row for row in metrics if row["kind"] == "valid"]) == 40 > len(shown)
    assert shown[-1].startswith("step 40: ")


def test_what_a_finished_run_can_do(train):
    """The rate of a schedule depends on the length: such a run cannot be made longer."""
    for schedule, told in {
        "cosine": "--init-from",
        "constant": "--max-steps go on with it",
    }.items():
        train(Tiny(), schedule=schedule, resume=False)
        *_, lines = train(Tiny(), schedule=schedule)
        assert any("is finished" in line and told in line for line in lines), lines


def test_a_metric_has_a_form():
    assert parse_best_metric("max:valid_auc") == BestMetric("valid_auc", largest=True)
    assert parse_best_metric("max:valid_in-domain_f1@5").name == "valid_in-domain_f1@5"
    assert parse_best_metric("valid_loss") == parse_best_metric("min:valid_loss")
    with pytest.raises(ConfigError, match="best_metric 'auc' is not"):
        build(TrainConfig, {"best_metric": "auc"})
    assert not BestMetric("valid_auc", True).improves({"valid_auc": float("nan")}, {})


# -- early stopping --------------------------------------------------------------------------------
def test_early_stopping_ends_the_run_and_a_resumed_one_says_so(train, tmp_path):
    early = {"max_steps": 20, "best_metric": "max:valid_accuracy", "early_stopping": 2}
    result, _, lines = train(Scripted(0.5, 0.7, 0.6, 0.7, 0.9), **early)
    assert (result.steps, result.finished, result.stopped_early) == (8, True, True)
    assert any("Stopped early after step 8" in line and "0.7 of step 8" in line for line in lines)
    again, _, lines = train(Scripted(), **early)
    assert (again.steps, again.finished, again.stopped_early) == (8, True, True)
    assert any("stopped early" in line and "early_stopping" in line for line in lines)
    # Of equal ones the later is kept, and patience goes on.
    assert open_run(tmp_path / "run", print).checkpoint.state.step == 8
    more, *_ = train(Scripted(0.6, 0.9, 0.8), **{**early, "early_stopping": 4, "max_steps": 14})
    assert (more.resumed_from, more.steps, more.stopped_early) == (8, 14, False)
    assert more.best == {"accuracy": 0.9, "step": 12}


def test_patience_goes_on_over_a_resume(train):
    early = {"best_metric": "max:valid_accuracy", "early_stopping": 3}
    train(Scripted(0.5, 0.4), max_steps=4, **early)
    result, *_ = train(Scripted(0.4, 0.4, 0.4), max_steps=20, **early)
    assert (result.steps, result.stopped_early) == (8, True)


def test_early_stopping_needs_validation_data(train):
    class Unvalidated(Tiny):
        def datasets(self):
            return Datasets(Rows(64), None)

    with pytest.raises(ConfigError, match="no validation data"):
        train(Unvalidated(), early_stopping=2)


# -- the hook --------------------------------------------------------------------------------------
def test_a_hook_that_fails_is_one_warning(train):
    class Tracked(Tiny):
        rows: list[dict] = []  # noqa: RUF012

        def on_log(self, row):
            self.rows.append(row)
            raise ConnectionError("the tracker is away")

    result, metrics, lines = train(Tracked())
    assert result.finished and Tracked.rows == metrics
    warnings = [line for line in lines if "on_log" in line]
    assert warnings == ["Warning: Tracked.on_log failed: ConnectionError: the tracker is away"]


class Decoding(Rows):
    """Remembers, in a file each, the processes that read it."""

    def __init__(self, folder):
        super().__init__(32)
        self.folder = folder

    def __getitem__(self, index):
        time.sleep(0.02)
        (self.folder / str(os.getpid())).touch()
        return super().__getitem__(index)


@pytest.mark.slow
def test_validation_batches_are_made_by_workers_that_stand_ready(tmp_path):
    """The same ones in each validation, started before the first step; they end with the run."""

    class Validating(Tiny):
        name = "validating"

        def datasets(self):
            return Datasets(
                Rows(32), {"a": Decoding(tmp_path / "a"), "b": Decoding(tmp_path / "b")}
            )

    scores = []
    for workers in (0, 4):
        for name in ("a", "b"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            (tmp_path / name).mkdir()
        config = TrainConfig(max_steps=6, ckpt_every=2, global_batch_size=8, num_workers=workers)
        folder = RunFolder(tmp_path / f"run {workers}")
        train_run(TrainingRequest(Validating(), config, folder), FakeBackend(), print)
        scores.append([row for row in read_metrics(folder) if row["kind"] == "valid"])
        readers = [{int(file.name) for file in (tmp_path / n).iterdir()} for n in ("a", "b")]
        if workers == 0:
            assert readers == [{os.getpid()}] * 2
        else:
            assert [len(found) for found in readers] == [2, 2] and not readers[0] & readers[1]
            assert os.getpid() not in readers[0] and not multiprocessing.active_children()
    assert len(scores[0]) == 3 and [
        {name: value for name, value in row.items() if name != "time"} for row in scores[0]
    ] == [{name: value for name, value in row.items() if name != "time"} for row in scores[1]]
