"""Products with packed weights are those of `F.linear`, and follow a weight that changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpukit.hardware.eager.packed_linears import PackedLinears, can_pack
from tpukit.hardware.fake import FakeBackend
from tpukit.tasks.summarize.model.gpt2 import GPT2, GPT2Config

pytestmark = pytest.mark.skipif(not can_pack(), reason="torch without oneDNN")
PACKED = "mkldnn::_linear_pointwise"


def operators(function):
    """What `function()` returns, and the operators that it ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        result = function()
    return result, {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("shape", [(4,), (1, 4), (32, 4), (2, 3, 4), (0, 4)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_product_is_the_linear_layers(shape, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 6, bias=bias), torch.randn(shape)
    expected = layer(x)
    with PackedLinears():
        assert torch.allclose(layer(x), expected, atol=1e-6)
        assert layer(x).shape == expected.shape


@torch.no_grad()
def test_rows_of_a_weight_and_a_weight_that_changes():
    torch.manual_seed(0)
    weight, x = torch.randn(12, 4), torch.randn(5, 4)
    with PackedLinears():
        for part in weight.chunk(3):
            assert torch.allclose(F.linear(x, part), x @ part.T, atol=1e-6)
        weight.mul_(2)
        assert torch.allclose(F.linear(x, weight[4:8]), x @ weight[4:8].T, atol=1e-6)
        strided = torch.randn(4, 12).T
        assert torch.allclose(F.linear(x, strided), x @ strided.T, atol=1e-6)


def test_gradients_and_other_types_are_torchs():
    layer, x = nn.Linear(4, 6), torch.randn(5, 4)
    with PackedLinears():
        result, ran = operators(lambda: layer(x))
        result.sum().backward()
        assert PACKED not in ran and layer.weight.grad is not None
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            result, ran = operators(lambda: layer(x))
        assert PACKED not in ran and result.dtype == torch.bfloat16


@torch.no_grad()
def test_a_backend_packs_only_while_weights_stay_the_same():
    backend, layer, x = FakeBackend(), nn.Linear(4, 6), torch.randn(5, 4)
    with backend.same_weights():
        assert PACKED in operators(lambda: layer(x))[1]
    assert PACKED not in operators(lambda: layer(x))[1]


@torch.no_grad()
def test_gpt2_multiplies_by_packed_weights():
    backend = FakeBackend()
    model = GPT2(GPT2Config(layers=2, heads=2, width=32, vocabulary_size=99), backend)
    tokens = torch.randint(99, (4, 10))
    expected = model(tokens)
    with backend.same_weights():
        result, ran = operators(lambda: model(tokens))
    assert PACKED in ran and not ran & {"aten::addmm", "aten::mm"}
    assert torch.allclose(result, expected, atol=1e-5)
