"""User code in a backward pass sees what it sees in a plain loop: the gradient of a mean."""

import pytest
from backward_task import KINDS, plain_loop
from runs import SUPPORT, VIRTUAL_TPU, parameters, ranks_of, result, tpukit

ARGUMENTS = [
    "train", "--task", f"{SUPPORT / 'backward_task.py'}:Backward", "--precision", "fp32",
    "--set", "schedule=constant", "--set", "clip_norm=0", "--num-workers", "0",
]  # fmt: skip
CPU, XLA, RANKS = ["--hw", "cpu"], ["--hw", "tpu"], ["--hw", "cpu", "--devices", "2"]
CUT = ["--accumulate", "2"]
WAYS = {
    "rows": (CPU, {}, 0.0),
    "mean": ([*CPU, "--set", "mean=true"], {}, 0.0),
    "accumulated": ([*CPU, *CUT], {"micro_batches": 2}, 0.0),
    "two-ranks": (RANKS, {"ranks": 2}, 1e-7),
    "two-ranks-accumulated": ([*RANKS, *CUT], {"ranks": 2, "micro_batches": 2}, 1e-7),
    "sharded": ([*RANKS, "--shard"], {"ranks": 2}, 1e-7),
    "xla-8": (XLA, {}, 3e-7),
    "xla-8-accumulated": ([*XLA, *CUT], {"micro_batches": 2}, 3e-7),
}


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.xla] * w.startswith("xla")) for w in WAYS]
)
def test_hooks_autograd_functions_and_auxiliary_losses_equal_a_plain_loop(tmp_path, way):
    arguments, loop, tolerance = WAYS[way]
    words = [*ARGUMENTS, *arguments, "--results-dir", tmp_path / "run", "--json"]
    env = VIRTUAL_TPU if "xla" in way else {}
    result(tpukit(*words, env=env, ranks=ranks_of(arguments)))
    found, expected = parameters(tmp_path / "run"), plain_loop(**loop)
    apart = {
        kind: max((found[n] - expected[n]).abs().max() for n in expected if n.startswith(kind))
        for kind in KINDS
    }
    assert max(apart.values()) <= tolerance, apart
