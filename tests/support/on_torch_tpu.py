"""Cases on torch_tpu over the CPU plugin, one a process: python on_torch_tpu.py CASE."""

from __future__ import annotations

import copy
import json
import sys

import torch
import torch.nn.functional as F

from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend

STEPS = 20


def opened(precision="fp32", **options):
    return open_backend(HardwareOptions(hw="tpu", precision=precision, **options))


def generators():
    """Dropout after the generators were restored, and before."""
    backend = opened()
    backend.load_state({"seed": 2**62 + 5})
    first = dropout(backend)
    state = backend.state()
    second = dropout(backend)
    backend.load_state(json.loads(json.dumps(state)))
    return {"first": first, "second": second, "again": dropout(backend)}


def dropout(backend):
    return F.dropout(torch.ones(64, device=backend.device), 0.5).tolist()


def precision():
    """Largest relative error of a matrix product in fp32, and the type of one under autocast."""
    backend = opened()
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 64, 64, generator=generator)
    product = left.to(backend.device) @ right.to(backend.device)
    exact = left.double() @ right.double()
    with backend.autocast("bf16"):
        lower = left.to(backend.device) @ right.to(backend.device)
    return {
        "error": float((product.cpu() - exact).abs().max() / exact.abs().max()),
        "setting": torch.get_float32_matmul_precision(),
        "autocast": str(lower.dtype),
    }


def strided_batches():
    """A batch of views with other strides, through a compiled model and its backward pass."""
    backend = opened()
    model = backend.prepare(torch.nn.Linear(8, 4))
    host = torch.arange(64.0).view(8, 8)
    for batch in backend.batches([{"x": host.t()}, {"x": host.t()}]):
        loss = model(batch["x"]).square().sum()
        backend.backward(loss)
    return {"gradient": [p.grad.abs().sum().item() for p in model.parameters()]}


def batch_norm():
    """Running statistics after three steps in bf16, compiled, and those of the CPU in fp32."""
    backend = opened("bf16")
    torch.manual_seed(0)
    cpu = torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 3))
    tpu = backend.prepare(copy.deepcopy(cpu))
    for _ in range(3):
        images = torch.randn(8, 4, 9, 9) + 1
        cpu(images)
        with backend.autocast():
            outputs = tpu(images.to(backend.device))
        backend.backward(outputs.float().sum())
    return {
        place: [*norm.running_mean.tolist(), *norm.running_var.tolist()]
        for place, norm in (("cpu", cpu[0]), ("tpu", backend.unwrap(tpu)[0]))
    }


def zoo(name):
    """Differences from the CPU's state after 20 steps of a model of the zoo, by way to run them."""
    from zoo_models import Zoo, entries
    from zoo_stages import ROWS, differences, state, without_dropout

    from tpukit.train.config import TrainConfig
    from tpukit.train.learner import build_learner

    task, config = Zoo(entries()[name]), TrainConfig(ema_decay=0.9)
    torch.manual_seed(0)
    model = task.build_model(opened())

    def trained(backend, accumulate=1):
        learner = build_learner(task, backend, copy.deepcopy(model), config)
        with without_dropout(learner.model):
            for step in range(STEPS):
                seeds = range(step * accumulate, (step + 1) * accumulate)
                host = [batch for seed in seeds for batch in task.example_batches(ROWS, seed)]
                learner.train_step(list(backend.batches(host)), 1e-3)
        return state(learner)

    cpu = open_backend(HardwareOptions(hw="cpu", precision="fp32", compile=False))
    once, twice = trained(cpu), trained(cpu, accumulate=2)
    return {
        "compiled": differences(trained(opened(compile=True)), once),
        "eager": differences(trained(opened(compile=False)), once),
        "accumulated": differences(trained(opened(compile=True), accumulate=2), twice),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
