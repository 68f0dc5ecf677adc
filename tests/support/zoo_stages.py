"""What each model of the zoo must do, one model and stage a process.

python zoo_stages.py STAGE NAME...: the results as JSON, one a line; tracebacks on standard error.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tpukit.train.learner import Learner

    State = dict[str, dict[str, Tensor]]
    """Tensors on the host by kind and name."""

ROOT = Path(__file__).resolve().parents[2]
ROWS, TOLERANCE = 8, 1e-4
CHECKS = {"trains": ("equals", "one-graph"), "compiles": ("compiles",)}
"""Stage -> what it checks: a step equals the CPU's, no compilation after the warm-up, the bf16 step
compiles for a v5e."""
PRELOADED = ["timm", "torchvision", "transformers", "torch_xla", "tpukit.train.learner"]
"""Imported once in the server that each model's process is forked from."""
ENVIRONMENT = {
    "PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0",
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
STAGE_ENVIRONMENT = {
    # Most of it is the compilation for the CPU: three times as fast without optimizations.
    "trains": {
        "CPU_NUM_DEVICES": "4",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
    },
    "compiles": {"CPU_NUM_DEVICES": "1", "TPU_LOG_DIR": "disabled"},
}


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
        failed = {}
        if self.error is not None:
            missing = [check for check in CHECKS[self.stage] if check not in self.values]
            failed = dict.fromkeys(missing, self.error)
        off = {
            kind: f"{error:.1e}"
            for kind, error in self.values.get("equals", {}).items()
            if error > TOLERANCE
        }
        if off:
            failed["equals"] = f"relative differences {off}"
        in_fp32 = self.values.get("fp32")
        if in_fp32 and max(in_fp32.values()) <= TOLERANCE:
            failed["equals"] = f"equal in fp32: {max(in_fp32.values()):.1e}"
        if self.values.get("one-graph"):
            failed["one-graph"] = f"{self.values['one-graph']} compilations after the warm-up"
        return failed


def outcome(name: str, stage: str, limit_seconds: float = 500) -> Outcome:
    """A stage of a model in a process of its own, which is killed at the limit."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # A process of its own leaves no memory, compiled graph or default of a library behind.
    receive, send = context.Pipe(duplex=False)
    started = time.monotonic()
    process = context.Process(target=_send_outcome, args=(send, name, stage), daemon=True)
    process.start()
    send.close()
    try:
        answered = receive.poll(limit_seconds)
        values, error = receive.recv() if answered else ({}, f"over {limit_seconds} s")
    except EOFError:
        process.join()
        values, error = {}, f"the process ended with exit code {process.exitcode}"
    process.kill()
    process.join()
    return Outcome(name, stage, error, round(time.monotonic() - started, 1), values)


def _send_outcome(send: Connection, name: str, stage: str) -> None:
    from zoo_models import entries

    os.environ.update(ENVIRONMENT | STAGE_ENVIRONMENT[stage])
    if entries()[name].optimized:
        os.environ.pop("XLA_FLAGS", None)
    values: dict[str, Any] = {}
    try:
        STAGES[stage](name, values)
        send.send((values, None))
    except Exception as error:
        traceback.print_exc()
        send.send((values, f"{type(error).__name__}: {error}".replace(f"{ROOT}/", "")))


# -- a step on XLA and on the CPU --------------------------------------------------------------
def trains(name: str, values: dict[str, Any]) -> None:
    """A step on four virtual devices equals the CPU's; three more compile nothing.

    In some models the last bit of fp32 turns a ReLU on or off, and so changes the gradients. These
    are compared in float64, and must differ in fp32.
    """
    import copy

    import torch
    from zoo_models import InFloat64, Zoo, entries

    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import open_backend
    from tpukit.train.config import TrainConfig
    from tpukit.train.learner import build_learner

    torch.set_num_threads(1)
    config = TrainConfig(ema_decay=0.9)
    task = Zoo(entries()[name])
    xla = open_backend(HardwareOptions(hw="tpu", precision="fp32"))
    cpu = open_backend(HardwareOptions(hw="cpu", precision="fp32", compile=False))
    torch.manual_seed(0)
    model = task.build_model(xla)
    expected = stepped(build_learner(task, cpu, copy.deepcopy(model), config))
    if task.entry.in_float64:
        exact, double = InFloat64(task.entry), copy.deepcopy(model).double()
        on_cpu = stepped(build_learner(exact, cpu, copy.deepcopy(double), config))
        values["equals"] = differences(stepped(build_learner(exact, xla, double, config)), on_cpu)
    learner = build_learner(task, xla, model, config)
    values["fp32" if task.entry.in_float64 else "equals"] = differences(stepped(learner), expected)
    train(learner, seed=0)  # with drop-out it is another graph
    validate(learner)
    before = xla.compilations()
    for seed in (1, 2, 3):
        train(learner, seed)
    validate(learner)
    values["one-graph"] = xla.compilations() - before


def stepped(learner: Learner) -> State:
    """The state after a first step without drop-out."""
    import numpy as np

    np.random.seed(0)  # transformers masks speech by it
    with without_dropout(learner.model):
        learner.train_step(batches(learner, seed=0), 1e-3)
    return state(learner)


def batches(learner: Learner, seed: int) -> list[dict[str, Tensor]]:
    """The batch of one step, on the learner's device."""
    return list(learner.backend.batches(learner.task.example_batches(ROWS, seed)))


def train(learner: Learner, seed: int) -> None:
    """A step, and its metrics as the engine reads them."""
    learner.train_step(batches(learner, seed), 1e-3)
    learner.read_metrics()


def validate(learner: Learner) -> None:
    """A validation with the EMA weights, as the engine does it."""
    learner.model.eval()
    with learner.ema.in_place_of_weights():
        learner.sums.add(batches(learner, seed=100)[0])
    learner.model.train()
    learner.sums.read()


def differences(left: State, right: State) -> dict[str, float]:
    """What differs after a step: |left - right| / |right| of each kind of state."""
    return {kind: relative_error(left[kind], right[kind]) for kind in right}


def state(learner: Learner) -> State:
    """The loss, and every floating tensor that a step changes, on the host."""
    import torch

    backend, model = learner.backend, learner.backend.unwrap(learner.model)
    loss = torch.tensor(learner.read_metrics().means["loss"])
    parameters = dict(backend.unwrap(learner.model).named_parameters())
    buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    # The first moment of Adam's first step is the gradient, up to a factor.
    moments = {n: learner.optimizer.state.get(p, {}) for n, p in parameters.items()}
    moments = {n: held["exp_avg"] for n, held in moments.items() if "exp_avg" in held}
    return {
        "loss": {"loss": loss},
        "gradients": backend.to_host(moments),
        "parameters": backend.to_host(parameters),
        "ema": backend.to_host(learner.ema.weights),
        "buffers": backend.to_host(buffers),
    }


def relative_error(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """|left - right| / |right| in the 2-norm over all tensors."""
    assert left.keys() == right.keys()
    pairs = [(finite(left[n]), finite(right[n])) for n in right]
    off = sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5
    size = sum(float(other.square().sum()) for _, other in pairs) ** 0.5
    return off / size if size else off


def finite(tensor: Tensor) -> Tensor:
    """The tensor with numbers in place of infinities (some buffers are bounds) and of NaN."""
    return tensor.double().nan_to_num(nan=1e30, posinf=1e10, neginf=-1e10)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Drop-out and stochastic depth are off inside."""
    from torch import nn

    changed = []
    for module in model.modules():
        for key, value in list(vars(module).items()):
            named = "drop" in key or (
                key == "p" and isinstance(module, nn.modules.dropout._DropoutNd)
            )
            if named and isinstance(value, float) and value:
                changed.append((module, key, value))
                setattr(module, key, 0.0)
    try:
        yield
    finally:
        for module, key, value in changed:
            setattr(module, key, value)


# -- for a TPU ---------------------------------------------------------------------------------
def compiles(name: str, values: dict[str, Any]) -> None:
    """The bf16 step compiles for a v5e."""
    from zoo_models import Zoo, entries

    from tpukit.probe.compiler.compiled_trial import CompiledTrials
    from tpukit.probe.targets import find_target
    from tpukit.probe.trial import TrialRequest
    from tpukit.train.config import TrainConfig

    trials = CompiledTrials(Zoo(entries()[name]), TrainConfig(), find_target("v5e-1"))
    trial = trials.run(TrialRequest(ROWS, effort="fast"))
    if not trial.fits:
        raise RuntimeError(trial.error)
    values["compiles"] = trial.used_bytes


STAGES: dict[str, Callable[[str, dict[str, Any]], None]] = {"trains": trains, "compiles": compiles}

if __name__ == "__main__":
    for given in sys.argv[2:]:
        print(json.dumps(asdict(outcome(given, sys.argv[1]))), flush=True)
