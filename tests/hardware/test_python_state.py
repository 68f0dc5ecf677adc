"""What a recorded step reads outside of its device: changes are seen, and taken back."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tpukit.hardware.python_state import MOST_ENTRIES, PythonState

FACTOR = 1


class Schedule:
    def __init__(self):
        self.alpha = 1.0


class Samples:
    """A data set: it may keep what it has read."""

    def __init__(self):
        self.read = {}

    def __getitem__(self, index):
        return self.read.setdefault(index, index)


class Trained:
    """A task with what people keep on one."""

    def __init__(self):
        self.alpha, self.phase, self.betas, self.rate = 1.0, None, (0.9, 0.99), np.float64(1)
        self.unknown = float("nan")
        self.stats, self.seen, self.weights = {"n": 0}, [], [1.0, 0.0]
        self.schedule, self.options = Schedule(), SimpleNamespace(alpha=1.0)
        self.classes, self.table = torch.ones(3), np.ones(3)
        self.paths = list(range(MOST_ENTRIES + 1))
        self.rng, self.old, self.own = (
            np.random.default_rng(0),
            np.random.RandomState(0),
            random.Random(0),
        )
        self.of_torch = torch.Generator()
        self.samples = Samples()


def owner():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return SimpleNamespace(
        task=Trained(), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )


def globally(factor):
    globals()["FACTOR"] = factor


CHANGES = {
    "Trained.alpha": lambda o: setattr(o.task, "alpha", 2.0),
    "Trained.phase": lambda o: setattr(o.task, "phase", "late"),
    "Trained.betas": lambda o: setattr(o.task, "betas", (0.9, 0.9)),
    "Trained.rate": lambda o: setattr(o.task, "rate", np.float64(2)),
    "Trained.later": lambda o: setattr(o.task, "later", 1),
    "Trained.stats.n": lambda o: o.task.stats.update(n=1),
    "Trained.weights.1": lambda o: o.task.weights.__setitem__(1, 2.0),
    "Schedule.alpha": lambda o: setattr(o.task.schedule, "alpha", 2.0),
    "SimpleNamespace.alpha": lambda o: setattr(o.task.options, "alpha", 2.0),
    "Trained.classes": lambda o: o.task.classes.mul_(2),
    "Trained.table": lambda o: o.task.table.__setitem__(0, 2),
    "Trained.paths": lambda o: setattr(o.task, "paths", []),
    "Linear._parameters.weight": lambda o: o.model[0].requires_grad_(False),
    "BatchNorm1d._buffers.running_var": lambda o: setattr(o.model[1], "running_var", torch.ones(2)),
    "Linear._forward_hooks": lambda o: o.model[0].register_forward_hook(lambda *_: None),
    "BatchNorm1d.training": lambda o: o.model[1].eval(),
    "SGD.param_groups.0.weight_decay": lambda o: o.optimizer.param_groups[0].update(weight_decay=1),
    f"{__name__}.FACTOR": lambda o: globally(2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_taken_back(name):
    globally(1)
    given = owner()
    state = PythonState(given)
    assert state.change() is None and state.change(within=True) is None
    CHANGES[name](given)
    assert state.change() == name
    state.restore()
    in_place = name in (
        "Trained.classes",
        "Trained.table",
        "Linear._parameters.weight",
        "Linear._forward_hooks",
    )
    assert (state.change() is None) != in_place and not globally(1)


def test_a_log_that_grows_is_a_change_of_a_step_alone():
    given = owner()
    state = PythonState(given)
    given.task.seen.append(1)
    assert state.change() is None and state.change(within=True) == "Trained.seen.0"
    state.restore()
    assert given.task.seen == []


def test_what_a_data_set_keeps_is_no_setting():
    given = owner()
    state = PythonState(given)
    assert given.task.samples[3] == 3 and state.change(within=True) is None


@pytest.mark.parametrize("name", ["rng", "old", "own", "of_torch"])
def test_numbers_drawn_from_a_generator_of_ones_own_are_a_change(name):
    draws = {
        "rng": lambda g: g.random(), "old": lambda g: g.random(), "own": lambda g: g.random(),
        "of_torch": lambda g: torch.rand(1, generator=g),
    }  # fmt: skip
    given = owner()
    given.task.secret = random.SystemRandom()  # has no state
    state = PythonState(given)
    assert state.change(within=True) is None
    draws[name](getattr(given.task, name))
    assert state.change(within=True) == f"Trained.{name}"


class Unprinted:
    """As a tensor of a TPU, whose text takes programs to compute."""

    def __repr__(self):
        raise AssertionError("its text was asked for")


def test_what_a_dict_is_keyed_by_is_not_written_out():
    """An optimizer's state is a dict by parameters."""
    key, step = Unprinted(), {"step": 0}
    owner = SimpleNamespace(task=SimpleNamespace(state={key: step}), model=None, optimizer=None)
    state = PythonState(owner)
    assert state.change() is None
    step["step"] = 1
    assert state.change().endswith(".Unprinted.step")
    owner.task.state[key] = 2
    assert state.change().endswith(".Unprinted")
