"""What a recorded step reads outside of its device: changes are seen, and taken back."""

import argparse
import collections
import dataclasses
import enum
import functools
import itertools
import multiprocessing
import os
import random
import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import settings_of_a_step as user
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from tpukit.hardware.python_state import MOST_ENTRIES, PythonState


@dataclasses.dataclass
class Inner:
    gain: float = 1.0


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)


class Table(collections.UserDict):
    pass


class Words(dict):
    """A dict with attributes."""


class Settings:
    """As ml_collections.ConfigDict: a mapping that is none by its class."""

    def __init__(self, **fields):
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name):
        return self._fields[name]

    def __setattr__(self, name, value):
        self._fields[name] = value

    def __getitem__(self, name):
        return self._fields[name]

    def __len__(self):
        return len(self._fields)

    def keys(self):
        return self._fields.keys()


Settings.__module__ = "numpy"


class Level(enum.Enum):
    LOW = 1


class Samples:
    """A data set: it may keep what it has read."""

    mixup = 0.1

    def __init__(self):
        self.read, self.rate, self.config = {}, 0.5, {"p": 0.1}
        self.inner, self.order = SimpleNamespace(level=1), [1.0, 2.0]

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return self.read.setdefault(index, index)


class Listed(Dataset):
    def __init__(self):
        self.rate = 0.5

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index


class Trained:
    """A task with what people keep on one."""

    rates: ClassVar = [0.1]
    power = 1.0

    def __init__(self):
        self.alpha, self.phase, self.betas, self.rate = 1.0, None, (0.9, 0.99), np.float64(1)
        self.unknown, self.zero = float("nan"), 0.0
        self.stats, self.seen, self.weights = {"n": 0}, [], [1.0, 0.0]
        self.deep = {"a": [({"b": 1.0},)]}
        self.scale, self.half, self.meter = user.Scale(), user.Half(), user.Meter()
        self.options, self.given = SimpleNamespace(alpha=1.0), argparse.Namespace(alpha=1.0)
        self.outer, self.table_like, self.words = Outer(), Table(a=1.0), Words(a=1.0)
        self.words.extra = 1.0
        self.classes, self.table, self.mask = torch.ones(3), np.ones(3), np.ones((300, 300))
        self.remote = torch.ones(3, device="meta")
        self.shared = torch.from_numpy(np.ones(3))
        self.nothing, self.objects = torch.ones(2, requires_grad=True), np.array([{}, 1], object)
        self.bytes = bytearray(3)
        self.queue, self.kinds = collections.deque([1.0, 2.0], 4), {"a"}
        self.paths = list(range(MOST_ENTRIES + 1))
        self.scaled, self.counted = user.scaled(2.0), user.counting()
        self.partial = functools.partial(user.shifted, times=[1.0])
        self.method, self.guarded = user.Scale().__call__, torch.no_grad()(user.scaled(3.0))
        self.counter = collections.Counter(a=1)
        self.rng, self.old, self.own = (
            np.random.default_rng(0), np.random.RandomState(0), random.Random(0),
        )  # fmt: skip
        self.of_torch = torch.Generator()
        self.cycle, self.steps = itertools.cycle([1, 2, 3]), iter(range(9))
        self.both = (x for x in (1, 2, 3))
        self.samples = Samples()
        self.nested = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=1))))
        self.config = Settings(a=Settings(b=Settings(c=Settings(d=Settings(e=1.0)))))
        self.value, self.values = multiprocessing.Value("d", 1.0), multiprocessing.Array("d", 3)
        self.local, self.level = threading.local(), Level.LOW
        self.local.value = Level.LOW.weight = 1.0
        self.large, self.many = np.ones(1_000_003), [{"w": 1.0} for _ in range(1500)]
        self.boxed = np.array([Inner(), 1], object)
        self.loader = DataLoader(Subset(Listed(), [0, 1]))

    def loss(self, x):
        return user.FACTOR * x * self.power

    @property
    def twice(self):
        return 2 * self.alpha


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.lin, self.norm = config, nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("kept", torch.ones(2))

    def forward(self, x):
        return self.drop(self.norm(self.lin(x))) * self.kept


Config = type("Config", (), {"__module__": "numpy"})
"""A class of a library."""


def config(**settings):
    made = Config()
    vars(made).update(settings)
    return made


@pytest.fixture
def given():
    """The owner of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(config(scale=1.0, inner=config(scale=1.0))), nn.Linear(2, 2))
    model[0].lin.weight.scale = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SimpleNamespace(task=Trained(), model=model, optimizer=optimizer)


def patched(target, name, value):
    """A change of a module or class, which the test takes back."""
    return lambda o: setattr(target, name, value)


def other(*_, **__):
    return 0.0


def data(tensor, value):
    tensor.data = value


CHANGES = {
    # attributes and entries
    "Trained.alpha": lambda o: setattr(o.task, "alpha", 2.0),
    "Trained.phase": lambda o: setattr(o.task, "phase", "late"),
    "Trained.betas": lambda o: setattr(o.task, "betas", (0.9, 0.9)),
    "Trained.betas (of int)": lambda o: setattr(o.task, "betas", (0, 0.99)),
    "Trained.rate": lambda o: setattr(o.task, "rate", np.float64(2)),
    "Trained.rate (of float32)": lambda o: setattr(o.task, "rate", np.float32(1)),
    "Trained.zero": lambda o: setattr(o.task, "zero", -0.0),
    "Trained.alpha (of int)": lambda o: setattr(o.task, "alpha", 1),
    "Trained.alpha (of bool)": lambda o: setattr(o.task, "alpha", True),
    "Trained.phase (deleted)": lambda o: delattr(o.task, "phase"),
    "Trained.later": lambda o: setattr(o.task, "later", 1),
    "Trained.stats.n": lambda o: o.task.stats.update(n=1),
    "Trained.stats.m": lambda o: o.task.stats.update(m=1),
    "Trained.stats.n (renamed)": lambda o: o.task.stats.update(m=o.task.stats.pop("n")),
    "Trained.counter.a": lambda o: o.task.counter.update("a"),
    "Trained.seen.0": lambda o: o.task.seen.append(1),
    "Trained.weights.1": lambda o: o.task.weights.__setitem__(1, 2.0),
    "Trained.weights.0 (turned)": lambda o: o.task.weights.reverse(),
    "Trained.weights.2": lambda o: o.task.weights.append(1.0),
    "Trained.deep.a.0.0.b": lambda o: o.task.deep["a"][0][0].update(b=2.0),
    "Trained.queue.0": lambda o: o.task.queue.append(o.task.queue.popleft()),
    "Trained.queue.2": lambda o: o.task.queue.append(3.0),
    "Trained.kinds.1": lambda o: o.task.kinds.add("b"),
    "Trained.paths": lambda o: setattr(o.task, "paths", []),
    "Trained.paths.7": lambda o: o.task.paths.__setitem__(7, -1),
    # objects
    "Scale.factor": lambda o: setattr(o.task.scale, "factor", 2.0),
    "SimpleNamespace.alpha": lambda o: setattr(o.task.options, "alpha", 2.0),
    "Namespace.alpha": lambda o: setattr(o.task.given, "alpha", 2.0),
    "Inner.gain": lambda o: setattr(o.task.outer.inner, "gain", 2.0),
    "Outer.inner": lambda o: setattr(o.task.outer, "inner", Inner()),
    "Table.data.a": lambda o: o.task.table_like.update(a=2.0),
    "Trained.words.a": lambda o: o.task.words.update(a=2.0),
    "Words.extra": lambda o: setattr(o.task.words, "extra", 2.0),
    "Meter.value": lambda o: setattr(o.task.meter, "value", 2.0),
    "Meter.later": lambda o: setattr(o.task.meter, "later", 2.0),
    "Scale.factor (of a method)": lambda o: setattr(o.task.method.__self__, "factor", 2.0),
    "Config.scale": lambda o: setattr(o.model[0].config, "scale", 2.0),
    "Config.scale (inner)": lambda o: setattr(o.model[0].config.inner, "scale", 2.0),
    "SimpleNamespace.d": lambda o: setattr(o.task.nested.a.b.c, "d", 2),
    "Settings._fields.e": lambda o: setattr(o.task.config.a.b.c.d, "e", 2.0),
    "_local.value": lambda o: setattr(o.task.local, "value", 2.0),
    "Level.weight": lambda o: setattr(Level.LOW, "weight", 2.0),
    "Trained.many.7.w": lambda o: o.task.many[7].update(w=2.0),
    "Inner.gain (in an array)": lambda o: setattr(o.task.boxed[0], "gain", 2.0),
    # arrays and host tensors in place
    "Trained.value": lambda o: setattr(o.task.value, "value", 2.0),
    "Trained.values": lambda o: o.task.values.__setitem__(1, 2.0),
    "Trained.large": lambda o: o.task.large.__setitem__(12_345, 2.0),
    "Trained.classes": lambda o: o.task.classes.mul_(2),
    "Trained.classes (replaced)": lambda o: setattr(o.task, "classes", torch.ones(3)),
    "Trained.classes (data)": lambda o: data(o.task.classes, torch.zeros(3)),
    "Trained.classes (of another shape)": lambda o: data(o.task.classes, torch.ones(4)),
    "Trained.classes (of another dtype)": lambda o: data(o.task.classes, torch.ones(3).bfloat16()),
    "Trained.remote": lambda o: setattr(o.task, "remote", torch.ones(3, device="meta")),
    "Trained.remote (of another shape)": lambda o: data(o.task.remote, o.task.remote.new_ones(4)),
    "Trained.remote (of another dtype)": lambda o: data(o.task.remote, o.task.remote.double()),
    "Trained.shared": lambda o: o.task.shared.numpy().__setitem__(0, 2.0),
    "Trained.nothing": lambda o: o.task.nothing.requires_grad_(False),
    "Trained.table": lambda o: o.task.table.__setitem__(0, 2),
    "Trained.mask": lambda o: o.task.mask.__setitem__((200, 200), 2),
    "Trained.objects": lambda o: o.task.objects.__setitem__(1, 2),
    "Trained.bytes": lambda o: o.task.bytes.__setitem__(1, 2),
    # functions
    "scaled.scale.factor": lambda o: setcell(o.task.scaled, 3.0),
    "counting.counted.count": lambda o: o.task.counted(),
    "scaled.scale.factor (wrapped)": lambda o: setcell(o.task.guarded.__wrapped__, 5.0),
    "Trained.partial.times.0": lambda o: o.task.partial.keywords["times"].__setitem__(0, 2.0),
    "scaled.scale": lambda o: setattr(o.task.scaled, "extra", 2.0),
    "Trained.scaled": lambda o: setattr(o.task, "scaled", user.scaled(2.0)),
    "shifted.__defaults__": patched(user.shifted, "__defaults__", (2.0,)),
    "shifted.__kwdefaults__": patched(user.shifted, "__kwdefaults__", {"times": (2.0,)}),
    "shifted.__code__": patched(user.shifted, "__code__", other.__code__),
    # globals and classes
    "settings_of_a_step.FACTOR": patched(user, "FACTOR", 2),
    "settings_of_a_step.TABLE.loss": lambda o: user.TABLE.update(loss=2.0),
    "settings_of_a_step.shifted": patched(user, "shifted", other),
    "settings_of_a_step.VAR.value": lambda o: user.VAR.set(2.0),
    "Trained.power": patched(Trained, "power", 2.0),
    "Trained.rates.0": lambda o: Trained.rates.__setitem__(0, 0.2),
    "Trained.twice": patched(Trained, "twice", property(other)),
    "Trained.loss": patched(Trained, "loss", other),
    "Scale.power (of a base)": patched(user.Scale, "power", 2.0),
    "Scale.powers.0": lambda o: user.Scale.powers.__setitem__(0, 2.0),
    "Scale.static": patched(user.Scale, "static", staticmethod(other)),
    "Half.power": patched(user.Half, "power", 2.0),
    "Block.forward": patched(Block, "forward", other),
    "Linear.forward": patched(nn.Linear, "forward", other),
    "torch.nn.functional.relu": patched(F, "relu", other),
    "torch.relu": patched(torch, "relu", other),
    "Tensor.clamp": patched(torch.Tensor, "clamp", other),
    "torch.nn.modules.linear.F": patched(nn.modules.linear, "F", SimpleNamespace()),
    # the model and the optimizer
    "Linear._parameters.weight": lambda o: o.model[1].weight.requires_grad_(False),
    "Linear._parameters.weight (of another shape)": lambda o: data(
        o.model[1].weight, torch.ones(4, 2)
    ),
    "Linear._parameters.weight (of another dtype)": lambda o: o.model[1].bfloat16(),
    "Linear._parameters.weight (tied)": lambda o: setattr(
        o.model[1], "weight", o.model[0].lin.weight
    ),
    "Linear._parameters.weight.scale": lambda o: setattr(o.model[0].lin.weight, "scale", 2.0),
    "Linear._parameters.bias (attribute)": lambda o: setattr(o.model[1].bias, "scale", 2.0),
    "Linear._parameters.weight (hook)": lambda o: o.model[1].weight.register_hook(other),
    "Linear._parameters.weight (post hook)": lambda o: o.model[
        1
    ].weight.register_post_accumulate_grad_hook(other),
    "BatchNorm1d._buffers.running_var": lambda o: setattr(
        o.model[0].norm, "running_var", torch.ones(2)
    ),
    "Linear._buffers": lambda o: o.model[1].register_buffer("late", torch.ones(2)),
    "Block._buffers.late": lambda o: o.model[0].register_buffer("late", torch.ones(2)),
    "Block._parameters": lambda o: o.model[0].register_parameter("late", o.model[1].bias),
    "Linear._forward_hooks": lambda o: o.model[1].register_forward_hook(other),
    "Linear._backward_hooks": lambda o: o.model[1].register_full_backward_hook(other),
    "torch.nn._global_forward_hooks": lambda o: HOOKS.append(
        nn.modules.module.register_module_forward_hook(other)
    ),
    "Block._modules.drop": lambda o: setattr(o.model[0], "drop", nn.Identity()),
    "Sequential._modules.2": lambda o: o.model.append(nn.Identity()),
    "Dropout.p": lambda o: setattr(o.model[0].drop, "p", 0.4),
    "Linear.forward (of one)": lambda o: setattr(o.model[1], "forward", other),
    "BatchNorm1d.training": lambda o: o.model[0].norm.eval(),
    "SGD.param_groups.0.weight_decay": lambda o: o.optimizer.param_groups[0].update(weight_decay=1),
    "SGD.param_groups.1": lambda o: o.optimizer.add_param_group({"params": [torch.ones(1)]}),
    # modes and the environment
    "autocast": lambda o: torch.set_autocast_enabled("cpu", True),
    "torch.set_grad_enabled": lambda o: torch.set_grad_enabled(False),
    "torch.set_default_dtype": lambda o: torch.set_default_dtype(torch.float64),
    "attention": lambda o: torch.backends.cuda.enable_flash_sdp(False),
    "os.environ.bytes": lambda o: os.environ.update(TPUKIT_TEST_OF_A_STEP="1"),
}  # fmt: skip
HOOKS = []


def setcell(function, value):
    function.__closure__[0].cell_contents = value


@pytest.fixture
def undone():
    """Takes back what a case changes outside of the owner."""
    places = (user, user.Scale, user.Half, Trained, Block, nn.Linear, F, torch, torch.Tensor)
    places = (*places, nn.modules.linear)
    before = [dict(vars(place)) for place in places]
    kept = {name: getattr(user.shifted, name) for name in ("__defaults__", "__kwdefaults__")}
    code, attention = user.shifted.__code__, torch.backends.cuda.flash_sdp_enabled()
    yield
    for place, names in zip(places, before, strict=True):
        for name, value in {**vars(place)}.items():
            if name in names and names[name] is not value:
                setattr(place, name, names[name])
            elif name not in names and place is not torch:
                delattr(place, name)
    user.shifted.__code__ = code
    user.shifted.__defaults__, user.shifted.__kwdefaults__ = kept.values()
    user.TABLE["loss"], user.Scale.powers[0], Trained.rates[0] = 1.0, 1.0, 0.1
    user.VAR.set(1.0)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.enable_flash_sdp(attention)
    os.environ.pop("TPUKIT_TEST_OF_A_STEP", None)
    while HOOKS:
        HOOKS.pop().remove()


IN_PLACE = (
    "Trained.classes", "Trained.remote (of", "Trained.shared", "Trained.nothing", "Trained.table",
    "Trained.mask", "Trained.objects", "Trained.bytes", "Trained.value", "Trained.large",
    "Linear._parameters.weight",
    "autocast", "attention", "shifted.__code__", "Linear.forward", "Tensor.", "torch.",
    "SGD.param_groups.1",
)  # fmt: skip
"""Beginnings of the names of what `restore` leaves as it is."""


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_seen_and_attributes_are_given_back(given, undone, case):
    state = PythonState(given)
    assert state.change() is None
    CHANGES[case](given)
    assert state.change() is not None and case.split(" (")[0] in state.changes(within=True)
    state.restore()
    assert case.startswith(IN_PLACE) or state.change(within=True) is None


DATA = {
    "Samples.rate": lambda t: setattr(t.samples, "rate", 0.1),
    "Samples.mixup": patched(Samples, "mixup", 0.9),
    "Samples.config.p": lambda t: t.samples.config.update(p=0.9),
    "Samples.order.0": lambda t: t.samples.order.reverse(),
    "SimpleNamespace.level": lambda t: setattr(t.samples.inner, "level", 2),
    "Listed.rate": lambda t: setattr(t.loader.dataset.dataset, "rate", 0.1),
}  # fmt: skip


@pytest.mark.parametrize("case", DATA)
def test_a_setting_of_a_data_set_is_a_change_between_steps(given, monkeypatch, case):
    """Not within one: a thread that reads ahead may count there, which is not taken back."""
    monkeypatch.setattr(Samples, "mixup", 0.1)
    state = PythonState(given)
    assert state.change() is None
    DATA[case](given.task)
    assert case in (state.change() or "") and case in state.changes()
    if case != "Samples.mixup":
        assert state.change(within=True) is None
        state.restore()
        assert case in (state.change() or "")


def test_a_list_that_is_looked_at_last_and_grows_is_a_change():
    """Its values, one by one, are those that it had."""
    given = SimpleNamespace(task=SimpleNamespace(seen=[1.0]), model=None, optimizer=None)
    state = PythonState(given)
    given.task.seen.append(2.0)
    assert state.change() == "SimpleNamespace.seen.1"


def test_equal_values_are_no_change(given):
    """Other objects, and what a step cannot read: added names of a library, a data set's cache."""
    state = PythonState(given)
    task = given.task
    task.betas, task.unknown, task.phase = tuple(x for x in (0.9, 0.99)), float("nan"), None
    task.rate, task.options.alpha = np.float64(1), 1.0
    task.paths[:] = range(MOST_ENTRIES + 1)
    task.weights[:] = [1.0, 0.0]
    assert task.samples[3] == 3
    given.model.eval().train()
    for _ in range(2):
        assert state.change() is None and state.change(within=True) is None


MOVES = {
    "rng": lambda t: t.rng.random(), "old": lambda t: t.old.random(),
    "own": lambda t: t.own.random(), "of_torch": lambda t: torch.rand(1, generator=t.of_torch),
    "cycle": lambda t: next(t.cycle), "steps": lambda t: next(t.steps),
    "both": lambda t: next(t.both),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_within_a_step_is_a_change(given, name):
    """Random generators and iterators: between two steps the data may move them."""
    given.task.secret = random.SystemRandom()  # has no state
    state = PythonState(given)
    MOVES[name](given.task)
    assert state.change() is None and state.change(within=True) == f"Trained.{name}"
    if name in ("rng", "old", "own", "of_torch"):
        state.restore()
        assert state.change(within=True) is None


@pytest.mark.parametrize(
    ("change", "is_once"),
    [
        (lambda o: o.model.eval(), True),  # a teacher in its own step
        (lambda o: setattr(o.task, "phase", "late"), True),
        (lambda o: setattr(o.task, "cache", torch.ones(1)), True),
        (lambda o: setattr(o.task, "phase", 1), False),
        (lambda o: o.task.counted(), False),
        (lambda o: setattr(o.task, "alpha", True), False),
        (lambda o: setattr(o.model, "training", 2), False),
        (lambda o: (o.model.eval(), o.task.counted()), False),
        (lambda o: None, True),
    ],
)
def test_switches_and_caches_change_once_and_numbers_each_time(given, change, is_once):
    state = PythonState(given)
    change(given)
    assert state.changes_once() is is_once


def test_what_a_library_imports_within_a_step_stays(given, undone):
    state = PythonState(given)
    F.imported_late = other
    assert state.change(within=True) == "torch.nn.functional.imported_late"
    state.restore()
    assert F.imported_late is other


def noise(rng):
    while True:
        yield torch.rand(1, generator=rng)


def passes(data):
    while True:
        yield from data


@pytest.mark.parametrize(
    ("made", "moving"),
    [(lambda: noise(torch.Generator()), "rng"), (lambda: passes([1, 2]), "from")],
)
def test_a_generator_that_stands_where_it_stood_has_moved_by_what_it_holds(given, made, moving):
    given.task.endless = made()
    next(given.task.endless)
    state = PythonState(given)
    assert state.change(within=True) is None
    next(given.task.endless)
    assert state.change() is None and state.change(within=True) == f"Trained.endless.{moving}"


def test_an_iterator_that_hides_its_position_is_always_a_change(given):
    given.task.hidden = map(lambda x, y: x + y, [1], [2])
    state = PythonState(given)
    assert state.change() is None and state.change(within=True) == "Trained.hidden"


def test_state_that_a_backend_or_a_thread_moves_is_not_looked_into(given):
    import logging
    import threading

    import tpukit.hardware.backend  # noqa: F401

    given.task.log, given.task.lock = logging.getLogger("tpukit.test"), threading.Event()
    given.task.ops = given.model[0].ops = type(
        "Ops", (), {"__module__": "tpukit.hardware.backend"}
    )()
    state = PythonState(given)
    given.task.lock.set()
    given.task.ops.steps, given.task.log.level = 3, 10
    assert state.change(within=True) is None


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
