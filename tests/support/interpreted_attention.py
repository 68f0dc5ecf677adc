"""The attention kernels in Pallas' interpreter beside torch's attention, errors as JSON.

python interpreted_attention.py CASE...: rows, queries, keys, width, as 2,128,640,32.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.experimental.pallas import tpu as pltpu

from tpukit.hardware.backend import TorchOps
from tpukit.hardware.kernels.flash_attention import flash_attention
from tpukit.hardware.xla import ops as ops_module
from tpukit.hardware.xla.ops import XlaOps


def interpreted(kernel, inputs):
    with pltpu.force_tpu_interpret_mode():
        found = kernel(*(jnp.asarray(t.detach().numpy()) for t in inputs))
    return [torch.from_numpy(np.array(part)) for part in found]


def differences(found, expected, inputs):
    """Of the output and of the gradients, each relative."""
    way = torch.randn_like(expected)
    ours, wanted = (torch.autograd.grad(output, inputs, way) for output in (found, expected))
    pairs = zip((found, *ours), (expected, *wanted), strict=True)
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


errors, packed = [], []
for case in sys.argv[1:]:
    rows, queries, keys, width = map(int, case.split(","))
    torch.manual_seed(0)
    inputs = [torch.randn(rows, 2, n, width, requires_grad=True) for n in (queries, keys, keys)]
    bias = torch.randn(1, 2, queries, keys, requires_grad=True)
    for causal, biases in ((True, []), (False, []), (False, [bias]), (True, [bias])):
        if causal and queries != keys:
            continue
        found = flash_attention(*inputs, *biases, causal=causal, call=interpreted)
        masks = [b + torch.ones_like(b).triu(1) * -1e30 * causal for b in biases]
        expected = F.scaled_dot_product_attention(*inputs, *masks, is_causal=causal and not biases)
        errors += differences(found, expected, [*inputs, *biases])
    if queries == keys:  # rows of samples of 1 to 60 tokens
        generator = torch.Generator().manual_seed(1)
        begins = [
            torch.cat(
                [torch.zeros(1), torch.randint(1, 60, (queries,), generator=generator).cumsum(0)]
            ).long()
            for _ in range(rows)
        ]
        places = torch.arange(queries)
        starts = torch.stack([b[torch.searchsorted(b, places, right=True) - 1] for b in begins])
        assert (starts <= places).all() and len(starts.unique()) > 2
        found = flash_attention(*inputs, causal=True, starts=starts, call=interpreted)
        own = (starts[:, :, None] == starts[:, None, :])[:, None].tril()
        expected = F.scaled_dot_product_attention(*inputs, own)
        packed += differences(found, expected, inputs)
        for ops in (TorchOps(), XlaOps(1, fused=False)):
            found = ops.attention(*inputs, causal=True, starts=starts)
            packed.append(float((found - expected).norm() / expected.norm()))
ops_module.LARGEST_SCORES_BYTES = 2**16
found = XlaOps(1, fused=False).attention(*inputs, causal=True, starts=starts)
packed.append(float((found - expected).norm() / expected.norm()))
print(json.dumps([errors, packed]))
