"""Tasks whose memory grows with the batch, and tasks that fail in every way a trial may meet."""

import ctypes
import os
import signal
import time

import numpy as np
import torch
from torch import nn

from tpukit.train.task import Datasets, Task, TrainingDefaults, stack_samples


class Rows:
    """256 samples of noise."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(index)
        return {"x": rng.standard_normal(64, dtype=np.float32)}


class Hungry(Task):
    """A wide layer: each row's activations take a few MB, the weights next to nothing."""

    defaults = TrainingDefaults(global_batch_size=8, max_steps=2, ema_decay=0.9)

    def __init__(self, width: int = 1_048_576, bad_rows: int = 0, data_path: str = "") -> None:
        self.width = width
        self.bad_rows = bad_rows

    def build_model(self, ops) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 8), Spread(self.width), nn.GELU(), nn.Tanh())

    def datasets(self) -> Datasets:
        return Datasets(Rows(), Rows())

    def loss(self, model, batch):
        if len(batch["x"]) >= self.bad_rows > 0:
            self.misbehave(batch)
        return {"loss": model(batch["x"]).float().square().mean(1)}

    def misbehave(self, batch) -> None:
        """What a batch of `bad_rows` rows or more does."""

    def probe_batches(self, settings):
        rows = settings.micro_rows
        return [stack_samples([Rows()[0]] * rows, rows)]


class Formed(Hungry):
    """Wide, or narrow."""

    def forms(self):
        return [self, Hungry(self.width // 4)]


class Opens(Hungry):
    """Gives no examples: a trial opens its data."""

    probe_batches = Task.probe_batches


class Spread(nn.Module):
    """Repeats eight values to `width` of them, each scaled by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = self.scale.shape[0] // x.shape[1]
        return x.unsqueeze(1).expand(-1, copies, -1).flatten(1) * self.scale


class Library(Hungry):
    """Takes 600 MB when it is built, as a task's libraries and tables do."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.table = np.ones(600_000_000, np.uint8)


class WideSamples(Rows):
    """Samples of 4 MB."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.full(1_000_000, 0.01 * index, np.float32)}


class Wide(Hungry):
    """Batches that are large beside what is computed of them."""

    def build_model(self, ops) -> nn.Module:
        return nn.Linear(64, 8)

    def datasets(self) -> Datasets:
        return Datasets(WideSamples(), WideSamples())

    def loss(self, model, batch):
        return {"loss": model(batch["x"][:, :64]).float().square().mean(1)}

    def probe_batches(self, settings):
        rows = settings.micro_rows
        return [stack_samples([WideSamples()[0]] * rows, rows)]


class Hangs(Hungry):
    """Never ends."""

    def misbehave(self, batch) -> None:
        time.sleep(3600)


class Cublas(Hungry):
    """Fails as cuBLAS does where it gets no memory for itself."""

    def misbehave(self, batch) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate")


class Crashes(Hungry):
    """Reads where there is no memory."""

    def misbehave(self, batch) -> None:
        ctypes.string_at(0)


class Killed(Hungry):
    """Is killed as by the system when memory runs out."""

    def misbehave(self, batch) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Mistaken(Hungry):
    """Has a mistake that has nothing to do with memory."""

    def misbehave(self, batch) -> None:
        raise TypeError("a matrix was expected")


class Reads(Hungry):
    """Reads a value in the middle of the step."""

    def misbehave(self, batch) -> None:
        self.seen = batch["x"].sum().item()


class FallsBack(Hungry):
    """Uses an operation whose gradient XLA does not have."""

    def build_model(self, ops) -> nn.Module:
        return Distances()


class Distances(nn.Module):
    """The distances between rows, whose gradient XLA lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.enter(x) + nn.functional.pdist(self.enter(x)).mean()


class Selects(Hungry):
    """Its shape depends on values."""

    def misbehave(self, batch) -> None:
        self.seen = batch["x"][batch["x"] > 0].sum()
