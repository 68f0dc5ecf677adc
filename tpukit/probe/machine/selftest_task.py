"""The task that the self-test trains, kills and resumes: small, with drop-out and EMA weights."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from tpukit.hardware.backend import Batch, ModelOps
from tpukit.train.task import Datasets, PlanSettings, Task, TrainingDefaults, stack_samples

WIDTH = 32
SAMPLES = 256


class NoisySums:
    """Rows of numbers and their sum, made from the index alone."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray[Any, Any]]:
        x = np.random.default_rng(index).standard_normal(WIDTH, dtype=np.float32)
        return {"x": x, "y": x.sum()}


class SelfTestTask(Task):
    """Learns sums.

    kill_at: the step whose log line ends the process by SIGKILL; 0: none. kill_above: the samples a
    device above which a trial of the batch search ends so; 0: none.
    """

    name = "selftest"
    source = None
    defaults = TrainingDefaults(global_batch_size=32, max_steps=20, ema_decay=0.9)

    def __init__(self, kill_at: int = 0, kill_above: int = 0) -> None:
        self.kill_at = kill_at
        self.kill_above = kill_above

    def build_model(self, ops: ModelOps) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, 1)
        )

    def datasets(self) -> Datasets:
        return Datasets(NoisySums(), None)

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": (model(batch["x"]).float()[:, 0] - batch["y"]).square()}

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        if 0 < self.kill_above < settings.micro_rows / settings.devices:
            os.kill(os.getpid(), signal.SIGKILL)
        return [stack_samples([NoisySums()[0]] * settings.micro_rows, settings.micro_rows)]

    def on_log(self, row: Mapping[str, Any]) -> None:
        if self.kill_at and row["step"] >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
