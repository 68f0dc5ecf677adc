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
from tpukit.hardware.xla.flash_attention import flash_attention
from tpukit.hardware.backend import TorchOps
from tpukit.hardware.xla import flash_attention as xla_kernels
from tpukit.hardware.xla import ops as ops_module
from tpukit.hardware.xla.ops import XlaOps

def interpreted(kernel, inputs):
    with pltpu.force_tpu_interpret_mode():
        found = kernel(*(jnp.asarray(t.detach().numpy()) for t in inputs))
    return [torch.from_numpy(np.array(part)) for part in found]

xla_kernels.custom_call = interpreted
errors, packed = [], []
CASES = (  # rows, queries, keys, width
    (2, 384, 384, 32), (1, 128, 128, 64), (4, 256, 128, 16), (2, 128, 640, 32), (6, 256, 256, 16),
)
for rows, queries, keys, width in CASES:
    torch.manual_seed(0)
    inputs = [torch.randn(rows, 2, n, width, requires_grad=True) for n in (queries, keys, keys)]
    bias = torch.randn(1, 2, queries, keys, requires_grad=True)
    for causal, biases in ((True, []), (False, []), (False, [bias]), (True, [bias])):
        if causal and queries != keys:
            continue
        found = flash_attention(*inputs, *biases, causal=causal)
        masks = [b + torch.ones_like(b).triu(1) * -1e30 * causal for b in biases]
        expected = F.scaled_dot_product_attention(*inputs, *masks, is_causal=causal and not biases)
        way = torch.randn_like(expected)
        wanted = [*inputs, *biases]
        pairs = zip(torch.autograd.grad(found, wanted, way),
                    torch.autograd.grad(expected, wanted, way))
        errors += [float((a - b).norm() / b.norm()) for a, b in [(found, expected), *pairs]]
    if queries == keys:  # rows of samples of 1 to 60 tokens
        generator = torch.Generator().manual_seed(1)
        begins = [torch.cat([torch.zeros(1), torch.randint(1, 60, (queries,),
                  generator=generator).cumsum(0)]).long() for _ in range(rows)]
        places = torch.arange(queries)
        starts = torch.stack([b[torch.searchsorted(b, places, right=True) - 1] for b in begins])
        assert (starts <= places).all() and len(starts.unique()) > 2
        found = flash_attention(*inputs, causal=True, starts=starts)
        own = (starts[:, :, None] == starts[:, None, :])[:, None].tril()
        expected = F.scaled_dot_product_attention(*inputs, own)
        way = torch.randn_like(expected)
        pairs = zip(torch.autograd.grad(found, inputs, way),
                    torch.autograd.grad(expected, inputs, way))
        packed += [float((a - b).norm() / b.norm()) for a, b in [(found, expected), *pairs]]
        for ops in (TorchOps(), XlaOps(1, fused=False)):
            found = ops.attention(*inputs, causal=True, starts=starts)
            packed.append(float((found - expected).norm() / expected.norm()))
ops_module.LARGEST_SCORES_BYTES = 2**16
found = XlaOps(1, fused=False).attention(*inputs, causal=True, starts=starts)
packed.append(float((found - expected).norm() / expected.norm()))
print(json.dumps([errors, packed]))
"""


def answer(arguments, devices="1", env=None):
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment({**VIRTUAL_TPU, "CPU_NUM_DEVICES": devices, **(env or {})}),
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.xla
def test_kernels_compute_attention_and_its_gradients():
    errors, packed = answer(["-c", INTERPRETED])
    assert len(errors) == 3 * (2 * 4 + 2 * 5) + 2 * (4 + 5)
    assert len(packed) == 3 * (4 + 2) + 1
    assert max(errors) < 1e-5 and max(packed) < 1e-5


LOWERED = """
import json, sys, torch
if sys.argv[1] == "imported":
    import jax
from tpukit.hardware.xla.flash_attention import Kernel, lower
shapes = (((1, 1, 32, 128), torch.float32),) * 3
payload = lower(Kernel("forward", causal=True), shapes)
import jax
print(json.dumps([len(payload), jax.default_backend()]))
"""


@pytest.mark.xla
@pytest.mark.parametrize(("platforms", "jax"), [("tpu", "new"), ("tpu,cpu", "imported")])
def test_lowering_leaves_the_tpu_alone(platforms, jax):
    """An image may name the TPU for JAX, where torch_xla holds it."""
    length, backend = answer(["-c", LOWERED, jax], env={"JAX_PLATFORMS": platforms})
    assert length > 0
    assert backend == "cpu"


@pytest.mark.plan
@pytest.mark.parametrize("devices", ["1", "4"])
def test_the_tpu_compiler_takes_the_kernels(devices):
    ways = answer([SUPPORT / "on_tpu_compiler.py", "attention"], devices)
    # Forward and backward.
    assert [ways[way]["kernels"] for way in ways] == [0, 0, 2, 2]
    # No device needs another's rows for them.
    assert ways["fused"]["gathers"] == ways["written out"]["gathers"]
    assert ways["fused"]["temporaries"] < 0.7 * ways["written out"]["temporaries"]
    assert ways["blocks"]["temporaries"] < 0.7 * ways["written out"]["temporaries"]


@pytest.mark.plan
@pytest.mark.parametrize("devices", ["1", "4"])
def test_the_tpu_compiler_takes_windows_with_a_bias(devices):
    ways = answer([SUPPORT / "on_tpu_compiler.py", "windows"], devices)
    assert [ways[way]["kernels"] for way in ways] == [0, 2]
    assert ways["fused"]["gathers"] == ways["written out"]["gathers"]
    # The bias' gradient is the sum of what each device's rows give.
    assert ways["fused"]["sums"] == ways["written out"]["sums"] == (devices == "4")
    assert ways["fused"]["temporaries"] < 0.3 * ways["written out"]["temporaries"]


@pytest.mark.plan
def test_every_tpu_that_has_the_kernels_takes_the_largest_heads():
    """What is compiled is within a core's memory on the smallest of them, too."""
    assert answer([SUPPORT / "kernels_on_tpus.py", "v4:2x2x1", "v5e:2x2", "v6e:2x2"]) == []


@pytest.mark.plan
def test_a_tpu_without_the_kernels_is_answered_for_too(tmp_path):
    """Its attention is made in blocks: a kernel in bfloat16 would be refused."""
    words = ["--task", "summarize", "--data-path", "/nonexistent", "--model", "1x2x64",
             "--block-size", "128", "--target", "v3-8", "--start", "2", "--max", "2"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tpukit", "probe-batch", *words, "--json"],
        env=environment({"TPUKIT_CACHE_DIR": str(tmp_path)}), capture_output=True, text=True,
        check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["largest_batch_per_device"] == 2
    assert found["step"]["kernel_flops"] == 0


@pytest.mark.plan
def test_the_tpu_compiler_keeps_recomputation():
    """Four first layers of 4096 x 512 x 512 are computed twice; without barriers none is."""
    ways = answer([SUPPORT / "on_tpu_compiler.py", "recompute"])
    once = ways["as they are"]["flops"]
    assert ways["no barriers"]["flops"] == pytest.approx(once, rel=1e-3)
    assert ways["recomputed"]["flops"] - once == pytest.approx(4 * 2 * 4096 * 512**2, rel=0.01)
    assert ways["recomputed"]["temporaries"] < 0.8 * ways["as they are"]["temporaries"]
