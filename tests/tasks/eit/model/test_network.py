"""The network against its description: outputs and gradients."""

import dataclasses

import pytest
import torch
from fake_backend import FakeBackend
from published_form import PublishedArithmetic, published_form, published_keys

from tpukit.tasks.eit.model.network import SIZES, Network, NetworkConfig, enlarge

NARROW = NetworkConfig(width=32, heads=4, levels=2, patch=4, image_side=64)
DEEP = NetworkConfig(width=48, heads=3, levels=3, patch=2, image_side=64)
LEARNED = NetworkConfig(
    width=32, heads=2, levels=2, patch=4, image_side=64, learned_channels=3, learned_side=32
)
REFINED = dataclasses.replace(LEARNED, refinement_channels=8)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)

    def draw(config, rows=2):
        side, map_side = config.image_side, config.map_side
        return (
            torch.randn(rows, 1, side, side, generator=generator),
            torch.tensor([3.0, 900.0] * (rows // 2)),
            torch.randn(rows, 1, map_side, map_side, generator=generator),
        )

    return draw


def trained(network, seed=0):
    """The network with values that no zero hides."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return network


def fresh(config):
    return Network(config, FakeBackend())


@pytest.mark.slow
def test_full_width_has_109_7_million_parameters_under_the_published_names():
    network = fresh(SIZES["published"])
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 1) == 109.7
    assert sorted(network.state_dict()) == sorted(published_keys())


@pytest.mark.parametrize("config", [NARROW, DEEP])
def test_the_network_is_the_published_arithmetic(config, inputs):
    network = trained(fresh(config))
    images, t, maps = inputs(config)
    weights = {k: v.double() for k, v in network.state_dict().items()}
    plain = PublishedArithmetic(weights, config.heads, config.levels)
    with torch.no_grad():
        expected = plain(images.double(), t, maps.double())
        error = (network(images, t, maps) - expected).abs().max() / expected.std()
    assert error < 1e-5


@pytest.mark.parametrize("config", [NARROW, DEEP, LEARNED, REFINED])
def test_outputs_and_gradients_are_those_of_the_published_form(config, inputs):
    lean = trained(fresh(config))
    reference = published_form(lean)
    images, t, maps = inputs(config)
    expected, found = reference(images, t, maps), lean(images, t, maps)
    assert (found - expected).abs().max() / expected.std() < 2e-5
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(direction)
    found.backward(direction)
    found_gradients = dict(lean.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            error = (parameter.grad - found_gradients[name].grad).norm() / parameter.grad.norm()
            assert error < 2e-5, name


def test_it_agrees_within_bf16_rounding(inputs):
    lean = trained(fresh(DEEP))
    reference = published_form(lean)
    images, t, maps = inputs(DEEP)
    exact = reference(images, t, maps)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, lean_rounded = reference(images, t, maps), lean(images, t, maps)
    own_error = (rounded.float() - exact).norm() / exact.norm()
    lean_error = (lean_rounded.float() - exact).norm() / exact.norm()
    assert lean_error < 1.5 * own_error < 0.05


def test_every_block_is_identity_at_the_start(inputs):
    network = fresh(NARROW)
    x = torch.randn(2, NARROW.grid**2, NARROW.width)
    c = torch.randn(2, NARROW.width)
    assert torch.equal(network.blocks.swinIn1(x, c), x)
    assert torch.equal(network.blocks.mid(x, c), x)
    assert not network(*inputs(NARROW)).any()


def test_the_refinement_corrects_across_the_borders_of_patches():
    refinement = trained(fresh(REFINED)).refinement
    c = torch.zeros(1, REFINED.width)
    images = torch.zeros(1, 2 + REFINED.learned_channels, 64, 64)
    other = images.clone()
    other[..., 15] = 1.0
    changed = (refinement(other, c) - refinement(images, c))[0, 0].abs().amax(0) > 1e-6
    # The column is the last of its patch: pixels of the next patch change, far ones do not.
    assert changed[16:20].all()
    assert not changed[40:].any()
    assert not fresh(REFINED).refinement(other, c).any()


def test_positions_are_sines_and_cosines_of_column_then_row():
    codes = fresh(NARROW).pos_embed[0].view(NARROW.grid, NARROW.grid, NARROW.width)
    quarter = NARROW.width // 4
    rates = torch.tensor([10000.0 ** (-k / quarter) for k in range(quarter)])
    row, column = 5, 2
    expected = torch.cat([f(p * rates) for p in (column, row) for f in (torch.sin, torch.cos)])
    torch.testing.assert_close(codes[row, column], expected)


def test_enlarging_is_nearest_interpolation():
    images = torch.randn(2, 3, 16, 16)
    expected = torch.nn.functional.interpolate(images, scale_factor=8, mode="nearest")
    assert torch.equal(enlarge(images, 8), expected)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_smaller_sizes_run(size, inputs):
    network = fresh(SIZES[size])
    images, t, maps = inputs(SIZES[size])
    assert network(images, t, maps).shape == images.shape
