"""What host batches show of a loss: means over filled rows, uneven labels, indices out of range."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fake_backend import FakeBackend
from runs import SUPPORT, VIRTUAL_TPU, failure, result, tpukit
from tagging_task import WORDS, Tagger, Texts
from torch import nn

from tpukit.errors import DataError
from tpukit.train.config import TrainConfig
from tpukit.train.loss_inputs import IndexTrace
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder
from tpukit.train.run_log import read_metrics
from tpukit.train.task import PlanSettings, ShuffledPlan, stack_samples

TAGGER = f"{SUPPORT / 'tagging_task.py'}:Tagger"


XLA = ("train", "--task", TAGGER, "--hw", "tpu", "--accumulate", "1")
TWO = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}


@pytest.fixture(autouse=True)
def no_c_compiler(monkeypatch):
    """Dynamo without Inductor: what a loss sees is the same, 20 seconds earlier."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def train(task, tmp_path, backend=None, **config):
    """The validation losses and the warnings of a run."""
    lines: list[str] = []
    settings = {"max_steps": 2, "global_batch_size": 8, "log_every": 1, "ckpt_every": 1,
                "num_workers": 0, **config}  # fmt: skip
    request = TrainingRequest(task, TrainConfig(**settings), RunFolder(tmp_path / "run"))
    train_run(request, backend or FakeBackend(), lines.append)
    losses = [row["valid_loss"] for row in read_metrics(request.folder) if "valid_loss" in row]
    return losses, [line for line in lines if "mean (0-d" in line]


def compiling():
    """A backend on which shapes are fixed."""
    backend = FakeBackend()
    backend.compiles = True
    return backend


class Filling(ShuffledPlan):
    """Micro-batches with a filled row."""

    def step(self, step):
        return [replace(micro, keys=micro.keys[:-1]) for micro in super().step(step)]


class FilledTagger(Tagger):
    def plan(self, data, settings):
        return Filling(len(data), settings)


# -- means -----------------------------------------------------------------------------------------
def test_a_mean_over_filled_rows_is_warned_of_once_with_its_fix(tmp_path):
    _, warnings = train(FilledTagger(), tmp_path)
    [warning] = warnings
    assert "Tagger.loss" in warning and "rows that only fill a batch up count in it" in warning
    assert (
        'batch["labels"].masked_fill(' in warning and '"weight": (labels != -100).sum()' in warning
    )
    kept = (tmp_path / "run" / "log.txt").read_text()
    assert kept.count("rows that only fill") == 1


def test_a_mean_over_other_numbers_of_labels_is_warned_of(tmp_path):
    _, [warning] = train(Tagger(), tmp_path)
    assert "labels in 'labels' count alike" in warning and '"weight"' in warning


@pytest.mark.parametrize("backend", [FakeBackend, compiling])
def test_the_fix_that_the_warning_shows_is_exact(tmp_path, backend):
    """The mean over all labels of the data, as a loop over samples adds them up."""
    losses, warnings = train(Tagger("weight"), tmp_path, backend(), lr=1e-30)
    assert warnings == []
    task, total, count = Tagger(), 0.0, 0
    torch.manual_seed(0)
    from tpukit.train.run_folder import open_run

    model = task.build_model(None)
    model.load_state_dict(open_run(tmp_path / "run", print).weights())
    for sample in (Texts(11)[index] for index in range(11)):
        labels = torch.from_numpy(sample["labels"])
        with torch.no_grad():
            scores = model(torch.from_numpy(sample["tokens"]))
        total += F.cross_entropy(scores, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    assert losses[-1] == pytest.approx(total / count, rel=1e-5)


def test_a_loss_a_row_is_not_warned_of(tmp_path):
    class PerRow(Tagger):
        def loss(self, model, batch):
            scores = model(batch["tokens"]).transpose(1, 2)
            return {"loss": F.cross_entropy(scores, batch["labels"], reduction="none").mean(1)}

    assert train(PerRow(), tmp_path, compiling())[1] == []


class MakesLabels(Tagger):
    """Its labels are the tokens: without those of padding, or without the first of each row."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def build_model(self, ops):
        return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))

    def collate(self, samples, micro):
        return stack_samples([{"tokens": sample["tokens"]} for sample in samples], micro.rows)

    def loss(self, model, batch):
        labels = batch["tokens"].clone()
        if self.way == "copied":
            labels[batch["tokens"] == 0] = -100
        elif self.way == "filled":
            labels = labels.masked_fill(labels == 0, -100)
        else:
            labels[:, 0] = -100
        return {"loss": F.cross_entropy(model(batch["tokens"]).view(-1, WORDS), labels.view(-1))}


@pytest.mark.parametrize(("way", "warns"), [("copied", 1), ("filled", 1), ("even", 0)])
def test_labels_that_the_loss_makes_are_counted(tmp_path, way, warns):
    _, warnings = train(MakesLabels(way), tmp_path, accumulate=2)
    assert len(warnings) == warns and all("labels in 'tokens' count" in w for w in warnings)


# -- indices out of range --------------------------------------------------------------------------
def first_wrong(loss, batch, other):
    """What a trace of `loss` on one batch finds in another."""
    with IndexTrace(batch) as trace:
        loss(batch)
    found = [use.first_wrong(other) for use in trace.uses]
    return next((wrong for wrong in found if wrong is not None), None)


LOSSES = {
    "as it is": lambda b: F.cross_entropy(torch.zeros(4, 3), b["label"]),
    "nll": lambda b: F.nll_loss(torch.zeros(4, 3), b["label"]),
    "flat": lambda b: F.cross_entropy(torch.zeros(4, 3), b["label"].view(-1).long().contiguous()),
    "shifted": lambda b: F.nll_loss(torch.zeros(4, 3), F.pad(b["label"], (0, 1), value=-100)[1:]),
    "embedded": lambda b: nn.Embedding(3, 2)(b["label"][:, None]),
    "one hot": lambda b: F.one_hot(b["label"], 3),
    "gathered": lambda b: torch.zeros(4, 3).gather(1, b["label"][:, None]),
    "selected": lambda b: torch.zeros(3, 2)[b["label"]],
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_label_out_of_range_is_found(name):
    good, bad = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 2, 3])
    assert first_wrong(LOSSES[name], {"label": good}, {"label": good}) is None
    assert first_wrong(LOSSES[name], {"label": good}, {"label": bad}) == ("label", 3, 3)


def test_what_the_loss_itself_leaves_out_is_no_mistake():
    """255 is replaced, column 1 indexes something larger, -1 is ignored, the rest is computed."""

    def loss(batch):
        F.cross_entropy(torch.zeros(4, 3), batch["label"].masked_fill(batch["label"] == 255, -100))
        F.embedding(batch["pair"][:, 0], torch.zeros(3, 2))
        F.embedding(batch["pair"][:, 1], torch.zeros(9, 2))
        F.cross_entropy(torch.zeros(4, 3), batch["other"], ignore_index=-1)
        F.embedding(batch["far"] % 3, torch.zeros(3, 2))

    pair = torch.tensor([[0, 8], [1, 7], [2, 3], [0, 5]])
    batch = {"label": torch.tensor([0, 1, 2, 255]), "pair": pair,
             "other": torch.tensor([-1, 0, 1, 2]), "far": torch.tensor([0, 1, 700, 3])}  # fmt: skip
    assert first_wrong(loss, batch, batch) is None
    assert first_wrong(loss, batch, {**batch, "pair": pair.flip(1)}) == ("pair", 0, 8)
    assert first_wrong(loss, batch, {**batch, "other": torch.tensor([0, 0, -100, 0])})[1:] == (
        2,
        -100,
    )


def test_a_value_changed_in_place_is_no_longer_followed():
    def loss(batch):
        batch["label"][batch["label"] == 9] = 0
        F.cross_entropy(torch.zeros(4, 3), batch["label"])

    batch = {"label": torch.tensor([0, 1, 2, 9])}
    assert first_wrong(loss, dict(batch), {"label": torch.tensor([9, 1, 2, 0])}) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_later_sample_is_named_before_its_step(tmp_path, workers):
    backend = FakeBackend()
    backend.compiles_everything = True
    [third] = ShuffledPlan(32, PlanSettings(8, 8, 1, TrainConfig().global_seed)).step(2)
    wrong = third.keys[4].sample
    said = rf"'labels' of training sample {wrong} holds 5: `cross_entropy` in Tagger\.loss .*0 to 4"
    with pytest.raises(DataError, match=said):
        train(Tagger(wrong=wrong), tmp_path, backend, max_steps=4, num_workers=workers)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("entry", "value", "told"),
    [("labels", 5, "`cross_entropy` in Tagger.loss"), ("tokens", 11, "takes 0 to 10")],
)
def test_xla_names_entry_sample_and_range(tmp_path, entry, value, told):
    """Of the first step too: XLA computes on."""
    wrong = {"wrong": 3, "entry": entry, "value": value}
    options = [f"--set={name}={setting}" for name, setting in wrong.items()]
    base = [
        "train",
        "--task",
        TAGGER,
        "--hw",
        "tpu",
        "--accumulate",
        "1",
        "--results-dir",
        tmp_path,
    ]
    env = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}
    said = failure(tpukit(*base, *options, env=env))
    assert f"{entry!r} of training sample 3 holds {value}" in said and told in said


@pytest.mark.xla
def test_xla_counts_no_filled_row_in_a_mean(tmp_path):
    """Eleven samples in batches of eight: as on a CPU, in training and in `test`."""
    expected, _ = train(Tagger(), tmp_path / "cpu", max_steps=4, lr=1e-2)
    xla = ["--hw", "tpu", "--precision", "fp32"]
    env = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}
    run = ["train", "--task", TAGGER, "--accumulate", "1", "--results-dir", tmp_path / "xla"]
    done = tpukit(*run, *xla, "--json", env=env)
    assert result(done)["compilations_after_warmup"] == 0
    *_, last = read_metrics(RunFolder(tmp_path / "xla"))
    assert last["valid_loss"] == pytest.approx(expected[-1], rel=1e-4)
    assert "rows that only fill" not in (tmp_path / "xla" / "log.txt").read_text()
    tested = tpukit("test", "--run", tmp_path / "xla", *xla, "--batch-size", 8, "--json", env=env)
    assert result(tested)["metrics"]["loss"] == pytest.approx(expected[-1], rel=1e-4)
