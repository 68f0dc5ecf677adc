"""Optimizers and schedules of a task's own, on the CPU: the arithmetic, the state, the refusals."""

import json
import math
import random
from contextlib import nullcontext as ok

import pytest
import torch
from fake_backend import FakeBackend
from tiny_task import Tiny
from torch.nn.utils.clip_grad import clip_grad_norm_  # torch_xla patches `torch.nn.utils`

from tpukit.errors import ConfigError, UsageError
from tpukit.hardware.collectives import Collectives
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import CpuDevice
from tpukit.hardware.eager.distributed import SingleProcess
from tpukit.hardware.eager.grad_scaling import PlainUpdate
from tpukit.hardware.optimizers import MasterAdamW, require_whole_matrices
from tpukit.train.checkpoint import PlainState, list_checkpoints
from tpukit.train.config import TrainConfig, build
from tpukit.train.learner import build_learner, seed_everything
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder, open_run
from tpukit.train.run_log import read_metrics
from tpukit.train.task import ParameterGroup, PlanSettings, stack_samples

OPTIM = torch.optim
RATE = 2e-3
MAKERS = {
    "SGD": lambda groups: OPTIM.SGD(groups, RATE, momentum=0.9, nesterov=True),
    "Adafactor": lambda groups: OPTIM.Adafactor(groups, RATE),
}


class Optimizing(Tiny):
    """The tiny task with an optimizer of its own."""

    name = "optimizing"
    make = staticmethod(MAKERS["SGD"])

    def build_optimizer(self, groups, settings):
        return self.make(groups)


def optimizing(make):
    task = Optimizing()
    task.make = make
    return task


@pytest.fixture
def train(tmp_path):
    """Runs a task in the run folder, and again; what it printed is in `lines`."""

    def run(task, folder="run", **config):
        lines: list[str] = []
        settings = {"max_steps": 4, "global_batch_size": 16, "log_every": 2, "ckpt_every": 2,
                    "num_workers": 0, "lr": RATE, **config}  # fmt: skip
        request = TrainingRequest(task, TrainConfig(**settings), RunFolder(tmp_path / folder))
        result = train_run(request, FakeBackend(), lines.append)
        return request.folder, result, lines

    return run


def learner_of(task, **config):
    seed_everything(0)
    return build_learner(task, FakeBackend(), task.build_model(None), TrainConfig(**config))


def batch_of(task, step):
    [batch] = task.probe_batches(PlanSettings(4, 4, 1, 0))
    batch["x"] += torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return batch


def parameters(learner):
    return [p.detach().clone() for p in learner.model.parameters()]


class Halved(Optimizing):
    """The same network with weights in bf16."""

    make = staticmethod(lambda groups: MasterAdamW(groups, RATE))

    def build_model(self, ops):
        return super().build_model(ops).bfloat16()

    def loss(self, model, batch):
        return super().loss(model, {**batch, "x": batch["x"].bfloat16()})


def test_weights_in_bf16_are_rounded_from_fp32_ones(train):
    """Plain AdamW over fp32 weights, rounded by hand before each pass; a resumed run too."""
    task = Halved()
    learner = learner_of(task, lr=RATE, clip_norm=0.0, weight_decay=0.1)
    assert all(group["fused"] for group in learner.optimizer.param_groups)
    seed_everything(0)
    model = task.build_model(None)
    masters = [p.detach().float() for p in model.parameters()]
    groups = [{"params": [m for m in masters if m.ndim > 1], "weight_decay": 0.1},
              {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = OPTIM.AdamW(groups, RATE)
    for step in range(20):
        batch = batch_of(task, step)
        learner.train_step([batch], RATE)
        model.zero_grad()
        task.loss(model, batch)["loss"].sum().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = (parameter.grad / 4).float()
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)
    kept = learner.optimizer_state.tensors()
    for (name, parameter), master in zip(model.named_parameters(), masters, strict=True):
        assert torch.equal(learner.model.get_parameter(name), parameter.detach())
        torch.testing.assert_close(kept[f"master/{name}"], master, rtol=1e-6, atol=1e-8)
    without_ema = {"ema_decay": None}
    whole, *_ = train(task, "whole", **without_ema)
    train(task, max_steps=2, **without_ema)
    resumed, *_ = train(task, **without_ema)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (f.checkpoints / "step-00000004" / file for f in (whole, resumed))
        assert one.read_bytes() == other.read_bytes(), file
    with pytest.raises(ConfigError, match="average in half precision"):
        train(task, "ema", ema_decay=0.9)
    scaling = FakeBackend()
    scaling.precision = "fp16"
    with pytest.raises(ConfigError, match="not scaled"):
        build_learner(task, scaling, task.build_model(None), TrainConfig())


class Counting(OPTIM.SGD):
    """Keeps what torch's own do not: a number a parameter, and an option that changes."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / (state["count"] + group["seen"]))
        return super().step()


def test_numbers_and_changed_options_are_state_too(train):
    def make(groups):
        return Counting(groups, RATE)

    whole, *_ = train(optimizing(make), "whole")
    train(optimizing(make), max_steps=2)
    resumed, *_ = train(optimizing(make))
    states = [
        open_run(folder.path, print).checkpoint.state.optimizer for folder in (whole, resumed)
    ]
    assert states[0] == states[1]
    assert states[0]["values"]["group/0/seen"] == 4
    assert states[0]["values"]["count/0.weight"] == 4
    weights = [open_run(folder.path, print).weights()["0.weight"] for folder in (whole, resumed)]
    assert torch.equal(*weights)


class Numbering(OPTIM.SGD):
    """Keeps a number, and another one in a list, as attributes."""

    def __init__(self, groups):
        super().__init__(groups, RATE)
        self.count, self.seen = 0, []

    def step(self, closure=None):
        self.count += 1
        self.seen.append(self.count)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad.mul_(1 / self.count)
        return super().step()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_numbers_as_attributes_are_state_too_and_a_list_is_named(train, is_wrapped):
    def make(groups):
        return Wrapping(Numbering(groups)) if is_wrapped else Numbering(groups)

    whole, _, lines = train(optimizing(make), "whole")
    train(optimizing(make), max_steps=2)
    resumed, *_ = train(optimizing(make))
    runs = [open_run(folder.path, print) for folder in (whole, resumed)]
    states = [run.checkpoint.state.optimizer for run in runs]
    assert states[0] == states[1]
    assert states[0]["attributes"] == [{}] * is_wrapped + [{"count": 4}]
    assert torch.equal(*(run.weights()["0.weight"] for run in runs))
    assert any("each step changes Numbering.seen, which no checkpoint" in line for line in lines)


class Drawing(OPTIM.SGD):
    """Keeps an object, which a checkpoint cannot hold."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["draws"] = random.Random(0)
        return super().step()


def scheduled(groups):
    optimizer = OPTIM.SGD(groups, RATE)
    OPTIM.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=4)
    return optimizer


class Rateless(torch.optim.Optimizer):
    """Finds its rate itself."""

    def __init__(self, groups):
        super().__init__(groups, {})


def lbfgs(groups):
    return OPTIM.LBFGS([p for group in groups for p in group["params"]])


REFUSED = {
    "closure": (lbfgs, "LBFGS.*closure"),
    "sparse": (lambda groups: OPTIM.SparseAdam(groups[0]["params"]), "SparseAdam.*sparse"),
    "rate": (Rateless, "Rateless.*`lr`"),
    "list": (lambda groups: [MAKERS["SGD"](groups)] * 2, "one loss"),
    "foreign": (
        lambda groups: OPTIM.SGD([torch.nn.Parameter(torch.ones(2))], RATE),
        "not the model's",
    ),
    "decay": (
        lambda groups: OPTIM.AdamW(groups, RATE, weight_decay=0.3),
        "weight_decay=0.3 of AdamW has no effect",
    ),
    "scheduler": (scheduled, "has a scheduler of torch for SGD"),
    "object": (lambda groups: Drawing(groups, RATE), "Drawing keeps a Random as draws/0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stepped_or_kept_is_refused_with_the_reason(train, name):
    make, reason = REFUSED[name]
    with pytest.raises(UsageError, match=reason) as caught:
        train(optimizing(make))
    assert caught.value.hint


def test_a_scheduler_that_the_task_keeps_is_refused(train):
    """This one leaves the optimizer's `step` alone."""
    task = optimizing(MAKERS["SGD"])
    task.kept = OPTIM.lr_scheduler.ReduceLROnPlateau(OPTIM.SGD(torch.nn.Linear(2, 2).parameters()))
    with pytest.raises(UsageError, match="has a scheduler of torch for SGD"):
        train(task)


class Sharpness(OPTIM.SGD):
    """As SAM's public implementation begins its step."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "it was not provided"
        closure()


class Optional(OPTIM.SGD):
    """Steps at perturbed weights where it is given a closure, and as SGD without."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            self.move(0.05)
            with torch.enable_grad():
                closure()
            self.move(-0.05)
        return super().step()

    def move(self, rate):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=rate)


class Returning(Optional):
    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            return super().step()
        self.move(0.05)
        with torch.enable_grad():
            loss = closure()
        self.move(-0.05)
        return loss


class Inheriting(Optional):
    """Hands its closure to the step above."""

    def step(self, closure=None):
        return super().step(closure)


class Outer(Optional):
    """Steps another optimizer, and hands its closure to a method."""

    def __init__(self, groups, rate):
        super().__init__(groups, rate)
        self.base = OPTIM.SGD(self.param_groups, rate)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        return self.base.step() if closure is None else self.evaluate(closure)

    @torch.no_grad()
    def evaluate(self, loss):
        self.move(0.05)
        with torch.enable_grad():
            loss()
        self.move(-0.05)
        return self.base.step()


class Twice(Optional):
    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        super().step()
        if closure:
            closure()
        return loss


class Standard(OPTIM.SGD):
    """Evaluates its closure as torch's own do."""

    @torch.no_grad()
    def step(self, closure=None):
        self._cuda_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


class Handing(OPTIM.SGD):
    """Hands its closure on."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.sign_()

        def evaluate():
            return closure()

        return super().step(evaluate if closure is not None else None)


class Wrapping:
    """Steps another optimizer, and is none by its class."""

    def __init__(self, base):
        self.base = base
        self.step, self.zero_grad = base.step, base.zero_grad
        self.state_dict, self.load_state_dict = base.state_dict, base.load_state_dict
        self.param_groups, self.state = base.param_groups, base.state


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: Sharpness(groups, RATE),
        lambda groups: Wrapping(Sharpness(groups, RATE)),
        lambda groups: Wrapping(lbfgs(groups)),
        lambda groups: Optional(groups, RATE),
        lambda groups: Returning(groups, RATE),
        lambda groups: Twice(groups, RATE),
        lambda groups: Inheriting(groups, RATE),
        lambda groups: Outer(groups, RATE),
    ],
    ids=["assertion", "wrapped", "argument", "within", "after", "twice", "above", "method"],
)
def test_what_needs_a_closure_is_refused_before_the_first_step(make):
    with pytest.raises(UsageError, match="evaluates the loss again through a closure") as caught:
        learner_of(optimizing(make))
    assert "steps from gradients" in caught.value.hint


@pytest.mark.parametrize("kind", [Standard, Handing])
def test_a_closure_that_may_be_missing_is_left_out(kind):
    learner = learner_of(optimizing(lambda groups: kind(groups, RATE)))
    before = parameters(learner)
    learner.train_step([batch_of(learner.task, 0)], RATE)
    assert not any(map(torch.equal, before, parameters(learner)))


@pytest.mark.parametrize("key", ["lr", "lr_scale"])
@pytest.mark.parametrize("place", ["after_step", "on_log"])
def test_a_rate_that_the_task_sets_is_refused_and_a_factor_counts(place, key):
    rates = []

    class Setting(Optimizing):
        def halve(self):
            for group in self.optimizer.param_groups:
                rates.append(group["lr"])
                group[key] *= 0.5

    task = Setting()
    learner = learner_of(task, lr=RATE)
    task.optimizer = learner.optimizer
    if place == "after_step":
        Setting.after_step = lambda self, model: self.halve()
    refused = pytest.raises(UsageError, match=f"set the learning rate of SGD to {RATE / 2:g}")
    with refused if key == "lr" else ok():
        for step in range(3):
            learner.train_step([batch_of(task, step)], RATE)
            if place == "on_log":
                task.halve()
    if key == "lr_scale":
        assert rates[::2] == [RATE, RATE / 2, RATE / 4]


def test_a_hook_runs_once_a_step(train):
    calls = []

    def make(groups):
        optimizer = OPTIM.AdamW(groups, RATE, weight_decay=0.0)
        optimizer.register_step_post_hook(lambda *given: calls.append("after"))
        return optimizer

    train(optimizing(make))
    assert len(calls) == 4


def test_a_librarys_error_names_the_optimizer():
    """It takes gradients of gradients, which nothing says before its step."""
    library = pytest.importorskip("pytorch_optimizer")
    task = optimizing(lambda groups: library.AdaHessian(groups, RATE))
    device, alone = CpuDevice(), SingleProcess(lambda model: model)
    backend = EagerBackend(
        "cpu", device, "fp32", Collectives(), alone, PlainUpdate(), compiles=False
    )
    learner = build_learner(task, backend, task.build_model(None), TrainConfig(lr=RATE))
    with pytest.raises(UsageError, match=r"the optimizer AdaHessian raised RuntimeError.*its step"):
        learner.train_step([batch_of(task, 0)], RATE)


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "SGD"])
def test_shards_of_matrices_are_not_enough_for_some(name):
    if not hasattr(OPTIM, name):
        pytest.skip(f"this torch has no {name}")
    optimizer = getattr(OPTIM, name)([torch.nn.Parameter(torch.ones(2, 2))], RATE)
    refused = pytest.raises(UsageError, match=f"{name} needs whole matrices")
    with ok() if name == "SGD" else refused:
        require_whole_matrices(optimizer)


def test_another_optimizer_does_not_go_on_with_a_run(train):
    train(optimizing(MAKERS["SGD"]), max_steps=2)
    with pytest.raises(ConfigError, match="the optimizer SGD; it is Adafactor now") as caught:
        train(optimizing(MAKERS["Adafactor"]))
    assert caught.value.id == "changed-arithmetic"


def test_a_named_optimizer_is_part_of_the_arithmetic(train):
    train(Tiny(), max_steps=2, optimizer="sgd")
    with pytest.raises(ConfigError, match="optimizer was 'sgd', now 'lion'"):
        train(Tiny(), optimizer="lion")
    with pytest.raises(ConfigError, match="one of adamw, adam, sgd"):
        build(TrainConfig, {"optimizer": "sdg"})


def test_a_checkpoint_of_earlier_versions_is_read(train, monkeypatch):
    """It names no optimizer, neither in its identity nor beside the state, and one setting less."""
    from tpukit.train import run_state

    def as_before(identity, optimizer, **rest):
        known = {
            n: v for n, v in identity.items() if n not in ("optimizer", "momentum", "clip_norm")
        }
        return PlainState(optimizer={}, identity=known, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(run_state, "PlainState", as_before)
        folder, *_ = train(Tiny(), max_steps=2)
    state = json.loads((list_checkpoints(folder.checkpoints)[0] / "state.json").read_text())
    assert state["optimizer"] == {} and "optimizer" not in state["identity"]
    _, result, _ = train(Tiny())
    assert (result.resumed_from, result.steps) == (2, 4)


class Thawed(Optimizing):
    """Trains its first layer from the third step on; `starts` says how it begins."""

    def __init__(self, starts):
        super().__init__()
        self.starts, self.steps = starts, 0

    def build_model(self, ops):
        model = super().build_model(ops)
        model[0].requires_grad_(self.starts)
        return model

    def loss(self, model, batch):
        model[0].requires_grad_(self.steps >= 2)
        return super().loss(model, batch)

    def after_step(self, model):
        self.steps += 1


class Renewed(Optimizing):
    def after_step(self, model):
        model[0].weight = torch.nn.Parameter(model[0].weight.detach())


@pytest.mark.parametrize(
    ("task", "reason"),
    [(Thawed(False), "'0.weight' was frozen when training began, and is to be"),
     (Renewed(), "'0.weight' was not a parameter of the model when training began")],
    ids=["thawed", "renewed"],
)  # fmt: skip
def test_what_is_to_be_trained_later_must_be_known_from_the_start(train, task, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        train(task)
    assert "with requires_grad" in caught.value.hint


def test_a_layer_may_be_frozen_at_first(train):
    folder, *_ = train(Thawed(True))
    weights = open_run(folder.path, print).weights()["0.weight"]
    seed_everything(0)
    assert not torch.equal(weights, Thawed(True).build_model(None)[0].weight)


# -- weights to train with, and weights to evaluate -----------------------------------------------
FILES = ("model", "ema", "optimizer")


def schedule_free(name="AdamWScheduleFree"):
    library = pytest.importorskip("schedulefree")
    task = optimizing(lambda groups: getattr(library, name)(groups, RATE))
    task.noise = 0.0
    return task


def test_what_is_validated_and_saved_is_the_average_of_a_schedule_free_optimizer(train):
    task = schedule_free()
    folder, *_ = train(task, ema_decay=None)
    run = open_run(folder.path, print)
    trained, state = run.checkpoint.tensors("model"), run.checkpoint.tensors("optimizer")
    weights = run.weights()
    for name, weight in trained.items():
        average = weight.lerp(state[f"z/{name}"], 1 - 1 / 0.9)
        assert not torch.equal(weights[name], weight)
        torch.testing.assert_close(weights[name], average)
    model = task.build_model(None)
    model.load_state_dict(weights)
    data = task.datasets().valid
    rows = stack_samples([data[index] for index in range(len(data))], len(data))
    expected = task.loss(model, rows)["loss"].mean().item()
    [*_, last] = [row for row in read_metrics(folder) if row["kind"] == "valid"]
    assert last["valid_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_validation_and_saving_leave_a_schedule_free_optimizer_as_it_was(train, name):
    """There and back between its two views would be another weight in the last bits."""
    whole, *_ = train(schedule_free(name), "whole", ema_decay=None, ckpt_every=4)
    train(schedule_free(name), max_steps=2, ema_decay=None, ckpt_every=1)
    resumed, *_ = train(schedule_free(name), ema_decay=None, ckpt_every=1)
    for file in FILES:
        one, other = (
            f.checkpoints / "step-00000004" / f"{file}.safetensors" for f in (whole, resumed)
        )
        assert one.read_bytes() == other.read_bytes(), file


def test_two_averages_are_refused(train):
    with pytest.raises(ConfigError, match="AdamWScheduleFree keeps an average of its own"):
        train(schedule_free(), ema_decay=0.9)


# -- groups and rates ----------------------------------------------------------------------------
class Grouped(Tiny):
    """Layer-wise rates, and a layer that is frozen."""

    name = "grouped"

    def build_model(self, ops):
        model = super().build_model(ops)
        model[0].requires_grad_(False)
        return model

    def parameter_groups(self, model, weight_decay):
        layers = [[p for p in layer.parameters() if p.requires_grad] for layer in model]
        return [
            ParameterGroup(own, weight_decay, lr_scale=0.5**depth)
            for depth, own in enumerate(filter(None, reversed(layers)))
        ]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_groups_have_their_own_rates_and_frozen_layers_stay(optimizer):
    learner = learner_of(Grouped(), optimizer=optimizer, lr=RATE, clip_norm=0.0, weight_decay=0.0)
    before = parameters(learner)
    learner.train_step([batch_of(Grouped(), 0)], RATE)
    assert [group["lr"] for group in learner.optimizer.param_groups] == [RATE, RATE / 2]
    moved = [float((a - b).abs().max()) for a, b in zip(before, parameters(learner), strict=True)]
    assert moved[:2] == [0.0, 0.0] and all(moved[2:])
    if optimizer == "adamw":  # a first step is the rate in every direction
        assert max(moved[2:4]) == pytest.approx(RATE / 2, rel=1e-2)
        assert max(moved[4:]) == pytest.approx(RATE, rel=1e-2)
    assert not any(key.endswith("/0.weight") for key in learner.optimizer_state.tensors())


class Forgetful(Tiny):
    """Names the parameters of its last layer alone, and freezes its first."""

    def build_model(self, ops):
        model = super().build_model(ops)
        model[0].weight.requires_grad_(False)
        return model

    def parameter_groups(self, model, weight_decay):
        return [ParameterGroup(list(model[-1].parameters()), weight_decay)]


def test_parameters_without_a_group_are_named(train):
    _, _, lines = train(Forgetful())
    [warning] = [line for line in lines if "in no group" in line]
    assert "3 parameter(s)" in warning and ": 0.bias, 3.weight, 3.bias. " in warning
    _, _, lines = train(Grouped(), "grouped")
    assert not any("in no group" in line for line in lines)


def test_the_rates_that_an_optimizer_is_built_with_are_the_peaks():
    """As torch's schedulers have it: --lr 1e-3 does not override a rate that the task wrote."""
    task = optimizing(lambda groups: OPTIM.SGD([{**groups[0], "lr": 0.1}, groups[1]], lr=RATE))
    learner = learner_of(task, lr=RATE)
    learner.train_step([batch_of(task, 0)], RATE / 4)
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    assert rates == pytest.approx([0.1 / 4, RATE / 4])


def test_a_rate_that_is_a_tensor_is_each_groups_own():
    """torch gives all groups the one that an optimizer was built with."""
    found = []
    for lr in (RATE, torch.tensor(RATE)):
        task = optimizing(lambda groups, lr=lr: OPTIM.SGD(groups, lr=lr))
        task.parameter_groups = lambda model, decay: [
            ParameterGroup(model[0].parameters(), lr_scale=0.1),
            ParameterGroup(model[-1].parameters()),
        ]
        learner = learner_of(task, lr=RATE)
        learner.train_step([batch_of(task, 0)], RATE)
        found.append(parameters(learner))
    assert all(map(torch.equal, *found))


class Tied(Tiny):
    """Two layers of one weight, whose parameters are listed layer by layer."""

    together = True

    def build_model(self, ops):
        model = super().build_model(ops)
        model.insert(0, torch.nn.Linear(8, 8))
        model.insert(0, torch.nn.Linear(8, 8))
        model[0].weight = model[1].weight
        return model

    def parameter_groups(self, model, weight_decay):
        parts = [list(part.parameters()) for part in (model[0], model[1], model[2:])]
        parts = [[p for part in parts for p in part]] if self.together else parts
        return [ParameterGroup(part, weight_decay) for part in parts]


def test_a_tied_weight_is_stepped_once_and_is_in_one_group(train):
    task, found = Tied(), []
    for groups in (task.parameter_groups, Tiny().parameter_groups):
        task.parameter_groups = groups
        learner = learner_of(task, lr=RATE, optimizer="sgd", weight_decay=0.0)
        learner.train_step([batch_of(task, 0)], RATE)
        found.append(parameters(learner))
    torch.testing.assert_close(*found)
    task = Tied()
    task.together = False
    with pytest.raises(UsageError, match=r"parameter_groups .* has '0.weight' in 2 groups"):
        train(task)


class Weighing(Tiny):
    """Learns the weight of its loss in a criterion, which is no part of the model; the network
    beside it is not trained."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.criterion = torch.nn.Linear(1, 1)
        self.others = [torch.nn.Linear(8, 8)]

    def loss(self, model, batch):
        with torch.no_grad():
            batch = {**batch, "x": self.others[0](batch["x"])}
        found = super().loss(model, batch)
        return {"loss": self.criterion(found["loss"][:, None])[:, 0]}


def test_parameters_outside_of_the_model_are_named(train):
    _, _, lines = train(Weighing())
    [warning] = [line for line in lines if "no part of the model" in line]
    assert warning.startswith("Warning: Weighing.criterion got a gradient")


class Sparse(Tiny):
    """An embedding by torch's function."""

    def build_model(self, ops):
        model = super().build_model(ops)
        model.table = torch.nn.Parameter(torch.ones(3, 8))
        return model

    def loss(self, model, batch):
        words = torch.zeros(len(batch["x"]), dtype=torch.long)
        x = batch["x"] + torch.nn.functional.embedding(words, model.table, sparse=True)
        return super().loss(model, {**batch, "x": x})


def test_a_sparse_gradient_is_named(train):
    with pytest.raises(UsageError, match="the gradient of 'table' is sparse"):
        train(Sparse())


class Spectral(Tiny):
    """Complex weights, as Fourier neural operators have them."""

    def build_model(self, ops):
        model = super().build_model(ops)
        model.spectral = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64) * (1 + 1j))
        return model

    def loss(self, model, batch):
        found = torch.fft.fft(model(batch["x"])) @ model.spectral
        return {"loss": (found.real - batch["y"]).square().mean(1)}


def test_complex_weights_learn_as_in_torch():
    task = Spectral(noise=0.0)
    learner = learner_of(task, lr=RATE, ema_decay=None, weight_decay=0.0, clip_norm=0.1)
    model = task.build_model(None)
    model.load_state_dict({n: t.clone() for n, t in learner.model_tensors().items()})
    peer = OPTIM.AdamW(model.parameters(), RATE, weight_decay=0.0)
    for step in range(3):
        batch = batch_of(task, step)
        learner.train_step([batch], RATE)
        peer.zero_grad()
        task.loss(model, batch)["loss"].mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        peer.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(learner.model_tensors()[name], weight)


class Sawtooth(Tiny):
    """A schedule of its own."""

    name = "sawtooth"

    def learning_rate(self, step, total_steps, config):
        return config.lr * (1 + step % 3)


def test_a_task_has_its_own_schedule(train):
    folder, *_ = train(Sawtooth(), log_every=1)
    rates = [row["lr"] for row in read_metrics(folder) if row["kind"] == "train"]
    assert rates == pytest.approx([RATE, 2 * RATE, 3 * RATE, RATE])


def test_a_rate_that_is_not_a_number_is_named(train):
    class Broken(Tiny):
        def learning_rate(self, step, total_steps, config):
            return math.nan if step == 1 else config.lr

    with pytest.raises(UsageError, match=r"Broken\.learning_rate gave nan for step 1"):
        train(Broken())


# -- two networks ----------------------------------------------------------------------------------
class Adversarial(Tiny):
    """A generator and a discriminator, stepped together: each loss reaches its own network."""

    name = "adversarial"

    def build_model(self, ops):
        return torch.nn.ModuleDict({
            "generator": torch.nn.Linear(8, 2), "discriminator": torch.nn.Linear(2, 1),
        })  # fmt: skip

    def parameter_groups(self, model, weight_decay):
        return [
            ParameterGroup(list(model["generator"].parameters())),
            ParameterGroup(list(model["discriminator"].parameters()), lr_scale=4.0),
        ]

    def losses(self, model, batch):
        critic = model["discriminator"]
        fixed = {name: value.detach() for name, value in critic.named_parameters()}
        made = model["generator"](batch["x"])
        fooled = torch.func.functional_call(critic, fixed, (made,))
        told = torch.nn.functional.softplus
        caught = told(-critic(batch["y"])) + told(critic(made.detach()))
        return told(-fooled)[:, 0], caught[:, 0]

    def loss(self, model, batch):
        generator, discriminator = self.losses(model, batch)
        return {"loss": generator + discriminator, "generator": generator}


def test_two_networks_learn_from_their_own_losses():
    """The documented way of a GAN: the sum's gradient is each loss' own for its network."""
    task = Adversarial()
    learner = learner_of(task, optimizer="sgd", momentum=0.0, lr=RATE, clip_norm=0.0)
    seed_everything(0)
    model, batch = task.build_model(None), batch_of(task, 0)
    generator, discriminator = task.losses(model, batch)
    own = [
        torch.autograd.grad(loss.mean(), list(model[name].parameters()), retain_graph=True)
        for loss, name in ((generator, "generator"), (discriminator, "discriminator"))
    ]
    learner.train_step([batch], RATE)
    scales = [RATE] * 2 + [4 * RATE] * 2
    expected = [
        parameter.detach() - rate * gradient
        for parameter, rate, gradient in zip(
            model.parameters(), scales, [*own[0], *own[1]], strict=True
        )
    ]
    for found, wanted in zip(parameters(learner), expected, strict=True):
        torch.testing.assert_close(found, wanted)
