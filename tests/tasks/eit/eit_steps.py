"""A few training steps and one sampling of a narrow EIT network on a backend.

python eit_steps.py OUT HW: losses, images and, on XLA, what left the device go to OUT (torch.save).
"""

import sys

import torch

from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend, prepare_environment
from tpukit.tasks.eit.model import network
from tpukit.tasks.eit.model.diffusion import View
from tpukit.tasks.eit.task import EITTask
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner
from tpukit.train.task import PlanSettings

ROWS = 8


def main(out: str, hw: str) -> None:
    network.SIZES["tiny"] = network.NetworkConfig(width=32, heads=2, levels=1, patch=8)
    options = HardwareOptions(hw=hw, precision="fp32")  # type: ignore[arg-type]
    prepare_environment(options)
    backend = open_backend(options)
    task = EITTask(size="tiny")
    torch.manual_seed(0)
    model = task.build_model(backend)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    learner = build_learner(task, backend, model, TrainConfig(ema_decay=0.9))
    losses, compiled = [], []
    for batch in backend.batches(task.probe_batches(PlanSettings(ROWS, ROWS, 1, 0)) * 4):
        learner.train_step([batch], lr=1e-3)
        losses.append(learner.read_metrics().means["loss"])
        compiled.append(backend.compilations())
    maps = task.probe_batches(PlanSettings(ROWS, ROWS, 1, 0))[0]["voltages"].numpy()[:5]
    learner.model.eval()
    images = (
        task.trained(learner.model, backend)
        .sampler(ROWS)
        .reconstruct(learner.model, backend, [View(maps)], 2)
    )
    left = []
    if hw == "tpu":
        import torch_xla.debug.metrics as met

        left = met.executed_fallback_ops()
    torch.save(
        {"losses": losses, "mean": torch.from_numpy(images.mean), "left": left,
         "compiled": compiled, "devices": backend.devices},
        out,
    )  # fmt: skip
    backend.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
