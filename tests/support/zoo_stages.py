"""What each model of the zoo must do, one model and stage a process.

python zoo_stages.py STAGE NAME...: the results as JSON, one a line; tracebacks on standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpukit.testing import PRELOADED, in_process

PRELOADED += ["timm", "torchvision", "transformers"]

ROWS, DEVICES, TOLERANCE = 8, 4, 1e-4
CHECKS = {"trains": ("equals", "one-graph"), "compiles": ("compiles",)}
"""Stage -> what it checks: a step equals the CPU's, no compilation after the warm-up, the bf16 step
compiles for a v5e."""
os.environ |= {"HF_HUB_OFFLINE": "1", "USE_TORCH_XLA": "0"}


@dataclass(frozen=True)
class Outcome:
    """What a model did in a stage."""

    name: str
    stage: str
    error: str | None
    """Why it failed; None: it passed."""
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)
    """What was measured."""

    def failed_checks(self) -> dict[str, str]:
        """Each check of the stage that failed, with the reason."""
        if self.error is not None:
            return dict.fromkeys(CHECKS[self.stage], self.error)
        differences = self.values.get("equals", {})
        off = {kind: f"{e:.1e}" for kind, e in differences.items() if not e <= TOLERANCE}
        failed = {"equals": f"relative differences {off}"} if off else {}
        if self.values.get("one-graph"):
            failed["one-graph"] = f"{self.values['one-graph']} compilations after the warm-up"
        return failed


def outcome(name: str, stage: str, limit_seconds: float = 500) -> Outcome:
    """A stage of a model in a process of its own, which is killed at the limit: a fork of this one
    where that has imported torch_xla and opened no device."""
    started = time.monotonic()
    method = "fork" if "torch_xla" in sys.modules else "forkserver"
    values, error = in_process(STAGES[stage], (name,), limit_seconds, method)
    return Outcome(name, stage, error, round(time.monotonic() - started, 1), values or {})


def trains(name: str) -> dict[str, Any]:
    """A step on four virtual devices equals the CPU's; three more compile nothing."""
    from zoo_models import Zoo, entries

    from tpukit.probe.parity import compare_steps, on_virtual_devices

    if entries()[name].optimized:
        os.environ["XLA_FLAGS"] = ""
    on_virtual_devices(DEVICES)
    found = compare_steps(Zoo(entries()[name]), ROWS, TOLERANCE, validate=True)
    fp32 = {} if found.float64 is None else {"fp32": found.fp32}
    return {"equals": found.differences, "one-graph": found.compilations, **fp32}


def compiles(name: str) -> dict[str, Any]:
    """The bf16 step compiles for a v5e."""
    from zoo_models import Zoo, entries

    from tpukit.probe.compiler.compiled_trial import CompiledTrials
    from tpukit.probe.targets import find_target
    from tpukit.probe.trial import TrialRequest
    from tpukit.probe.trials.evaluators import COMPILER_ENVIRONMENT
    from tpukit.train.config import TrainConfig

    os.environ |= {**COMPILER_ENVIRONMENT, "CPU_NUM_DEVICES": "1"}
    trials = CompiledTrials(Zoo(entries()[name]), TrainConfig(), find_target("v5e-1"))
    trial = trials.run(TrialRequest(ROWS, effort="fast"))
    if not trial.fits:
        raise RuntimeError(trial.error)
    return {"compiles": trial.used_bytes}


STAGES: dict[str, Callable[[str], dict[str, Any]]] = {"trains": trains, "compiles": compiles}

if __name__ == "__main__":
    for given in sys.argv[2:]:
        print(json.dumps(asdict(outcome(given, sys.argv[1]))), flush=True)
