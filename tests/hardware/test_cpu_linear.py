"""The processor's linear maps for sampling against float64."""

import pytest
import torch

from tpukit.hardware import block_ops, cpu_linear
from tpukit.hardware.cpu_kernels import kernel

pytestmark = pytest.mark.skipif(
    kernel(cpu_linear.NAME) is None, reason="needs AVX512-BF16 and a C++ compiler"
)


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.fixture
def new_map(draw):
    def build(inputs, outputs):
        one = torch.nn.Linear(inputs, outputs)
        with torch.no_grad():
            one.bias.copy_(draw(outputs))
        return one

    return build


def exactly(function, x, *maps):
    """function of x and maps in float64, their weights rounded to bf16 as the kernel's are."""
    copies = []
    for one in maps:
        exact = torch.nn.Linear(one.in_features, one.out_features, dtype=torch.float64)
        with torch.no_grad():
            exact.weight.copy_(one.weight.bfloat16())
            exact.bias.copy_(one.bias)
        copies.append(exact)
    return function(x.double(), *copies)


def error(found, expected):
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


# Rows that fill no last task, and no last tile in it; inputs that fill no last stretch of packing.
ROWS = (3, 683)


@torch.no_grad()
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (320, 64), (512, 128)])
def test_linear(draw, new_map, inputs, outputs):
    x, one = draw(*ROWS, inputs).bfloat16(), new_map(inputs, outputs)
    exact = exactly(lambda x, one: one(x), x, one)
    assert error(cpu_linear.linear(x, one), exact) < 3e-3


@torch.no_grad()
@pytest.mark.parametrize(("width", "middle"), [(64, 256), (320, 64)])
def test_silu_mlp(draw, new_map, width, middle):
    x, maps = draw(*ROWS, width).bfloat16(), (new_map(width, middle), new_map(middle, width))
    assert error(cpu_linear.silu_mlp(x, *maps), exactly(block_ops.silu_mlp, x, *maps)) < 5e-3


@torch.no_grad()
def test_a_row_comes_out_the_same_wherever_it_stands(draw, new_map):
    x, one = draw(1, 2100, 64).bfloat16(), new_map(64, 64)
    moved = cpu_linear.linear(x.roll(1, 1), one).roll(-1, 1)
    assert torch.equal(moved, cpu_linear.linear(x, one))


def test_where_a_gradient_is_wanted_torch_does_it(draw, new_map):
    x, one = draw(1, 2048, 64).bfloat16(), new_map(64, 64)
    assert cpu_linear.linear(x, one) is None
    assert cpu_linear.silu_mlp(x, one, one) is None


@torch.no_grad()
def test_what_does_not_suit_is_left_to_torch(draw, new_map):
    x, one = draw(1, 2048, 64).bfloat16(), new_map(64, 64)
    assert cpu_linear.linear(x, one) is not None
    odd, half = draw(1, 2048, 80).bfloat16(), torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    without_bias = torch.nn.Linear(64, 64, bias=False)
    for tokens, linear_map in (
        (x.float(), one), (x[:, :2000], one), (x.transpose(0, 1)[::2], one),
        (odd, new_map(80, 64)), (x, new_map(64, 80)), (x, half), (x, without_bias),
    ):  # fmt: skip
        assert cpu_linear.linear(tokens, linear_map) is None
    assert cpu_linear.silu_mlp(x, one, new_map(64, 128)) is None
