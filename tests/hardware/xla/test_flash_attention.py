"""The fused attention: its arithmetic in an interpreter, its programs by the TPU compiler."""

import pytest
from runs import SUPPORT, VIRTUAL_TPU, last_json, result, script, tpukit


def answer(name, *arguments, devices="1", **variables):
    env = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": devices, **variables}
    return last_json(script(name, *arguments, env=env, timeout=400))


SMALL = ("1,128,128,16",)
LARGE = (
    "1,256,256,16",
    "2,128,256,32",
    "1,128,128,64",
    "2,384,384,32",
    "4,256,128,16",
    "2,128,640,32",
    "6,256,256,16",
)


@pytest.mark.jax
@pytest.mark.xla
@pytest.mark.parametrize("cases", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_kernels_compute_attention_and_its_gradients(cases):
    errors, packed = answer("interpreted_attention.py", *cases)
    # Square: causal or not, with a bias or not, and rows of several samples; else not causal.
    square = sum(queries == keys for _, queries, keys, _ in (case.split(",") for case in cases))
    assert len(errors) == square * (4 + 5) + len(cases) * (4 + 5)
    assert len(packed) == square * (4 + 2) + 1
    assert max(errors) < 1e-5 and max(packed) < 1e-5


LOWERED = """
import json, sys, torch
if sys.argv[1] == "imported":
    import jax
from tpukit.hardware.kernels.flash_attention import Kernel
from tpukit.hardware.xla.kernel_calls import lower
shapes = (((1, 1, 32, 128), torch.float32),) * 3
payload = lower(Kernel("forward", causal=True), shapes)
import jax
print(json.dumps([len(payload), jax.default_backend()]))
"""


@pytest.mark.jax
@pytest.mark.xla
@pytest.mark.parametrize(
    ("platforms", "jax"),
    [pytest.param("tpu", "new", marks=pytest.mark.slow), ("tpu,cpu", "imported")],
)
def test_lowering_leaves_the_tpu_alone(platforms, jax, tmp_path):
    """An image may name the TPU for JAX, where torch_xla holds it."""
    (tmp_path / "lowered.py").write_text(LOWERED)
    length, backend = answer(tmp_path / "lowered.py", jax, JAX_PLATFORMS=platforms)
    assert length > 0
    assert backend == "cpu"


@pytest.fixture(scope="module", params=[pytest.param("1", marks=pytest.mark.slow), "4"])
def programs(request):
    """The number of devices, and the compiler's reports on attention and windows for them."""
    # `attention` registers lowerings, which windows are compared without.
    reports = answer("on_tpu_compiler.py", "windows", "attention", devices=request.param)
    return request.param, reports


@pytest.mark.jax
@pytest.mark.plan
def test_the_tpu_compiler_takes_the_kernels(programs):
    ways = programs[1]["attention"]
    # Forward and backward.
    assert [ways[way]["kernels"] for way in ways] == [0, 0, 2, 2]
    # No device needs another's rows for them.
    assert ways["fused"]["gathers"] == ways["written out"]["gathers"]
    assert ways["fused"]["temporaries"] < 0.7 * ways["written out"]["temporaries"]
    assert ways["blocks"]["temporaries"] < 0.7 * ways["written out"]["temporaries"]


@pytest.mark.jax
@pytest.mark.plan
def test_the_tpu_compiler_takes_windows_with_a_bias(programs):
    devices, ways = programs[0], programs[1]["windows"]
    assert [ways[way]["kernels"] for way in ways] == [0, 2]
    assert ways["fused"]["gathers"] == ways["written out"]["gathers"]
    # The bias' gradient is the sum of what each device's rows give.
    assert ways["fused"]["sums"] == ways["written out"]["sums"] == (devices == "4")
    assert ways["fused"]["temporaries"] < 0.3 * ways["written out"]["temporaries"]


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.plan
@pytest.mark.parametrize("words", [
    ["4", "v5e:2x2"], ["1", "v5e:2x2", "v4:2x2x1", "v6e:2x2"],
])  # fmt: skip
def test_every_tpu_that_has_the_kernels_takes_the_largest_heads(words):
    """What is compiled is within a core's memory on the smallest of them, too."""
    assert answer("kernels_on_tpus.py", *words) == []


@pytest.mark.slow
@pytest.mark.plan
def test_a_tpu_without_the_kernels_is_answered_for_too(tmp_path):
    """Its attention is made in blocks: a kernel in bfloat16 would be refused."""
    task = f"{SUPPORT / 'attention_task.py'}:Attending"
    words = ["--task", task, "--target", "v3-8", "--start", "2", "--max", "2", "--json"]
    found = result(tpukit("probe-batch", *words, env={"TPUKIT_CACHE_DIR": str(tmp_path)}))
    assert found["largest_batch_per_device"] == 2
    assert found["step"]["kernel_flops"] == 0


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.plan
def test_the_tpu_compiler_keeps_recomputation():
    """Four first layers of 4096 x 512 x 512 are computed twice; without barriers none is."""
    ways = answer("on_tpu_compiler.py", "recompute")["recompute"]
    once = ways["as they are"]["flops"]
    assert ways["no barriers"]["flops"] == pytest.approx(once, rel=1e-3)
    assert ways["recomputed"]["flops"] - once == pytest.approx(4 * 2 * 4096 * 512**2, rel=0.01)
    assert ways["recomputed"]["temporaries"] < 0.8 * ways["as they are"]["temporaries"]
