"""A task that trains in milliseconds: a small network on synthetic regression data."""

import ctypes
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tpukit.errors import DataError
from tpukit.train import checkpoint_writer
from tpukit.train.task import Datasets, Task, TrainingDefaults, stack_samples


class Rows:
    """`count` samples made from the index alone."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        self.count = count
        self.bad = bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(index)
        x = rng.standard_normal(8, dtype=np.float32)
        y = np.sin(x[:2]) + 0.1 * rng.standard_normal(2, dtype=np.float32)
        if index == self.bad:
            y[:] = np.inf
        return {"x": x, "y": y.astype(np.float32)}


class Tiny(Task):
    """A two-layer network; `dropout` and `noise` make it depend on the generators."""

    name = "tiny"
    # Its rows spare each run the estimate of its memory, half of a short run's time on a CPU.
    defaults = TrainingDefaults(
        global_batch_size=16, max_steps=20, lr=1e-3, rows_per_device=1024,
        ema_decay=0.9, ema_every=3, ema_warmup=6, weight_decay=0.01,
    )  # fmt: skip

    def __init__(
        self,
        samples: int = 64,
        width: int = 32,
        dropout: float = 0.0,
        noise: float = 0.1,
        bad: int | None = None,
        pause: float = 0.0,
        data_path: str = "",
    ) -> None:
        self.samples = samples
        self.width = width
        self.dropout = dropout
        self.noise = noise
        self.bad = bad
        self.pause = pause

    def identity(self):
        return {"width": self.width, "samples": self.samples}

    def build_model(self, ops) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, self.width), nn.GELU(), nn.Dropout(self.dropout),
            nn.LayerNorm(self.width), nn.Linear(self.width, 2),
        )  # fmt: skip

    def datasets(self) -> Datasets:
        if self.samples == 0:
            raise DataError("There is no sample.", "Ask for some.")
        kept = {"note.txt": b"kept with the run"}
        return Datasets(Rows(self.samples, self.bad), Rows(10), kept)

    def draw(self, sample, rng):
        noise = self.noise * rng.standard_normal(8, dtype=np.float32)
        return {**sample, "x": sample["x"] + noise}

    def loss(self, model, batch):
        time.sleep(self.pause)
        error = (model(batch["x"]).float() - batch["y"]).square().mean(1)
        return {"loss": error, "worst": error.detach().sqrt()}

    def probe_batches(self, settings):
        rows = settings.micro_rows
        sample = {"x": np.zeros(8, np.float32), "y": np.zeros(2, np.float32)}
        return [stack_samples([sample] * rows, rows)]


class Weighted(Tiny):
    """Rows that count differently, and a 0-d loss."""

    name = "weighted"

    def loss(self, model, batch):
        error = (model(batch["x"]).float() - batch["y"]).square().mean(1)
        weight = (batch["x"][:, 0].abs() + 0.1) * batch["mask"]
        total = weight.sum()
        return {"loss": (error * weight).sum() / total, "weight": total}


class Container(Tiny):
    """Two networks in a dict, as a GAN has them, and a matrix of the dict's own."""

    name = "container"

    def build_model(self, ops):
        parts = nn.ModuleDict({"body": super().build_model(ops), "head": nn.Linear(2, 2)})
        parts.own = nn.Parameter(torch.eye(2))
        parts.register_buffer("shift", torch.ones(2))
        return parts

    def loss(self, model, batch):
        found = model["head"](model["body"](batch["x"])) @ model.own + model.shift
        return {"loss": (found - batch["y"]).square().mean(1)}


class Routed(Tiny):
    """Each rank's rows go through another one of two layers of the same shape."""

    name = "routed"

    def __init__(self, stacked: bool = True):
        super().__init__()
        self.stacked = stacked

    def build_model(self, ops):
        return nn.ModuleDict({"body": Router(stacked=self.stacked), "head": nn.Linear(8, 2)})

    def loss(self, model, batch):
        found = model["head"](model["body"](batch["x"]))
        return {"loss": (found - batch["y"]).square().mean(1)}


class Router(nn.Module):
    def __init__(self, *, stacked: bool):
        super().__init__()
        layers = [nn.Linear(8, 8) for _ in range(2)]
        kind = nn.ModuleList if stacked else nn.Sequential
        self.layers = kind(*([layers] if stacked else layers))

    def forward(self, x):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self.layers[rank](x)


class Broken(Tiny):
    """Raises in its loss."""

    name = "broken"

    def loss(self, model, batch):
        raise RuntimeError("the loss of this task is broken")


class BrokenOnOne(Broken):
    """Raises in rank 1; rank 0 is ended before it says anything."""

    def loss(self, model, batch):
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(60)
        return super().loss(model, batch)


class Exploding(Tiny):
    """From a step on, or above a number of rows, the loss needs more memory than there is."""

    name = "exploding"

    def __init__(self, step: int = 10**6, rows: int = 10**6, **settings) -> None:
        super().__init__(**settings)
        self.step = step
        self.most_rows = rows
        self.calls = 0

    def loss(self, model, batch):
        self.calls += 1
        outputs = super().loss(model, batch)
        if self.calls >= self.step or len(batch["x"]) > self.most_rows:
            large = torch.ones(2**20, 2**20, device=batch["x"].device)
            outputs["loss"] = outputs["loss"] * large[0, 0]
        return outputs


class Stuck(Tiny):
    """Waits outside of Python from the third step on, as for a device.

    Of several ranks the second waits, and the first for it.
    """

    passes = 0

    def loss(self, model, batch):
        self.passes += 1
        if self.passes == 3 and os.environ.get("RANK", "1") == "1":
            Path(os.environ["STUCK_FILE"]).touch()
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        return super().loss(model, batch)


class SlowSaving(Tiny):
    """Each file of a checkpoint takes a second; a file `saving` is there meanwhile."""

    name = "slow-saving"

    def build_model(self, ops):
        write = checkpoint_writer.save_file

        def slow(tensors, path):
            marker = Path("saving")
            marker.touch()
            time.sleep(1.0)
            write(tensors, path)
            marker.unlink()

        checkpoint_writer.save_file = slow
        return super().build_model(ops)
