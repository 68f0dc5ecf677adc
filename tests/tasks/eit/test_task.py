"""The EIT task: its draws, its loss, its settings."""

import copy

import numpy as np
import pytest
import torch
from ema_pytorch import EMA
from fake_backend import FakeBackend

from tpukit.errors import CheckpointError, ConfigError
from tpukit.hardware.backend import AdamSettings
from tpukit.tasks.eit.data.dataset import Normalisation
from tpukit.tasks.eit.model import network
from tpukit.tasks.eit.task import NORMALISATION_FILE, EITTask
from tpukit.train.config import resolve
from tpukit.train.learner import build_learner
from tpukit.train.schedule import learning_rate
from tpukit.train.task import PlanSettings, sample_rng, stack_samples


@pytest.fixture
def task():
    return EITTask(size="tiny")


@pytest.fixture
def sample():
    rng = np.random.default_rng(4)
    return {
        "voltages": rng.standard_normal((1, 16, 16), dtype=np.float32),
        "image": rng.uniform(-1, 1, (1, 128, 128)).astype(np.float32),
    }


def test_draws_depend_on_their_key_alone(task, sample):
    first, again, other = (task.draw(sample, sample_rng(0, 1, i)) for i in (7, 7, 8))
    assert first["t"] == again["t"] and np.array_equal(first["noise"], again["noise"])
    assert not np.array_equal(first["noise"], other["noise"])


def test_times_are_uniform_over_the_process(task, sample):
    times = [task.draw(sample, sample_rng(0, 0, i))["t"] for i in range(400)]
    assert min(times) < 30 and max(times) > 970 and abs(np.mean(times) - 499.5) < 50


def test_loss_is_each_rows_squared_error_of_the_clean_image(task, sample):
    drawn = [task.draw(sample, sample_rng(0, 0, i)) for i in range(3)]
    batch = stack_samples(drawn, 4)
    seen = {}

    def model(noisy, t, maps):
        seen.update(noisy=noisy, t=t, maps=maps)
        return torch.zeros_like(noisy)

    losses = task.loss(model, batch)["loss"]
    expected = float((sample["image"].astype(np.float64) ** 2).mean())
    torch.testing.assert_close(losses, torch.full((4,), expected))
    kept = task.diffusion.kept[int(drawn[1]["t"])]
    noisy = np.sqrt(kept) * sample["image"] + np.sqrt(1 - kept) * drawn[1]["noise"]
    np.testing.assert_allclose(seen["noisy"][1], noisy, atol=1e-6)
    assert torch.equal(seen["maps"], batch["voltages"])


def test_probe_batches_are_of_the_shapes_of_training(task, sample):
    (example,) = task.probe_batches(PlanSettings(3, 3, 1, 0))
    real = stack_samples([task.draw(sample, sample_rng(0, 0, 0))], 3)
    assert {n: (v.shape, v.dtype) for n, v in example.items()} == {
        n: (v.shape, v.dtype) for n, v in real.items()
    }


def test_a_few_steps_learn_one_sample(task, sample):
    torch.manual_seed(0)
    backend = FakeBackend()
    model = task.build_model(backend)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-3)
    losses = []
    for step in range(12):
        batch = stack_samples([task.draw(sample, sample_rng(0, step, i)) for i in range(2)], 2)
        loss = task.loss(model, batch)["loss"].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_normalisation_goes_with_the_run(task):
    kept = Normalisation(np.arange(208, dtype=np.float32), np.ones(208, dtype=np.float32))
    other = task.restore({NORMALISATION_FILE: kept.to_bytes()})
    assert np.array_equal(other.normalisation.mean, kept.mean)
    assert (other.settings, task.normalisation) == (task.settings, None)
    for artifacts, told in (({}, NORMALISATION_FILE), ({NORMALISATION_FILE: b"broken"}, "read")):
        with pytest.raises(CheckpointError, match=told):
            task.restore(artifacts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"size": "publishd"}, "Did you mean published"), ({"sampling_steps": 0}, "[1, 1000]")],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ConfigError) as caught:
        EITTask(**settings)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_published_training_is_the_default_of_the_published_size():
    published = EITTask(size="published")
    recipe = published.defaults
    assert (recipe.lr, recipe.clip_norm, recipe.ema_decay, recipe.ema_every, recipe.ema_warmup) == (
        1e-5, 1.0, 0.995, 10, 100,
    )  # fmt: skip
    assert (recipe.max_steps, recipe.schedule, recipe.weight_decay) == (200_000, "constant", 0.0)
    assert recipe.adam == AdamSettings((0.9, 0.999))
    assert published.identity()["loss"] == "l1"
    assert EITTask(size="tiny").identity() != EITTask(size="small").identity()


def test_an_older_run_goes_on_with_the_loss_it_was_trained_with():
    """Checkpoints that do not record a loss were trained with l2."""
    before = {"size": "published"}
    assert EITTask().as_recorded(before).identity() == before
    assert EITTask(loss="l1").as_recorded(before).identity() != before
    now = EITTask().identity()
    assert EITTask().as_recorded(now).identity() == now


def test_the_refinement_is_part_of_a_run_and_of_the_smaller_sizes():
    before, now = {"size": "tiny"}, EITTask(size="tiny").identity()
    assert now["refinement"]
    assert EITTask(size="tiny").as_recorded(before).identity() == before
    assert EITTask(size="tiny").as_recorded(now).identity() == now
    assert EITTask(size="tiny", refinement=True).as_recorded(before).identity() != before
    assert EITTask(size="tiny", refinement=False).settings.network.refinement_channels == 0
    with pytest.raises(ConfigError, match="has no refinement"):
        EITTask(size="published", refinement=True)


class PublishedLoop:
    """The public code's training, written plainly: one process, one micro-batch, fp32.

    EMA by the public package at the version that the code pins.
    """

    def __init__(self, model):
        self.model = model
        self.ema = EMA(model, beta=0.995, update_every=10)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
        self.kept = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))

    def train(self, batch):
        kept = torch.as_tensor(self.kept[batch["t"].long()]).float().view(-1, 1, 1, 1)
        noisy = kept.sqrt() * batch["image"] + (1 - kept).sqrt() * batch["noise"]
        loss = (self.model(noisy, batch["t"], batch["voltages"]) - batch["image"]).abs().mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.ema.update()
        return loss.item()


@pytest.mark.slow
def test_the_published_size_trains_by_the_published_recipe(monkeypatch):
    """Losses, weights and EMA weights after 112 steps of a narrow network."""
    narrow = network.NetworkConfig(width=16, heads=2, levels=1, patch=4, image_side=32)
    monkeypatch.setitem(network.SIZES, "published", narrow)
    task, backend = EITTask(size="published"), FakeBackend()
    config = resolve({n: getattr(task.defaults, n) for n in (
        "global_batch_size", "max_steps", "lr", "schedule", "clip_norm", "ema_decay", "ema_every",
        "ema_warmup", "ema_updates", "weight_decay")})  # fmt: skip
    torch.manual_seed(0)
    model = task.build_model(backend)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    plain = PublishedLoop(copy.deepcopy(model))
    learner = build_learner(task, backend, model, config)
    batches = [task.probe_batches(PlanSettings(rows, rows, 1, 0))[0] for rows in (2, 1)]
    for step in range(112):  # the EMA begins after 100
        batch = batches[step % 2]
        learner.train_step([batch], learning_rate(step, 200_000, config))
        expected = plain.train(batch)
        assert learner.read_metrics().means["loss"] == pytest.approx(expected, rel=1e-4)
    trained = dict(model.named_parameters())
    for name, value in plain.model.named_parameters():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=5e-6)
    averaged = plain.ema.ema_model.state_dict()
    for name, value in learner.ema.weights.items():
        torch.testing.assert_close(value, averaged[name], rtol=0, atol=5e-6)
