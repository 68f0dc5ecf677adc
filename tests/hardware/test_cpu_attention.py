"""The processor's own attention kernel against attention written out in float32."""

import math

import pytest
import torch

from tpukit.hardware import cpu_attention
from tpukit.hardware.cpu_kernels import ENVIRONMENT, kernel

needs_kernel = pytest.mark.skipif(
    kernel(cpu_attention.NAME) is None, reason="needs AVX512-BF16 and a C++ compiler"
)


def written_out(query, key, value, bias):
    scores = query.float() @ key.float().transpose(-2, -1) / math.sqrt(query.shape[-1])
    scores = scores if bias is None else scores + bias.float()
    return scores.softmax(-1) @ value.float()


def error(found, expected):
    expected = expected.detach()
    return float((found.detach().float() - expected).norm() / expected.norm())


@needs_kernel
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "width", "biased"),
    [(2, 3, 64, 64, 32, False), (1, 2, 128, 320, 64, False), (5, 2, 128, 192, 32, True)],
)
def test_forward_and_every_gradient(batch, heads, queries, keys, width, biased):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    # Rows of heads side by side, as a projection gives them; large scores now and then.
    inputs = [
        (draw(batch, rows, heads, width) * 2).bfloat16().transpose(1, 2).requires_grad_()
        for rows in (queries, keys, keys)
    ]
    if biased:
        inputs.append(draw(1, heads, queries, keys).requires_grad_())
    arguments = (*inputs, None)[:4]
    found = cpu_attention.attention(*arguments)
    expected = written_out(*arguments)
    assert error(found, expected) < 5e-3
    direction = draw(*found.shape)
    gradients = torch.autograd.grad(found, inputs, direction.bfloat16())
    exact = torch.autograd.grad(expected, inputs, direction.bfloat16().float())
    for got, right in zip(gradients, exact, strict=True):
        assert got.shape == right.shape
        assert error(got, right.float()) < 8e-3


@needs_kernel
def test_scores_far_apart_neither_overflow_nor_vanish():
    query = torch.full((1, 1, 64, 32), 30.0).bfloat16()
    key = torch.zeros(1, 1, 128, 32).bfloat16()
    key[0, 0, 100] = 30.0
    value = torch.arange(128.0).view(1, 1, 128, 1).expand(1, 1, 128, 32).bfloat16()
    found = cpu_attention.attention(query, key, value.contiguous(), None)
    assert torch.equal(found, torch.full_like(found, 100.0))


@needs_kernel
def test_scores_that_rise_from_key_to_key():
    """Each block of keys outweighs all before it, by little and then by much."""
    query = torch.full((1, 1, 64, 32), 1.0).bfloat16()
    steps = torch.tensor([-3.0, -2.5, -2.0, 1.0, 4.0]).repeat_interleave(64)
    key = steps.view(1, 1, 320, 1).expand(1, 1, 320, 32).bfloat16()
    value = torch.randn(1, 1, 320, 32).bfloat16()
    found = cpu_attention.attention(query, key, value, None)
    assert error(found, written_out(query, key, value, None)) < 5e-3


@needs_kernel
def test_keys_a_bias_rules_out():
    query, key, value = (torch.randn(1, 2, 192, 32).bfloat16() for _ in range(3))
    bias = torch.zeros(1, 2, 192, 192)
    bias[..., :70] = -torch.inf
    found = cpu_attention.attention(query, key, value, bias)
    assert error(found, written_out(query, key, value, bias)) < 5e-3


@needs_kernel
def test_a_number_that_is_none_stays_none():
    query, key, value = (torch.randn(1, 1, 64, 32).bfloat16() for _ in range(3))
    query[0, 0, 5, 7] = torch.nan
    found = cpu_attention.attention(query, key, value, None)
    assert found[0, 0, 5].isnan().all() and found[0, 0, :5].isfinite().all()


@needs_kernel
def test_same_bits_each_time():
    inputs = [torch.randn(4, 4, 128, 32).bfloat16().requires_grad_() for _ in range(3)]
    runs = []
    for _ in range(2):
        out = cpu_attention.attention(*inputs, None)
        runs.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 1, 64, 32), torch.float32), ((1, 1, 60, 32), torch.bfloat16),
     ((1, 1, 64, 48), torch.bfloat16)],
)  # fmt: skip
def test_what_does_not_suit_is_left_to_torch(shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    assert cpu_attention.attention(tensor, tensor, tensor, None) is None


def test_the_kernel_can_be_kept_out(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "0")
    kernel.cache_clear()
    tensor = torch.randn(1, 1, 64, 32).bfloat16()
    try:
        assert cpu_attention.attention(tensor, tensor, tensor, None) is None
    finally:
        monkeypatch.undo()
        kernel.cache_clear()


def test_no_compiler_no_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel.cache_clear()
    try:
        assert kernel(cpu_attention.NAME) is None
    finally:
        monkeypatch.undo()
        kernel.cache_clear()
