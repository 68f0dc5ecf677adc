"""What the TPU compiler says of the full-width EIT network's training step on a v5e.

    python benchmarks/eit_tpu.py --rows 8 32 64

Lean form, and beside it the published form with each block computed again in the backward pass;
bf16, Adam, clipping and EMA counted. Nothing runs on a TPU: memory, bytes
and operations are the compiler's own (libtpu's version is in the JSON).
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from deciding_code import write_result

ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
GIB = 2**30


def recomputed_reference(ops: Any) -> Any:
    """The published form, its blocks recomputed."""
    from tpukit.tasks.eit.model.blocks import ModulatedBlock
    from tpukit.tasks.eit.model.network import SIZES, reference_network

    class RecomputedBlock(ModulatedBlock):
        def forward(self, x: Any, c: Any) -> Any:
            return ops.recompute(super().forward, x, c)

    network = reference_network(SIZES["published"])
    for module in network.modules():
        if isinstance(module, ModulatedBlock):
            module.__class__ = RecomputedBlock
    return network


def make_task(form: str) -> Any:
    from tpukit.tasks.eit.task import EITTask

    class RecomputedTask(EITTask):
        def build_model(self, ops: Any) -> Any:
            return recomputed_reference(ops)

    return RecomputedTask() if form == "recomputed" else EITTask(size="published")


def ask(form: str, target: str, rows: int, effort: str) -> dict[str, Any]:
    """The compiler's report on one form and batch."""
    from tpukit.probe.compiler.compiled_trial import CompiledTrials
    from tpukit.probe.targets import find_target
    from tpukit.probe.trial import TrialRequest
    from tpukit.train.config import TrainConfig

    config = TrainConfig(lr=1e-5, ema_decay=0.995, ema_every=10, precision="bf16")
    trials = CompiledTrials(make_task(form), config, find_target(target))
    trial = trials.run(TrialRequest(rows, 1, effort))
    found: dict[str, Any] = {"form": form, "target": target, "rows": rows, "effort": effort}
    found |= {"fits": trial.fits, "error": trial.error, "seconds": round(trial.seconds, 1)}
    if trial.used_bytes:
        found["used_gib"] = round(trial.used_bytes / GIB, 2)
    if trial.flops is not None and trial.bytes_accessed is not None:
        found["gbytes_a_sample"] = round(trial.bytes_accessed / rows / 1e9, 2)
        found["tflops_a_sample"] = round(trial.flops / rows / 1e12, 3)
    return found | {"collectives": dict(trial.collectives), "largest": list(trial.largest[:6])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--forms", nargs="+", default=["lean", "recomputed"])
    parser.add_argument("--reference-rows", type=int, default=4)
    parser.add_argument("--target", default="v5e-1")
    parser.add_argument("--effort", default="full", choices=["fast", "full"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from tpukit.probe.compiler.client import find_client
    from tpukit.probe.targets import find_target

    devices = str(find_target(options.target).devices)
    os.environ.update(ENVIRONMENT | {"CPU_NUM_DEVICES": devices})

    answers = []
    for form in options.forms:
        for rows in options.rows if form == "lean" else [options.reference_rows]:
            answers.append(ask(form, options.target, rows, options.effort))
            print(json.dumps(answers[-1], indent=1), file=sys.stderr, flush=True)
    result = {"versions": dict(find_client().versions), "answers": answers}
    if options.out:
        write_result(options.out, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
