"""State in Python that moves in each step is named once; what a dropped step moved is undone."""

import random

import pytest
import torch
from fake_backend import FakeBackend
from stateful_modules import MODULES
from tiny_task import Tiny
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder
from tpukit.train.task import PlanSettings


class Moving(Tiny):
    """Each kind of state that people keep on a task or a module."""

    name = "moving"

    def __init__(self, kind="none", data_path=""):
        super().__init__()
        self.kind, self.count, self.history = kind, 0, []
        self.momenta = (0.9 + 0.1 * step / 100 for step in range(100))
        self.indices, self.rng = iter(range(100)), random.Random(0)
        self.plain_queue, self.cache = torch.zeros(4), None

    def build_model(self, ops):
        model = nn.Sequential(weight_norm(nn.Linear(8, 2)), nn.BatchNorm1d(2))
        model.register_buffer("kept", torch.zeros(()))
        model.register_buffer("passing", torch.zeros(()), persistent=False)
        return model

    def loss(self, model, batch):
        with parametrize.cached():  # a new dict of torch's own each time
            found = model(batch["x"])
        model.activation = found
        if self.cache is None:
            self.cache = torch.ones(2)
        if model.training:
            {
                "none": lambda: model.kept.add_(1),
                "count": lambda: setattr(self, "count", self.count + 1),
                "history": lambda: self.history.append(1.0),
                "momenta": lambda: next(self.momenta),
                "indices": lambda: next(self.indices),
                "rng": self.rng.random,
                "plain_queue": lambda: self.plain_queue.add_(1),
                "passing": lambda: model.passing.add_(1),
            }[self.kind]()
        return {"loss": (found - batch["y"]).square().mean(1)}


def lines_of(task, folder):
    lines = []
    config = TrainConfig(max_steps=5, global_batch_size=16, num_workers=0)
    train_run(TrainingRequest(task, config, RunFolder(folder)), FakeBackend(), lines.append)
    return [line for line in lines if "no checkpoint holds" in line]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(k, f"Moving.{k}") for k in ("count", "momenta", "indices", "rng", "plain_queue")]
    + [("passing", "Sequential.passing"), ("history", "Moving.history")],
)  # fmt: skip
def test_what_moves_in_python_is_named_once(kind, name, tmp_path):
    [line] = lines_of(Moving(kind), tmp_path / "run")
    assert line.startswith(f"Warning: each step changes {name}")


@pytest.mark.parametrize("kind", ["none", *MODULES])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_a_checkpoint_holds_a_cache_and_activations_are_not(kind, tmp_path):
    task = Moving()
    if kind != "none":
        task.build_model = lambda ops: MODULES[kind]()
        task.loss = lambda model, batch: {
            "loss": (model(batch["x"]).float() - batch["y"]).square().mean(1)
        }
    assert lines_of(task, tmp_path / "run") == []


@pytest.mark.parametrize("kind", ["queue", "quantisation", "centre"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_dropped_step_leaves_a_teacher_and_buffers_as_they_were(kind):
    torch.manual_seed(0)
    backend, task = FakeBackend(), Tiny()
    model = MODULES[kind]()
    learner = build_learner(task, backend, model, TrainConfig(optimizer="sgd"))
    batch = {
        **task.probe_batches(PlanSettings(8, 8, 1, 0))[0],
        "x": torch.randn(8, 8),
        "y": torch.randn(8, 2),
    }
    # Nothing could be undone of the first pass that moves a teacher: that step is made.
    made = learner.train_step([batch], 0.1, interrupt=lambda done: True)
    assert made == (kind == "queue")
    learner.train_step([batch], 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not learner.train_step([batch, batch], 0.1, interrupt=lambda done: done == 2)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_step_that_may_be_dropped_copies_no_parameter_that_only_the_optimizer_moves():
    """A copy of all weights would be what a long step on a full GPU has no memory for."""
    task = Tiny()
    learner = build_learner(task, FakeBackend(), nn.Linear(8, 2), TrainConfig(optimizer="sgd"))
    batch = {
        **task.probe_batches(PlanSettings(8, 8, 1, 0))[0],
        "x": torch.randn(8, 8),
        "y": torch.randn(8, 2),
    }
    for _ in range(2):
        assert learner.train_step([batch, batch], 0.1, interrupt=lambda done: False)
    assert learner._passes.before().copies == {}
