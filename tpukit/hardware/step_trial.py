"""The child of `device_trials.STEPS`: steps that are recorded against the same ones traced."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import (
    Average,
    Batch,
    OptimizerSettings,
    ParameterGroup,
    StepSums,
    Trained,
)
from tpukit.hardware.device_trials import answer_parent
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend

STEPS = 5
"""Two are recorded, three run."""


def step_answers(options: HardwareOptions) -> Iterator[dict[str, Any]]:
    """What the parent reads: the first answer says that the device has opened."""
    backend: Any = open_backend(options)
    yield {"next": "a recorded step", "reason": "", "errors": {}}
    expected = TrialSteps(backend).state()
    backend.record_steps()
    recorded = backend.recorded
    found = TrialSteps(backend).state()
    wrong = [name for name, tensor in expected.items() if not found[name].equal(tensor)]
    reason = f"{wrong[0]} differs from a traced step's" if wrong else ""
    if recorded.executed != STEPS - 2:
        reason = reason or "a step is not recorded"
    yield {"next": "", "reason": reason, "errors": {}}


class TrialSteps(Trained):
    """A small model after a few steps of changing rates, with dropout and EMA weights."""

    clip_norm = 1.0
    after_step = None

    def __init__(self, backend: Any) -> None:
        torch.manual_seed(0)
        self.backend = backend
        layers = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4)
        self.model = backend.prepare(nn.Sequential(*layers))
        trained = list(self.model.parameters())
        self.optimizer = backend.optimizer([ParameterGroup(trained, 0.01)], OptimizerSettings())
        self.averages = [parameter.detach().clone() for parameter in trained]
        self.step_sums = StepSums(2, backend.device)
        self.finite = torch.ones(len(trained), device=backend.device)
        backend.finish()
        for step in range(STEPS):
            rows = torch.randn(8 * backend.devices, 16)
            [batch] = backend.batches([{"x": rows, "mask": torch.ones(len(rows))}])
            backend.load_state({"seed": step})
            backend.train_step(self, [batch], 1e-2 / (step + 1), step % 2 / 2)

    def forward(self, batch: Batch) -> Tensor:
        with self.backend.autocast():
            loss = self.model(batch["x"]).float().square().mean()
        return torch.stack([torch.ones_like(loss), loss])

    def average(self, weight: float | Tensor) -> Average:
        sources = [parameter.detach() for parameter in self.model.parameters()]
        return Average(self.averages, sources, weight)

    def record(self, totals: Tensor, weight: Tensor, norm: Tensor) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        averages = {f"average {place}": tensor for place, tensor in enumerate(self.averages)}
        host: dict[str, Tensor] = self.backend.to_host({**self.model.state_dict(), **averages})
        return host


if __name__ == "__main__":
    sys.exit(answer_parent(step_answers, sys.argv[1:], kernels="off", step_mode="traced"))
