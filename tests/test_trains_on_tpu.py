"""`tpukit.testing.trains_on_tpu` and `pytest --tpu`; see docs/testing.md."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from tpukit import testing
from tpukit.errors import ConfigError
from tpukit.probe import parity
from tpukit.probe.parity import Parity
from tpukit.testing import GivenModel, trains_on_tpu
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner, seed_everything
from tpukit.train.task import PlanSettings

IMAGES = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ONE = torch.ones(4)
pytestmark = [pytest.mark.xla, pytest.mark.plan]


class Net(nn.Module):
    """Random in all the ways that a step's comparison has to take out; its last layer is called by
    a closure, which a deep copy shares, and it holds what torch cannot pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1)
        )
        head = self.head = nn.Linear(8 * 36, 4)
        self.attention = nn.MultiheadAttention(64, 2, dropout=0.5, batch_first=True)
        self.logits = lambda found: head(found * 1.0)
        self.kinds = [SDPBackend.MATH]

    def features(self, images: Tensor) -> Tensor:
        kept = images.new_empty(len(images), 1, 1, 1).bernoulli_(0.9)
        tokens = nn.functional.gumbel_softmax(images.flatten(2))
        seen, _ = self.attention(tokens, tokens, tokens)
        seen = seen * torch.bernoulli(seen.detach().sigmoid())
        images = images + seen.view_as(images)
        return self.body((images + 0.1 * torch.randn_like(images)) * kept)

    def forward(self, images: Tensor, scales: dict[str, Any]) -> Tensor:
        return self.logits(self.features(images)) * scales["all"] * scales["each"]


class Small(nn.Module):
    """Compiles in a tenth of the time of `Net`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))


class ReadsValues(Small):
    def forward(self, images: Tensor) -> Tensor:
        found = super().forward(images)
        return found * 2 if found.mean().item() > 0 else found  # read here


class ChoosesRows(Small):
    def forward(self, images: Tensor) -> Tensor:
        found = super().forward(images)
        return found[found > 0]  # chosen here


class Counts(Small):
    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(images) + images[:, 0, 0, : 1 + self.calls % 4].sum()  # cut here


class GrowsTexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(3, 3), 0

    def forward(self, values: Tensor) -> Tensor:
        self.step += 1
        padded = nn.functional.pad(values, (0, 0, 0, self.step))  # padded here
        return self.layer(padded)


class AsksForTheDevice(Small):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * (2 if images.is_cpu else 1)


class Wide(nn.Module):
    """Keeps (rows, 512, 1024) after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

    def forward(self, values: Tensor) -> Tensor:
        found = values[:, None].expand(-1, 512, -1)
        for layer in self.layers:
            found = layer(found).sin()
        return found


def line_of(comment: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n, text in enumerate(lines, 1) if text.endswith(comment))}"


def failure(model: nn.Module, inputs: Tensor = IMAGES, batch: int = 8) -> str:
    with pytest.raises(AssertionError) as raised:
        trains_on_tpu(model, inputs, batch=batch)
    lines = str(raised.value).splitlines()
    assert lines[0] == (f"{type(model).__name__} does not train on a v5e-1 as it does on a CPU:")
    assert len(lines) == 2, lines
    return lines[1]


@pytest.mark.slow
def test_a_model_that_trains_does():
    inputs = {"images": IMAGES[:3], "scales": {"all": 0.5, "each": torch.rand(3, 1)}}
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trains_on_tpu(
        model, inputs, loss=lambda output, given: (output + given["scales"]["all"]).square().mean(1)
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "inputs", "said", "place"),
    [
        pytest.param(ReadsValues, IMAGES, "aten::_local_scalar_dense would leave the TPU",
                     "# read here", marks=SLOW),
        pytest.param(Counts, IMAGES, "2 programs were compiled after the second step",
                     "# cut here", marks=SLOW),
        pytest.param(ChoosesRows, IMAGES, "aten::nonzero would leave", "# chosen here", marks=SLOW),
        pytest.param(GrowsTexts, torch.randn(8, 4, 3), "compiled after the second step",
                     "# padded here", marks=SLOW),
        pytest.param(AsksForTheDevice, IMAGES, "a step differs from the CPU's: loss by", None,
                     marks=SLOW),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line_or_tensor(model, inputs, said, place):
    found = failure(model(), inputs)
    assert said in found
    assert (line_of(place) if place else "most in gradients of `") in found


def test_a_place_that_is_not_found_is_not_lost_silently(monkeypatch):
    answers = [
        (Parity({"loss": 0.0}, None, ("gradients", "a"), (), 3), None),
        (None, "its process ended with exit code -9"),
    ]
    monkeypatch.setattr(testing, "in_process", lambda *_: answers.pop(0))
    (found,) = testing._equals(None, 8, 1e-4, 60.0, known=False)
    assert found == (
        "3 programs were compiled after the second step. Where they differ is not known:"
        " its process ended with exit code -9."
    )


class CountsOtherwise(Small):
    """Its mean is wrong, but only a mask's numbers are large."""

    def __init__(self, factor: float, hidden: float) -> None:
        super().__init__()
        self.factor = factor
        self.register_buffer("mask", torch.full((3, 3), hidden).triu(1))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, images: Tensor) -> Tensor:
        found = super().forward(images)
        self.mean += self.factor * found.detach().mean(0)
        return found


@pytest.mark.parametrize("hidden", [-1e9, -torch.inf])
def test_a_buffer_that_differs_is_seen_beside_a_mask(hidden):
    states = []
    for factor in (1.0, 1.0 + 1e-6, 1.1):
        seed_everything(0)
        task, backend = GivenModel(CountsOtherwise(factor, hidden), IMAGES, None), FakeBackend()
        learner = build_learner(task, backend, task.build_model(backend), TrainConfig())
        before = parity._floating_buffers(learner)
        learner.train_step(task.probe_batches(PlanSettings(8, 8, 1, 0)), 1e-3)
        states.append(parity._state(learner, before)["buffers"])
    right, close, wrong = states
    assert parity.relative_error(close, right) < testing.TOLERANCE
    assert parity.relative_error(wrong, right) == pytest.approx(0.1)


def test_a_small_tensor_that_is_wrong_is_seen_beside_a_large_one_but_not_its_rounding_errors():
    right = {"large": torch.full((100,), 1e3), "small": torch.full((4,), 0.5), "none": ONE * 0}
    wrong = {**right, "small": right["small"] * 1.1}
    rounded = {**right, "none": ONE * 1e-3}  # the others' rounding errors
    assert parity.relative_error(wrong, right) == pytest.approx(0.1 / (1e-2 * 1e4), rel=1e-3)
    assert parity.relative_error(rounded, right) < testing.TOLERANCE
    grown = {**rounded, "large": right["large"] * 1.1}
    states = [{"gradients": tensors, "buffers": {}} for tensors in (grown, right)]
    assert parity._worst(*states) == ("gradients", "large")


def test_nan_is_as_far_from_a_number_as_can_be_and_equal_to_itself():
    one, other = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])
    assert parity.relative_error({"a": one}, {"a": other}) == torch.inf
    assert parity.relative_error({"a": one}, {"a": one}) == 0.0


@pytest.mark.slow
def test_weights_of_half_precision_train_and_a_loss_of_nan_is_no_proof():
    trains_on_tpu(Small().bfloat16(), IMAGES.bfloat16())
    assert "ConfigError: the loss is nan on the CPU. Give" in failure(Small(), IMAGES * torch.nan)


def test_a_killed_process_is_this_machine_s_lack_of_memory():
    _, error = testing.in_process(lambda: os.kill(os.getpid(), signal.SIGKILL), (), 60.0, "fork")
    assert error == (
        "its process ended by SIGKILL: this machine's memory is too small; fewer `devices` need"
        " less"
    )


class Force(nn.Sequential):
    """The gradient of an energy."""

    def forward(self, places: Tensor) -> Tensor:
        places = places.detach().requires_grad_()
        return torch.autograd.grad(super().forward(places).sum(), places, create_graph=True)[0]


def test_the_convolutions_of_a_sample_are_counted():
    for kind, known in ((nn.Sequential, True), (Force, False)):
        model = kind(nn.Conv2d(3, 8, 3, padding=1), nn.Linear(16, 16))
        task = testing.GivenModel(model, torch.zeros(5, 3, 16, 16), None)
        assert testing._convolutions(task) == known * 2 * 8 * 3 * 9 * 16 * 16


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_both_sizes():
    found = failure(Wide(), torch.randn(8, 1024), batch=4096)
    assert "batch 4096 does not fit a v5e-1: " in found
    assert "of 15.75 GiB" in found


def test_an_unknown_target_and_what_cannot_be_sent_are_errors_in_two_lines(tmp_path):
    with pytest.raises(ConfigError, match="unknown target 'v5f-1'"):
        trains_on_tpu(Net(), IMAGES, target="v5f-1")
    with pytest.raises(ConfigError, match="batch=0, devices=8: both must be at least 1"):
        trains_on_tpu(Net(), IMAGES, batch=0)
    model = Net()
    model.log = (tmp_path / "log").open("w")
    with model.log, pytest.raises(ConfigError, match="cannot be sent"):
        trains_on_tpu(model, IMAGES)


def test_marked_tests_run_with_the_option_alone(tmp_path):
    (tmp_path / "test_own.py").write_text(
        "import pytest\n\n@pytest.mark.tpu\ndef test_one(): ...\n\ndef test_two(): ...\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tpukit.pytest_plugin",
               "--strict-markers", "-p", "no:cacheprovider"]  # fmt: skip
    for options, expected in (([], "1 passed, 1 skipped"), (["--tpu"], "2 passed")):
        run = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert expected in run.stdout, run.stdout + run.stderr
