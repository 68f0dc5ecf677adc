"""The EIT task: its draws, its loss, its settings."""

import numpy as np
import pytest
import torch

from tpukit.errors import CheckpointError, ConfigError
from tpukit.hardware.fake import FakeBackend
from tpukit.tasks.eit.data.normalisation import Normalisation
from tpukit.tasks.eit.task import NORMALISATION_FILE, EITTask
from tpukit.train.task import sample_rng, stack_samples


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


def test_example_batches_are_of_the_shapes_of_training(task, sample):
    (example,) = task.example_batches(3)
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
    for step in range(30):
        batch = stack_samples([task.draw(sample, sample_rng(0, step, i)) for i in range(4)], 4)
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
    assert (other.config, task.normalisation) == (task.config, None)
    with pytest.raises(CheckpointError, match=NORMALISATION_FILE):
        task.restore({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"size": "publishd"}, "Did you mean published"), ({"sampling_steps": 0}, "1..1000")],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ConfigError) as caught:
        EITTask(**settings)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_published_training_is_the_default_of_the_published_size():
    published = EITTask().defaults
    assert (published.lr, published.clip_norm, published.ema_decay, published.ema_every) == (
        1e-5, 1.0, 0.995, 10,
    )  # fmt: skip
    assert EITTask(size="published-reference").defaults.lr == published.lr
    assert EITTask(size="tiny").identity() != EITTask(size="small").identity()
