"""Linear layers by oneDNN's products are torch's, and so are their derivatives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tpukit.hardware.eager import trained_linears
from tpukit.hardware.eager.packed_linears import can_pack
from tpukit.hardware.eager.trained_linears import faster_than_mkl, linear
from tpukit.hardware.fake import FakeBackend
from tpukit.tasks.summarize.model.gpt2 import GPT2, GPT2Config

pytestmark = pytest.mark.skipif(not can_pack(), reason="torch without oneDNN")
PRODUCT = "mkldnn::_linear_pointwise"


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """Whatever this machine's CPU is."""
    monkeypatch.setattr(trained_linears, "faster_than_mkl", lambda: True)
    torch.manual_seed(0)


def products(function):
    """What `function()` returns, and how many of oneDNN's products it took."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        result = function()
    return result, sum(e.count for e in profiler.key_averages() if e.key == PRODUCT)


def leaves(inputs, outputs, *, rows=(4, 40), bias=True):
    x, weight = torch.randn(*rows, inputs), torch.randn(outputs, inputs) / inputs**0.5
    tensors = [x, weight, torch.randn(outputs)] if bias else [x, weight]
    return [tensor.requires_grad_() for tensor in tensors]


def close(one, other):
    assert one.shape == other.shape
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(4, 40), (160,), (2, 2, 40)])
@pytest.mark.parametrize("shape", [(256, 256), (256, 512), (512, 256)])
def test_values_and_gradients_are_torchs(shape, rows, bias):
    tensors = leaves(*shape, rows=rows, bias=bias)
    expected = F.linear(*tensors)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, direction)

    def train():
        result = linear(*tensors)
        return result, torch.autograd.grad(result, tensors, direction)

    (result, gradients), count = products(train)
    assert count == 2
    close(result, expected)
    for gradient, other in zip(gradients, wanted, strict=True):
        close(gradient, other)


def test_what_is_frozen_has_no_gradient():
    for frozen in range(3):
        tensors = leaves(256, 256)
        tensors[frozen].requires_grad_(False)
        linear(*tensors).sum().backward()
        assert [t.grad is None for t in tensors] == [place == frozen for place in range(3)]


def test_second_derivatives_are_torchs():
    tensors = leaves(512, 256)

    def penalty(function):
        norms = [g.square().sum() for g in gradients(function)]
        return torch.autograd.grad(sum(norms), tensors)

    def gradients(function):
        return torch.autograd.grad(function(*tensors).square().sum(), tensors, create_graph=True)

    for ours, theirs in zip(penalty(linear), penalty(F.linear), strict=True):
        close(ours / theirs.abs().max(), theirs / theirs.abs().max())


def test_a_checkpoint_computes_it_again():
    x, weight, bias = leaves(256, 256)
    checkpoint(linear, x, weight, bias, use_reentrant=False).sum().backward()
    (wanted,) = torch.autograd.grad(F.linear(x, weight, bias).sum(), [weight])
    close(weight.grad, wanted)


def test_where_it_gains_nothing_or_cannot_it_is_torchs():
    x, weight, bias = leaves(256, 256)
    half = torch.autocast("cpu", dtype=torch.bfloat16)
    with half:
        assert products(lambda: linear(x, weight, bias))[1] == 0
    with torch.no_grad():
        assert products(lambda: linear(x, weight, bias))[1] == 0
    assert products(lambda: linear(*leaves(256, 128)))[1] == 0
    assert products(lambda: linear(*leaves(256, 256, rows=(100,))))[1] == 0
    wide, doubled = weight.T, [t.double() for t in (x, weight, bias)]
    assert products(lambda: linear(x, wide, bias))[1] == 0
    close(linear(x, wide, bias), F.linear(x, wide, bias))
    assert products(lambda: linear(*doubled))[1] == 0


def test_transforms_see_torchs():
    x, weight, bias = (tensor.detach() for tensor in leaves(256, 256))

    def loss(weight):
        return linear(x, weight, bias).square().sum()

    wanted = 2 * F.linear(x, weight, bias).flatten(0, 1).T @ x.flatten(0, 1)
    close(torch.func.grad(loss)(weight), wanted)
    assert torch.func.jvp(loss, (weight,), (weight,))[1].isfinite()
    tensors = leaves(256, 256)
    with forward_ad.dual_level():
        for place, tensor in enumerate(tensors):
            dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
            result = linear(*tensors[:place], dual, *tensors[place + 1 :])
            assert forward_ad.unpack_dual(result).tangent is not None


def test_gpt2_trains_with_it():
    config = GPT2Config(layers=2, heads=4, width=256, vocabulary_size=300, block_size=64)
    backend = FakeBackend()
    model = GPT2(config, backend)
    tokens = torch.randint(300, (4, 40))

    def train():
        model.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        return loss, [p.grad.clone() for p in model.parameters()]

    (loss, gradients), count = products(train)
    # Of six products in each of two layers and the vocabulary's: the inputs' gradients, one
    # forward less in each layer, one weight's gradient more.
    assert count == 13 + 11 + 2
    backend.compiles = True
    (expected, others), count = products(train)
    assert count == 0
    close(loss, expected)
    for ours, theirs in zip(gradients, others, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
    ],
)
def test_which_cpus_train_with_it(vendor, capability, faster, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert faster_than_mkl.__wrapped__() is faster


def test_a_compiler_sees_torchs(monkeypatch):
    monkeypatch.setattr(trained_linears, "faster_than_mkl", faster_than_mkl)
    x, weight, bias = leaves(256, 256)
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    close(compiled(x, weight, bias), F.linear(x, weight, bias))
