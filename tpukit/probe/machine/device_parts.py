"""Parts of `doctor` that open the device: it adds, multiplies, trains, generates and runs out."""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tpukit.hardware.backend import Backend
from tpukit.hardware.memory import is_out_of_memory
from tpukit.hardware.options import HardwareOptions, Precision
from tpukit.hardware.select import are_virtual, find_kind, open_backend
from tpukit.io.units import format_bytes
from tpukit.probe.machine.selftest_task import SelfTestTask
from tpukit.probe.trial import MEMORY_UNKNOWN
from tpukit.registry.classes import find_task, load_task
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner, seed_everything
from tpukit.train.loader import example_batches
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder
from tpukit.train.task import PlanSettings, Task, for_probing

Answer = dict[str, Any]
# The kernels are a part of their own.
EXACT: Mapping[str, Any] = {"precision": "fp32", "kernels": "off"}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "live": {}, "device": EXACT, "sharded": {**EXACT, "shard": True}
}  # fmt: skip
"""Options of the backend by the kind of child."""
MATRIX = 256
LARGEST_PRODUCT_ERROR = {"fp32": 2e-2, "bf16": 5e-2, "fp16": 2e-2}
"""Maximum error relative to the largest entry; a TPU multiplies fp32 in bf16 passes."""
SIDE = 2**24
"""Side of a square of fp32 numbers that takes a petabyte."""
ROWS = 8
"""Minimum number of samples; the batch is a multiple of the devices."""
LARGEST_ERROR = 0.02
"""Maximum relative error of the loss, and of all weight changes together, against the CPU."""
NOISE = 0.05
"""Standard deviation of the noise on the weights: a zeroed layer has zero gradients below it."""
LINEAR = TrainConfig(optimizer="sgd", lr=1.0, momentum=0.0, clip_norm=None, precision="fp32")
"""Settings of a step that is linear in the gradient (Adam's first step is the gradient's sign)."""


class DeviceParts:
    """Parts that open the device, one process for all of them."""

    def __init__(self, hw: Any, kind: str = "device") -> None:
        self.options = HardwareOptions(hw, compile=False, **OPTIONS[kind])

    @cached_property
    def backend(self) -> Backend:
        """The device; of GPUs one, as several would need a launcher."""
        devices = 1 if find_kind(self.options) == "gpu" else None
        return open_backend(replace(self.options, devices=devices))

    def opens(self) -> Answer:
        """Opens the device and adds on it."""
        self._add()
        backend, kind = self.backend, self.backend.describe()["hardware"]
        devices = f"{backend.devices} devices, {backend.precision}"
        return {"message": f"{kind} ({backend.device}), {devices}"}

    def _add(self) -> None:
        ones = torch.ones(8, device=self.backend.device)
        total = float(self.backend.to_host({"total": ones.sum()})["total"])
        if total != 8.0:
            raise RuntimeError(f"eight ones add up to {total} on {self.backend.device}")

    def devices(self) -> Answer:
        """Opens the device, adds on it, and reads its memory."""
        self._add()
        memory, described = self.backend.usage().memory, self.backend.describe()
        text = ", ".join(f"{name} {value}" for name, value in described.items())
        values: Answer = {**described, "devices": self.backend.devices}
        if memory is not None:
            values |= {"memory_used_bytes": memory.used, "memory_limit_bytes": memory.limit}
            limit = f" of {format_bytes(memory.limit)}" if memory.limit else ""
            text += f"; memory {format_bytes(memory.used)}{limit} used on the fullest"
        answer = {"message": text, "values": values}
        if memory is None and not are_virtual(values["hardware"]):
            answer["warning"] = MEMORY_UNKNOWN
        return answer

    def products(self) -> Answer:
        """A product in fp32 and one in the precision of training, each against float64's."""
        backend, generator = self.backend, torch.Generator().manual_seed(0)
        left, right = torch.randn(2, MATRIX, MATRIX, generator=generator)
        exact = left.double() @ right.double()
        wanted: tuple[Precision, ...] = ("fp32", "fp16" if backend.precision == "fp16" else "bf16")
        said = []
        for precision in wanted:
            with backend.autocast(precision):
                product = left.to(backend.device) @ right.to(backend.device)
            host = backend.to_host({"product": product.float()})["product"].double()
            error = float((host - exact).abs().max() / exact.abs().max())
            if not error <= LARGEST_PRODUCT_ERROR[precision]:
                raise RuntimeError(
                    f"{precision} differs from float64 by {error:.1e} of the largest"
                )
            said.append(f"{precision} within {error:.0e}")
        return {"message": ", ".join(said)}

    def two_steps(self) -> Answer:
        """Two steps of the engine: the second shows whether the first left things sound."""
        task, backend = SelfTestTask(), self.backend
        batch = _host_batch(task, backend.devices)
        found = _take_steps(task, backend, [batch, batch], TrainConfig(lr=1e-2))
        if not any(t.any() for name, t in found.items() if name != "loss"):
            raise RuntimeError("a training step left every weight as it was")
        return {"message": f"loss {float(found['loss']):.3g} in {backend.precision}"}

    def step(self, task: str, settings: Mapping[str, Any], folder: str) -> Answer:
        """A step in fp32: compared with the one that `folder` has, or kept there."""
        file = Path(folder) / "step.safetensors"
        kept = load_file(file) if file.exists() else {}
        built = for_probing(load_task(task, settings, ""))
        batch = {n.removeprefix("batch."): t for n, t in kept.items() if n.startswith("batch.")}
        batch = batch or _host_batch(built, self.backend.devices)
        found = _take_steps(built, self.backend, [batch], LINEAR)
        if kept:
            return _compared(kept, found)
        save_file({**found, **{f"batch.{n}": t.contiguous() for n, t in batch.items()}}, file)
        loss = float(found["loss"])
        return {"message": f"loss {loss:.4g}", "values": {"loss": loss}}

    def own(self, task: str, name: str) -> Answer:
        """A part that a task declares."""
        answer: Answer = find_task(task).selftest_parts[name]().run(self.backend)
        return answer

    def out_of_memory(self) -> Answer:
        """Allocates more than any device holds: the failure must count as a lack of memory."""
        side = torch.ones(SIDE, device=self.backend.device)
        try:
            self.backend.to_host({"products": side[:, None] * side[None]})
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if is_out_of_memory(error):
                return {"message": f"recognised: {text}"}
            return {"error": f"not recognised: {text}", "fix": ""}
        return {"error": "a petabyte fitted", "fix": ""}

    def train(self, folder: str, steps: int, kill_at: int) -> Answer:
        """A run of the self-test's task, or the rest of one that was killed."""
        config = TrainConfig(
            global_batch_size=4 * self.backend.devices, max_steps=steps, ckpt_every=5,
            log_every=1, ema_decay=0.9, ema_warmup=5, num_workers=0,
        )  # fmt: skip
        request = TrainingRequest(SelfTestTask(kill_at), config, RunFolder(Path(folder)))
        result = train_run(request, self.backend, lambda line: print(line, file=sys.stderr))
        values = {name: getattr(result, name) for name in
                  ("steps", "loss", "compilations", "compilations_after_warmup", "graphs",
                   "resumed_from", "samples_per_second")}  # fmt: skip
        message = (
            f"{result.steps} steps, {result.compilations} compilations, "
            f"{result.compilations_after_warmup} after the warm-up"
        )
        return {"message": message, "values": values}


# -- steps of the engine ---------------------------------------------------------------------------
def _host_batch(task: Task, devices: int) -> dict[str, Tensor]:
    rows = devices * math.ceil(ROWS / devices)
    batch = example_batches(task, PlanSettings(rows, rows, devices, 0))[0]
    generator = torch.Generator().manual_seed(2)
    # Rows that are all the same leave BatchNorm nothing but rounding.
    return {
        name: torch.randint(0, 256, t.shape, dtype=t.dtype, generator=generator)
        if t.dtype is torch.uint8
        else t
        for name, t in batch.items()
    }


def _take_steps(
    task: Task, backend: Backend, batches: list[dict[str, Tensor]], config: TrainConfig
) -> dict[str, Tensor]:
    """The loss, and each weight's change. Raises RuntimeError where the loss is not finite."""
    seed_everything(0)
    model = task.build_model(backend)
    _add_noise(model)
    learner = build_learner(task, backend, model, config)
    before = backend.to_host(dict(backend.unwrap(learner.model).named_parameters()))
    for sent in backend.batches(batches):
        learner.train_step([sent], lr=config.lr)
    loss = learner.read_metrics().means["loss"]
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss of a step is {loss}")
    after = backend.to_host(dict(backend.unwrap(learner.model).named_parameters()))
    changes = {f"change.{n}": (after[n] - before[n]).contiguous() for n in before}
    return {"loss": torch.tensor(loss), **changes}


def _add_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))


def _compared(kept: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Answer:
    """Of two steps, the device's and the CPU's, in the order in which they were taken."""
    names = [name for name in found if name.startswith("change.")]
    ours, theirs = (
        torch.cat([step[name].double().flatten() for name in names]) for step in (kept, found)
    )
    loss, expected = float(kept["loss"]), float(found["loss"])
    errors = {
        "loss": abs(loss - expected) / abs(expected),
        "weights": float((ours - theirs).norm() / theirs.norm()),
    }
    text = (
        f"loss {loss:.5g}, on the CPU {expected:.5g}; the weights' changes differ by"
        f" {errors['weights']:.1e}"
    )
    if not max(errors.values()) <= LARGEST_ERROR:
        fix = "Its results differ from the CPU's: send the report (docs/first_tpu.md)."
        return {"error": text, "fix": fix, "values": errors}
    return {"message": text, "values": errors}
