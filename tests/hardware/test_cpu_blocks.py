"""The processor's one-pass norm and gated sum against the plain operations in float64."""

import copy

import pytest
import torch

from tpukit.hardware import block_ops, cpu_blocks
from tpukit.hardware.cpu_kernels import kernel

pytestmark = pytest.mark.skipif(
    kernel(cpu_blocks.NAME) is None, reason="needs AVX512-BF16 and a C++ compiler"
)


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def error(found, expected):
    return float((found.detach().double() - expected).norm() / expected.detach().norm())


def exact_copies(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "tokens", "width"), [(2, 100, 48), (1, 64, 512), (3, 7, 16)])
def test_norm_and_its_gradients(draw, stream, batch, tokens, width):
    x = draw(batch, tokens, width).to(stream).requires_grad_()
    gain, shift, scale = draw(1, 1, width), draw(batch, width), draw(batch, width)
    inputs = [x, gain.requires_grad_(), shift.requires_grad_(), scale.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        passed, normed = cpu_blocks.modulated_norm(*inputs)
    copies = exact_copies(*inputs)
    exact_passed, exact = block_ops.modulated_norm(*copies)
    assert torch.equal(passed, x) and normed.dtype == torch.bfloat16
    assert error(normed, exact) < 4e-3
    onwards, direction = draw(*x.shape).to(stream), draw(*x.shape).bfloat16()
    found = torch.autograd.grad((passed, normed), inputs, (onwards, direction))
    expected = torch.autograd.grad(
        (exact_passed, exact), copies, (onwards.double(), direction.double())
    )
    for got, right in zip(found, expected, strict=True):
        assert got.shape == right.shape
        assert error(got, right) < (4e-3 if stream == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(("batch", "tokens", "width"), [(2, 100, 48), (3, 700, 32)])
def test_silu_mlp_and_its_gradients(draw, batch, tokens, width):
    x = (draw(batch, tokens, width) * 3).bfloat16().requires_grad_()
    maps = [torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)]
    with torch.no_grad():
        for one in maps:
            one.weight.copy_(one.weight.bfloat16())
            one.bias.copy_(draw(len(one.bias)).bfloat16())
    exact_maps = [copy.deepcopy(one).double() for one in maps]
    with torch.autocast("cpu", torch.bfloat16):
        found = cpu_blocks.silu_mlp(x, *maps)
        with torch.no_grad():
            again = cpu_blocks.silu_mlp(x, *maps)
    (exact_x,) = exact_copies(x)
    exact = block_ops.silu_mlp(exact_x, *exact_maps)
    assert found.dtype == torch.bfloat16 and error(found, exact) < 8e-3
    assert error(again, exact) < 8e-3 and again.shape == found.shape
    direction = draw(*found.shape).bfloat16()
    inputs, exact_inputs = (
        [first, *(p for one in linears for p in one.parameters())]
        for first, linears in ((x, maps), (exact_x, exact_maps))
    )
    got = torch.autograd.grad(found, inputs, direction)
    right = torch.autograd.grad(exact, exact_inputs, direction.double())
    for one, other in zip(got, right, strict=True):
        assert one.shape == other.shape and error(one, other) < 1e-2


def test_silu_far_from_zero_is_finite():
    values = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 1e30]).repeat(8)[None, None]
    maps = [torch.nn.Linear(48, 48) for _ in range(2)]
    for one in maps:
        torch.nn.init.eye_(one.weight)
        torch.nn.init.zeros_(one.bias)
    inputs = values.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = cpu_blocks.silu_mlp(inputs, *maps)
    assert error(found, torch.nn.functional.silu(values.double())) < 6e-3
    (gradient,) = torch.autograd.grad(found.sum(), inputs)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_gated_sum_and_its_gradients(draw, stream):
    x, gate, branch = draw(2, 100, 48).to(stream), draw(2, 48), draw(2, 100, 48).bfloat16()
    inputs = [t.requires_grad_() for t in (x, gate, branch)]
    total = cpu_blocks.gated_sum(*inputs)
    copies = exact_copies(*inputs)
    exact = block_ops.gated_sum(*copies)
    assert total.dtype == stream and error(total, exact) < 4e-3
    direction = draw(*x.shape).to(stream)
    found = torch.autograd.grad(total, inputs, direction)
    expected = torch.autograd.grad(exact, copies, direction.double())
    assert all(error(got, right) < 4e-3 for got, right in zip(found, expected, strict=True))


def test_a_zero_token_stays_zero(draw):
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.zeros(1, 64, 32, requires_grad=True)
        _, normed = cpu_blocks.modulated_norm(
            x, torch.ones(32), torch.zeros(1, 32), torch.zeros(1, 32)
        )
    assert not normed.any()


def test_single_precision_is_left_to_torch(draw):
    x = draw(1, 64, 32)
    assert cpu_blocks.modulated_norm(x, draw(32), draw(1, 32), draw(1, 32)) is None
    assert cpu_blocks.gated_sum(x, draw(1, 32), x) is None
