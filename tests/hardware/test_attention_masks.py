"""Masks of packed rows: one for all layers of a compiled program, none on a CPU."""

from collections import Counter

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from tpukit.hardware.backend import TorchOps
from tpukit.tasks.llm.model.lean import LanguageModel
from tpukit.tasks.llm.model.load import from_scratch, load_lm

LENGTH, LAYERS = 32, 4


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        lm = load_lm(from_scratch(f"{LAYERS}x2x16", 40, LENGTH), torch.float32)
        self.model = LanguageModel(lm, TorchOps())

    def forward(self, tokens, starts):
        return self.model(tokens, starts=starts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_compiled_program_makes_one_mask_for_all_layers():
    """Rows are packed where training compiles: there, layers share what they compute alike."""
    from functorch.compile import min_cut_rematerialization_partition

    programs = []

    def count(program, inputs):
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        programs.append(Counter(str(node.target).removeprefix("aten.") for node in calls))
        return program

    torch._dynamo.reset()
    compiled = torch.compile(
        Packed(), dynamic=False,
        backend=aot_autograd(
            fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
        ),
    )  # fmt: skip
    starts = torch.zeros(2, LENGTH, dtype=torch.long)
    compiled(torch.zeros_like(starts), starts).sum().backward()
    forward, backward = programs
    attentions = sum(n for name, n in forward.items() if "scaled_dot_product" in name)
    assert attentions == LAYERS
    assert (forward["triu.default"], forward["masked_fill.Scalar"]) == (1, 2)
    assert (backward["triu.default"], backward["masked_fill.Scalar"]) == (0, 0)


def packed_starts(rows, length, window):
    """Samples of all lengths, some rows filled up with tokens that see themselves alone."""
    rng = np.random.default_rng(0)
    starts = np.tile(np.arange(length), (rows, 1))
    for row in starts:
        at = 0
        while at < length - 4:
            size = int(rng.integers(1, 15))
            row[at : at + size], at = at, at + size
    return torch.from_numpy(np.maximum(starts, np.arange(length) - window + 1))


def operators(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        function()
    return Counter({event.key: event.count for event in profiler.key_averages()})


@pytest.mark.parametrize("window", [40, 3, 1])
def test_a_cpu_attends_sample_by_sample(window):
    """The values and gradients of torch's mask, which is made within a window's reach alone."""
    torch.manual_seed(0)
    starts, inputs = packed_starts(6, 40, window), [torch.randn(6, 2, 40, 8) for _ in range(4)]
    tensors = [tensor.requires_grad_() for tensor in inputs[:3]]
    found, expected = (
        ops.attention(*tensors, causal=True, starts=starts) for ops in (FakeBackend(), TorchOps())
    )
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    gradients, wanted = (
        torch.autograd.grad(
            result, tensors, inputs[3], allow_unused=True, materialize_grads=True
        )
        for result in (found, expected)
    )  # fmt: skip
    torch.testing.assert_close(gradients, wanted, atol=1e-5, rtol=1e-5)
    ran = operators(lambda: FakeBackend().attention(*tensors, causal=True, starts=starts))
    assert ("aten::masked_fill" in ran) == (window == 3)


@torch.no_grad()
def test_a_cpu_reads_the_keys_that_are_seen():
    """Rows of a KV cache, of which each sees its own part; one sees none."""
    torch.manual_seed(0)
    query, (keys, values) = torch.randn(9, 2, 2, 8), torch.randn(2, 9, 2, 300, 8)
    age, lengths = torch.arange(300), torch.tensor([200, 180, 90, 60, 40, 30, 20, 10, 0])
    bias = torch.zeros(9, 300).masked_fill(age >= lengths[:, None], float("-inf"))[:, None, None]
    read = []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.scaled_dot_product_attention:
                read.append(args[1].shape[0] * args[1].shape[2])
            return function(*args, **(kwargs or {}))

    with Counting():
        found = FakeBackend().attention(query, keys, values, bias)
    assert read == [4 * 200, 4 * 40, 300]
    expected = TorchOps().attention(query, keys, values, bias)
    torch.testing.assert_close(found[:8], expected[:8], atol=2e-6, rtol=1e-5)


def test_a_bias_reaches_the_kernels_with_its_keys_side_by_side():
    """Else no kernel of a GPU takes it, and plain attention holds all probabilities in fp32."""
    taken = []

    class Noted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is nn.functional.scaled_dot_product_attention:
                taken.append(args[3])
            return function(*args, **(kwargs or {}))

    query = torch.randn(2, 3, 8, 4)
    bias = torch.randn(8, 8, 3).permute(2, 0, 1)[None]
    with Noted():
        found = TorchOps().attention(query, query, query, bias)
    assert taken[0].stride(-1) == 1
    expected = ((query @ query.mT) / 2 + bias).softmax(-1) @ query
    torch.testing.assert_close(found, expected)
