"""The process' tables and the sampler against their definitions, written step by step."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from torch import nn

from tpukit.tasks.eit.data.voltages import SYMMETRIES
from tpukit.tasks.eit.model.diffusion import (
    Diffusion,
    Draw,
    Sampler,
    View,
    sampling_noise,
)

SIDE = 8


class Predictor(nn.Module):
    """Stands for the network: a known function of all its inputs."""

    def forward(self, images, t, maps):
        return torch.tanh(
            images * 0.3 + maps.mean((2, 3), keepdim=True) + t.view(-1, 1, 1, 1) / 1e3
        )


@pytest.fixture
def diffusion():
    return Diffusion()


@pytest.fixture
def maps():
    return np.random.default_rng(0).standard_normal((3, 1, 16, 16)).astype(np.float32)


def ddim(predict, noise, kept, times, eta):
    """DDIM (Song et al., 2021, equation 12) in float64, one image."""
    image = noise[0]
    for number, (now, after) in enumerate(pairwise(times)):
        clean = predict(image, now)
        if after < 0:
            return clean
        a, b = kept[now], kept[after]
        estimated = (image - np.sqrt(a) * clean) / np.sqrt(1 - a)
        sigma = eta * np.sqrt((1 - b) / (1 - a)) * np.sqrt(1 - a / b)
        image = (
            np.sqrt(b) * clean + np.sqrt(1 - b - sigma**2) * estimated + sigma * noise[number + 1]
        )
    raise AssertionError


def test_betas_run_linearly_over_a_thousand_steps(diffusion):
    kept = 1.0
    for step in range(1000):
        kept *= 1 - (1e-4 + (0.02 - 1e-4) * step / 999)
    assert diffusion.kept[0] == pytest.approx(1 - 1e-4)
    assert diffusion.kept[-1] == pytest.approx(kept)
    image, noise = diffusion.noisy_parts(500)
    assert image**2 + noise**2 == pytest.approx(1)


def test_five_steps_are_those_of_the_published_code(diffusion):
    assert [step.time for step in diffusion.sampling_steps(5)] == [999, 799, 599, 399, 199]
    last = diffusion.sampling_steps(5)[-1]
    assert (last.of_clean, last.of_noisy, last.of_noise) == (1, 0, 0)


@pytest.mark.parametrize("steps", [1, 3, 5, 20])
def test_sampling_is_ddim_at_eta_one(diffusion, maps, steps):
    sampler = Sampler(diffusion.sampling_steps(steps), SIDE, rows=4, seed=3)
    model = Predictor()
    times = [int(t) for t in torch.linspace(-1, 999, steps + 1).int().tolist()[::-1]]
    for draw, image in sampler.images(model, FakeBackend(), [View(maps)], repeats=2):

        def predict(x, t, draw=draw):
            return np.tanh(x * 0.3 + maps[draw.sample].mean(dtype=np.float64) + t / 1e3)

        noise = sampling_noise(3, draw, steps, SIDE).astype(np.float64)
        expected = ddim(predict, noise, diffusion.kept, times, eta=1.0)
        np.testing.assert_allclose(image, expected, atol=2e-5)


def test_a_sample_does_not_depend_on_the_batch(diffusion, maps):
    steps = diffusion.sampling_steps(5)
    results = [
        Sampler(steps, SIDE, rows, seed=0).reconstruct(Predictor(), FakeBackend(), [View(maps)], 3)
        for rows in (1, 4, 16)
    ]
    for other in results[1:]:
        np.testing.assert_allclose(other.single, results[0].single, atol=1e-6)
        np.testing.assert_allclose(other.mean, results[0].mean, atol=1e-6)


def test_the_mean_is_over_k_different_images(diffusion, maps):
    sampler = Sampler(diffusion.sampling_steps(5), SIDE, rows=4, seed=0)
    images = list(sampler.images(Predictor(), FakeBackend(), [View(maps)], repeats=3))
    assert [draw for draw, _ in images] == [Draw(i, k) for i in range(3) for k in range(3)]
    result = sampler.reconstruct(Predictor(), FakeBackend(), [View(maps)], 3)
    np.testing.assert_array_equal(result.single[1], images[3][1])
    np.testing.assert_allclose(
        result.mean[1], np.mean([x for _, x in images[3:6]], axis=0), atol=1e-6
    )
    assert np.ptp([x[0, 0] for _, x in images[3:6]]) > 0


def test_a_turned_view_has_the_image_of_the_measurement_as_it_is(diffusion, maps):
    """The predictor is the same at each pixel: turning its input turns its output."""
    sampler = Sampler(diffusion.sampling_steps(5), SIDE, rows=4, seed=0)
    views = [View(maps), *(View(maps, symmetry) for symmetry in SYMMETRIES[1:])]
    turned = [image for _, image in sampler.images(Predictor(), FakeBackend(), views, repeats=8)]
    plain = [image for _, image in sampler.images(Predictor(), FakeBackend(), views[:1], 8)]
    np.testing.assert_allclose(turned, plain, atol=1e-6)


def test_views_take_turns_among_the_images(diffusion, maps):
    """Each view has maps of its own, which the predictor shows."""
    sampler = Sampler(diffusion.sampling_steps(1), SIDE, rows=4, seed=0)
    views = [View(maps), View(maps + 3)]
    means = [x.mean() for _, x in sampler.images(Predictor(), FakeBackend(), views, repeats=4)]
    first, second = np.reshape(means, (3, 2, 2)).transpose(2, 0, 1)
    assert (second > first + 0.1).all()


def test_every_other_image_has_the_opposite_noise():
    for repeat in (0, 2, 6):
        first, second = (sampling_noise(1, Draw(5, repeat + k), 3, 64) for k in (0, 1))
        np.testing.assert_array_equal(second, -first)
    assert not np.array_equal(*(sampling_noise(1, Draw(5, k), 3, 64) for k in (0, 2)))


def test_noise_is_a_function_of_seed_sample_and_repeat():
    first = sampling_noise(1, Draw(5, 2), 3, 64)
    assert np.array_equal(first, sampling_noise(1, Draw(5, 2), 3, 64))
    others = [(2, Draw(5, 2)), (1, Draw(6, 2)), (1, Draw(5, 3))]
    assert all(not np.array_equal(first, sampling_noise(s, d, 3, 64)) for s, d in others)
    assert abs(first.mean()) < 0.05 and first.std() == pytest.approx(1, abs=0.05)
