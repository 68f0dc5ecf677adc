"""A test that a model trains on a TPU, without a TPU: `trains_on_tpu`.

    @pytest.mark.tpu
    def test_trains_on_a_tpu():
        trains_on_tpu(Net(), torch.zeros(8, 3, 32, 32), target="v5e-1", batch=256)

`pytest --tpu` runs what is marked so (`tpukit.pytest_plugin`).
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from tpukit.errors import ConfigError, TpukitError
from tpukit.hardware.backend import Batch, ModelOps, TorchOps
from tpukit.hardware.launch.child import Death
from tpukit.hardware.launch.memory_watch import watched_memory
from tpukit.io.code_owner import is_model_code
from tpukit.io.units import GIB
from tpukit.io.workers import EndedError, TimedCall
from tpukit.probe.batch.model_task import input_key, tensors_in
from tpukit.probe.compiler.client import find_client
from tpukit.probe.compiler.source_map import model_frame
from tpukit.probe.parity import (
    UNOPTIMIZED,
    Parity,
    SeededTask,
    compare_steps,
    on_virtual_devices,
)
from tpukit.probe.targets import Target, find_target
from tpukit.probe.trial import TaskSource, Trial, TrialRequest
from tpukit.probe.trials.carried import carried, carried_task, copied
from tpukit.probe.trials.evaluators import COMPILER_ENVIRONMENT, CompilerEvaluator
from tpukit.train.config import TrainConfig

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
TOLERANCE = 1e-4
"""Default of the largest relative difference between a step on XLA and on the CPU."""
NEARLY_FULL = 0.9
"""Part of a target's memory above which the compiler is asked at its full setting."""
LARGE_FLOPS = 3e7
"""Above, a sample's convolutions in plain loops (in groups, in float64) take longer than optimizing
them."""
LIGHTLY_OPTIMIZED = UNOPTIMIZED.replace("level=0", "level=1")
PRELOADED = ["torch_xla", "tpukit.train.learner"]
"""Imported once in the server that the processes are forked from."""


def trains_on_tpu(
    model: nn.Module,
    inputs: Inputs,
    target: str = "v5e-1",
    batch: int = 8,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    devices: int = 8,
    tolerance: float = TOLERANCE,
    seconds: float = 600.0,
) -> None:
    """Asserts that a model trains on a TPU as it does on a CPU. Needs no TPU.

    - no operation leaves the device in a training step;
    - a step of AdamW in fp32 on virtual XLA devices equals the CPU's (loss, gradients, weights,
      buffers; with the same random numbers);
    - nothing is compiled after the second step;
    - the bf16 step compiles for the target and fits its memory.

    Args:
        model: on the CPU, not changed.
        inputs: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword
            arguments, which may hold further ones. Rows lie along the first axis of the first
            tensor; what has as many is repeated or cut to the rows that are needed.
        target: the TPU, as `probe-batch --target` names it.
        batch: rows a device of the target.
        loss: from the model's output and `inputs` to a scalar or one value a row. Default: the
            output's `loss`, or the mean of the squares of its floating tensors.
        devices: virtual devices; each gets one row.
        tolerance: largest relative difference from the CPU's step.
        seconds: time limit of each of the two processes that do it.

    Raises:
        AssertionError: with a line for each thing that fails.
        TpukitError: torch_xla, jax or libtpu is missing, or the target is unknown.
    """
    wanted = find_target(target)
    if min(batch, devices) < 1:
        raise ConfigError(f"batch={batch}, devices={devices}: both must be at least 1.")
    task = GivenModel(model, inputs, loss)
    with carried(task, [*map(type, model.modules()), *filter(None, [loss])]) as source:
        failures = _fits(source, wanted, batch, seconds)
        failures += _equals(source, devices, tolerance, seconds, known=bool(failures))
    if failures:
        raise AssertionError(
            f"{type(model).__name__} does not train on a {wanted.name} as it does on a CPU:\n"
            + "\n".join(f"- {line}" for line in failures)
        )


class GivenModel(SeededTask):
    """A model with its inputs as a task."""

    def __init__(
        self, model: nn.Module, inputs: Inputs, loss: Callable[[Any, Any], Tensor] | None
    ) -> None:
        self.model = model
        self.inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        self.loss_function = loss or _default_loss

    def build_model(self, ops: ModelOps) -> nn.Module:
        return copied(self.model)

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        parts, form = tree_flatten(self.inputs)
        names = [input_key(str(index)) for index in range(len(parts))]
        inputs = tree_unflatten(map(batch.get, names, parts), form)
        if isinstance(inputs, dict):
            output = model(**inputs)
        else:
            output = model(inputs) if isinstance(inputs, Tensor) else model(*inputs)
        return {"loss": self.loss_function(output, inputs)}

    def seeded_batches(self, rows: int, seed: int = 0) -> list[Batch]:
        parts = enumerate(tree_leaves(self.inputs))
        tensors = {input_key(str(index)): v for index, v in parts if isinstance(v, Tensor)}
        sizes = [value.shape[0] for value in tensors.values() if value.ndim]
        if not sizes or not sizes[0]:
            raise ConfigError("inputs: no tensor with rows.", "Give a tensor with at least one.")
        chosen = (torch.arange(rows) + seed) % sizes[0]
        batch = {
            name: value[chosen] if value.ndim and value.shape[0] == sizes[0] else value
            for name, value in tensors.items()
        }
        return [{**batch, "mask": torch.ones(rows)}]


def _default_loss(output: Any, inputs: Any) -> Tensor:
    """The output's own `loss`, else the mean of the squares of all its floating tensors."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    squares = [value.float().square().mean() for value in tensors_in(output)]
    if not squares:
        raise ConfigError("the model returns no floating tensor.", "Give `loss=`.")
    return torch.stack(squares).sum()


# -- what is asserted ----------------------------------------------------------------------------
def _fits(source: TaskSource, target: Target, batch: int, seconds: float) -> list[str]:
    """What the trace and the TPU compiler find."""
    try:
        with CompilerEvaluator(source, TrainConfig(), target, seconds) as evaluator:
            trial = evaluator.evaluate(TrialRequest(batch))
            if trial.fits and (trial.used_bytes or 0) > NEARLY_FULL * (trial.limit_bytes or 0):
                trial = evaluator.evaluate(TrialRequest(batch, effort="full", evaluate=False))
    except TpukitError as error:
        if error.id not in ("leaves-device", "task-failed"):
            raise
        return [f"{error.message} {error.hint or ''}".strip()]
    return [] if trial.fits else [_too_large(trial, target, batch)]


def _too_large(trial: Trial, target: Target, batch: int) -> str:
    wanted = f"{trial.used_bytes / GIB:.2f}" if trial.used_bytes else "more than the"
    text = f"batch {batch} does not fit a {target.name}: {wanted}"
    text += f" of {(trial.limit_bytes or 0) / GIB:.2f} GiB."
    largest = [
        f"{(each.get('size_bytes') or 0) / GIB:.2f} GiB {each.get('shape')} at {each['place']}"
        for each in trial.largest
        if is_model_code(str(each.get("place"))) and each.get("place")
    ]
    return f"{text} Largest: {'; '.join(largest[:2])}." if largest else text


def _equals(
    source: TaskSource, devices: int, tolerance: float, seconds: float, *, known: bool
) -> list[str]:
    """What the steps on virtual devices find.

    known: a failure was found that can make operators leave the device and programs change.
    """
    found, error = in_process(_compare, (source, devices, tolerance), seconds)
    if error is not None:
        return [f"the step fails on {devices} virtual devices: {error}"]
    failures = []
    off = {kind: value for kind, value in found.differences.items() if not value <= tolerance}
    if off:
        kind, name = found.worst
        by = ", ".join(f"{what} by {value:.1e}" for what, value in off.items())
        failures.append(
            f"a step differs from the CPU's: {by} (at most {tolerance:.0e}); most in {kind}"
            f" of `{name}`."
        )
    if found.fallbacks and not known:
        failures.append(f"{' and '.join(found.fallbacks)} left the device in a step.")
    elif found.compilations and not found.fallbacks:
        place, error = in_process(_first_change, (source,), seconds, "spawn")
        where = f"The third step's program differs in {place}."
        if place is None:
            where = (
                f"Where they differ is not known: {error or 'no line of the model is recorded'}."
            )
        failures.append(
            f"{found.compilations} programs were compiled after the second step. {where}"
        )
    return failures


def _compare(source: TaskSource, devices: int, tolerance: float) -> Parity:
    on_virtual_devices(devices)
    task = carried_task(**source.arguments)
    assert isinstance(task, SeededTask)
    if os.environ["XLA_FLAGS"] == UNOPTIMIZED and _convolutions(task) > LARGE_FLOPS:
        os.environ["XLA_FLAGS"] = LIGHTLY_OPTIMIZED
    with watched_memory(limited=False):
        return compare_steps(task, devices, tolerance)


def _convolutions(task: SeededTask) -> float:
    """Floating-point operations of the convolutions of a sample's forward pass; 0 if unknown."""
    rows = 2  # batch statistics take more than one
    try:
        # With gradients the counter refuses a forward pass that calls `autograd.grad`.
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            task.loss(task.build_model(TorchOps()), task.seeded_batches(rows)[0])
    except Exception:  # that one too needs gradients; other errors are the comparison's
        return 0.0
    return float(counter.get_flop_counts()["Global"].get(torch.ops.aten.convolution, 0)) / rows


def _first_change(source: TaskSource) -> str | None:
    os.environ.update(COMPILER_ENVIRONMENT, CPU_NUM_DEVICES="1", **find_client().environment)
    task = carried_task(**source.arguments)
    from tpukit.probe.compiler.trace import first_change, open_tracing

    backend = open_tracing("fp32", shard=False, fused=False)
    return first_change(task, TrainConfig(), backend, rows=8)


# -- processes -----------------------------------------------------------------------------------
def in_process(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    seconds: float,
    method: str = "forkserver",
) -> tuple[Any, str | None]:
    """(result, None) of a function in a process of its own, or (None, why there is none).

    method: "spawn" where torch_xla reads variables that the function sets.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    try:
        answer: tuple[Any, str | None] = TimedCall(
            _answer, (function, arguments), seconds, method
        ).wait()
    except TimeoutError:
        return None, f"no result within {seconds:.0f} s"
    except EndedError as ended:
        death = Death(ended.exit_code, "")
        error = f"its process {death.describe()}"
        if death.is_out_of_memory(limited=False):
            error += ": this machine's memory is too small; fewer `devices` need less"
        return None, error
    return answer


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
    try:
        return function(*arguments), None
    except Exception as error:
        frame = model_frame(error)
        place = f", at {frame.filename}:{frame.lineno}: `{frame.line}`" if frame else ""
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text}{place}"
