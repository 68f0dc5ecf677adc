"""The settings of EIT: the task's own, the training's defaults by size, the options of `test`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tpukit.io.ranges import Range, setting
from tpukit.tasks.eit.model.diffusion import Diffusion
from tpukit.tasks.eit.model.network import SIZES, NetworkConfig
from tpukit.train.task import TrainingDefaults

STEPS = Range(1, Diffusion.steps)
"""Range of the number of sampling steps."""

PUBLISHED_TRAINING = TrainingDefaults(
    global_batch_size=64,
    max_steps=200_000,
    lr=1e-5,
    clip_norm=1.0,
    ema_decay=0.995,
    ema_every=10,
    ema_updates="ema_pytorch-0.5.2",
    ckpt_every=500,
)
"""Adam 1e-5, clip 1, 200,000 steps, EMA 0.995 every 10 steps with its warm-up of 100, by the pinned
ema_pytorch 0.5.2 (public code of Shi et al., 2025). It trains on 16 samples a process; 64 is the
total of four."""

SMALL_TRAINING = replace(
    PUBLISHED_TRAINING,
    epochs=10,
    max_steps=None,
    lr=1e-3,
    schedule="cosine",
    warmup_steps=50,
    final_lr_fraction=0.01,
    ema_decay=0.95,
    ema_updates="ema_pytorch",
)
"""Runs of a thousand steps: the EMA must forget the initial weights within them."""

TRAINING: dict[str, TrainingDefaults] = {
    "tiny": SMALL_TRAINING,
    "small": SMALL_TRAINING,
    "published": PUBLISHED_TRAINING,
}


@dataclass(frozen=True)
class EITConfig:
    """The task's settings."""

    size: Literal["tiny", "small", "published"] = "published"
    """tiny, small or published."""
    data_path: str = "./data"
    """Folder with train/, valid/ and test/."""
    sampling_steps: int = setting(5, STEPS)
    """DDIM steps from noise to an image."""
    loss: Literal["l1", "l2"] | None = None
    """Loss on the clean image: l1 (mean absolute error) or l2 (mean squared error). None: l1, as
    published, for the published size, else l2."""
    refinement: bool | None = None
    """Convolutions over the assembled image, which see across patches. None: for tiny and small."""

    def problems(self) -> Iterator[str]:
        """What is wrong beyond types and ranges."""
        if self.refinement and not SIZES[self.size].refinement_channels:
            yield f"size {self.size} has no refinement: leave it out, or false."

    @property
    def network(self) -> NetworkConfig:
        network = SIZES[self.size]
        return replace(network, refinement_channels=0) if self.refinement is False else network

    @property
    def error(self) -> Callable[[Tensor], Tensor]:
        """The loss of each pixel's error."""
        loss = self.loss or ("l1" if self.size == "published" else "l2")
        return torch.abs if loss == "l1" else torch.square


@dataclass(frozen=True)
class SamplingOptions:
    """Options of `test`."""

    sampling_steps: int | None = setting(None, STEPS)
    """DDIM steps from noise to an image (default: the run's, 5)."""
    samples: int = setting(1, Range(1, 10**6))
    """Images per measurement; their mean is evaluated."""
