"""One optimizer step of a task in fp32: what the device makes of it, and what the CPU makes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tpukit.hardware.backend import Backend
from tpukit.probe.trial import TASK_FACTORY
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner, seed_everything
from tpukit.train.loader import example_batches
from tpukit.train.task import PlanSettings, Task

ROWS = 8
"""Minimum number of samples; the batch is a multiple of the devices."""
LARGEST_ERROR = 0.02
"""Maximum relative error of the loss, and of all weight changes together, against the CPU."""
NOISE = 0.05
"""Standard deviation of the noise on the weights: a zeroed layer has zero gradients below it."""
CONFIG = TrainConfig(optimizer="sgd", momentum=0.0, clip_norm=None, precision="fp32")
"""Settings of a step that is linear in the gradient (Adam's first step is the gradient's sign)."""


def compare_or_keep(
    backend: Backend, spec: str, settings: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Keeps this device's step in `folder`; where one is kept, compares with it."""
    file = folder / "step.safetensors"
    kept = load_file(file) if file.exists() else {}
    module, _, name = TASK_FACTORY.partition(":")
    task: Task = getattr(importlib.import_module(module), name)(spec, settings, "")
    task = task.for_probing()
    batch = {n.removeprefix("batch."): t for n, t in kept.items() if n.startswith("batch.")}
    batch = batch or _host_batch(task, backend.devices)
    found = _take_step(task, backend, batch)
    if not kept:
        save_file({**found, **{f"batch.{n}": t.contiguous() for n, t in batch.items()}}, file)
        loss = float(found["loss"])
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss of a step is {loss}")
        return {"message": f"loss {loss:.4g}", "values": {"loss": loss}}
    return _compared(kept, found)


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


def _take_step(task: Task, backend: Backend, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and each weight's change."""
    seed_everything(0)
    model = task.build_model(backend)
    _add_noise(model)
    learner = build_learner(task, backend, model, CONFIG)
    before = backend.to_host(dict(backend.unwrap(learner.model).named_parameters()))
    for sent in backend.batches([dict(batch)]):
        learner.train_step([sent], lr=1.0)
    loss = learner.read_metrics().means["loss"]
    after = backend.to_host(dict(backend.unwrap(learner.model).named_parameters()))
    changes = {f"change.{n}": (after[n] - before[n]).contiguous() for n in before}
    return {"loss": torch.tensor(loss), **changes}


def _add_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(NOISE * noise)


def _compared(device: Mapping[str, Tensor], cpu: Mapping[str, Tensor]) -> dict[str, Any]:
    names = [name for name in cpu if name.startswith("change.")]
    ours = torch.cat([device[name].double().flatten() for name in names])
    theirs = torch.cat([cpu[name].double().flatten() for name in names])
    loss, expected = float(device["loss"]), float(cpu["loss"])
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
