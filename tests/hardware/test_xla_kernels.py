"""The fused attention: its arithmetic in an interpreter, its programs by the TPU compiler."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import SUPPORT, VIRTUAL_TPU, environment

INTERPRETED = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import json
import jax.numpy as jnp, numpy as np, torch
import torch.nn.functional as F
from jax.experimental.pallas import tpu as pltpu
import torch_xla.core.xla_model as xm
from tpukit.hardware.xla_kernels import FlashAttention

xm.optimization_barrier_ = lambda tensors: None  # these tensors are of the CPU

def interpreted(kernel, inputs):
    with pltpu.force_tpu_interpret_mode():
        found = kernel(*(jnp.asarray(t.detach().numpy()) for t in inputs))
    found = found if isinstance(found, (tuple, list)) else (found,)
    return [torch.from_numpy(np.array(part)) for part in found if part is not None]

errors = []
for causal, keys in ((True, 256), (False, 128)):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, n, 32, requires_grad=True) for n in (256, keys, keys)]
    found = FlashAttention.apply(*inputs, causal, interpreted)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    way = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(found, inputs, way), torch.autograd.grad(expected, inputs, way))
    errors += [float((a - b).norm() / b.norm()) for a, b in [(found, expected), *pairs]]
print(json.dumps(errors))
"""


def answer(arguments, devices="1"):
    done = subprocess.run(
        [sys.executable, *arguments], env=environment({**VIRTUAL_TPU, "CPU_NUM_DEVICES": devices}),
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.xla
def test_kernels_compute_attention_and_its_gradients():
    errors = answer(["-c", INTERPRETED])
    assert len(errors) == 8
    assert max(errors) < 1e-5


@pytest.mark.plan
@pytest.mark.parametrize("devices", ["1", "4"])
def test_the_tpu_compiler_takes_the_kernels(devices):
    ways = answer([SUPPORT / "on_tpu_compiler.py", "attention"], devices)
    # Forward, and backward for the query and for key and value.
    assert [ways[way]["kernels"] for way in ways] == [0, 0, 3]
    # No device needs another's rows for them.
    assert ways["fused"]["gathers"] == ways["written out"]["gathers"]
    assert ways["fused"]["temporaries"] < 0.7 * ways["written out"]["temporaries"]
    assert ways["blocks"]["temporaries"] < 0.7 * ways["written out"]["temporaries"]


@pytest.mark.plan
def test_the_tpu_compiler_keeps_recomputation():
    """Four first layers of 4096 x 512 x 512 are computed twice; without barriers none is."""
    ways = answer([SUPPORT / "on_tpu_compiler.py", "recompute"])
    once = ways["as they are"]["flops"]
    assert ways["no barriers"]["flops"] == pytest.approx(once, rel=1e-3)
    assert ways["recomputed"]["flops"] - once == pytest.approx(4 * 2 * 4096 * 512**2, rel=0.01)
    assert ways["recomputed"]["temporaries"] < 0.8 * ways["as they are"]["temporaries"]
