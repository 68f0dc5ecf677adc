"""Masks of packed rows: one for all layers of a compiled program."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from tpukit.hardware.backend import TorchOps
from tpukit.tasks.summarize.model.decoder import DecoderConfig, LanguageModel

LENGTH, LAYERS = 32, 4


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        config = DecoderConfig(
            layers=LAYERS, heads=2, width=16, vocabulary_size=40, block_size=LENGTH
        )
        self.model = LanguageModel(config, TorchOps())

    def forward(self, tokens, starts):
        return self.model(tokens, starts=starts)


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
