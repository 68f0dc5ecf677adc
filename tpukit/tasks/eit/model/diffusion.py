"""The diffusion process: linear betas, the clean image predicted, DDIM sampling.

Source: Ho et al., DDPM, 2020; Song et al., DDIM, 2021; settings of Shi, Kang and Liatsis, 2025.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.hardware.backend import Backend, Batch
from tpukit.tasks.eit.data.voltages import SYMMETRIES, Symmetry

Floats = NDArray[np.float32]
SAMPLING_STREAM = 1
"""Word of Philox' counter that keeps sampling's noise apart from training's draws."""


@dataclass(frozen=True)
class SamplingStep:
    """next = of_clean * predicted clean image + of_noisy * noisy image + of_noise * new noise."""

    time: int
    of_clean: float
    of_noisy: float
    of_noise: float


@dataclass(frozen=True)
class Diffusion:
    """How noise is added in training and removed in sampling: tables in float64 on the host."""

    steps: int = 1000
    """Diffusion times 0 to steps - 1."""
    first_beta: float = 1e-4
    last_beta: float = 0.02
    eta: float = 1.0
    """Noise put back in a sampling step: 1 as in DDPM, 0 none."""

    @cached_property
    def kept(self) -> NDArray[np.float64]:
        """Part of the clean image's variance left at each time (alpha bar)."""
        betas = np.linspace(self.first_beta, self.last_beta, self.steps)
        return np.cumprod(1 - betas).astype(np.float64)

    def noisy_parts(self, time: int) -> tuple[np.float32, np.float32]:
        """Factors of the clean image and of unit noise in the noisy image of this time."""
        kept = self.kept[time]
        return np.float32(np.sqrt(kept)), np.float32(np.sqrt(1 - kept))

    def sampling_steps(self, count: int) -> list[SamplingStep]:
        """DDIM over `count` equal parts of the process; the last step ends on the prediction."""
        times = np.trunc(np.linspace(-1, self.steps - 1, count + 1)).astype(int)[::-1]
        return [self._step(now, after) for now, after in pairwise(times)]

    def _step(self, now: int, after: int) -> SamplingStep:
        if after < 0:
            return SamplingStep(int(now), 1.0, 0.0, 0.0)
        kept, kept_after = self.kept[now], self.kept[after]
        variance = (1 - kept / kept_after) * (1 - kept_after) / (1 - kept)
        new_noise = self.eta * np.sqrt(variance)
        # The noise estimate is (noisy - sqrt(kept) clean) / sqrt(1 - kept): two terms of the sum.
        old_noise = np.sqrt(1 - kept_after - new_noise**2) / np.sqrt(1 - kept)
        of_clean = np.sqrt(kept_after) - old_noise * np.sqrt(kept)
        return SamplingStep(int(now), float(of_clean), float(old_noise), float(new_noise))


class Draw(NamedTuple):
    """One of the images sampled for one measurement."""

    sample: int
    """Index of the measurement: decides the noise, whatever batch it is in."""
    repeat: int
    """Which of its K images."""


def sampling_noise(seed: int, draw: Draw, steps: int, side: int) -> Floats:
    """All noise of one sampled image, (steps, side, side): the start, then each step's but the
    last.

    Images come in pairs with opposite noise (antithetic variates, Hammersley and Morton, 1956):
    to first order, what it adds to one it takes from the other.
    """
    if draw.repeat % 2:
        return -sampling_noise(seed, draw._replace(repeat=draw.repeat - 1), steps, side)
    bits = np.random.Philox(
        key=[seed, (draw.sample << 32) | draw.repeat], counter=[0, 0, 0, SAMPLING_STREAM]
    )
    return np.random.Generator(bits).standard_normal((steps, side, side), dtype=np.float32)


@dataclass(frozen=True)
class View:
    """The measurements as the network sees them for some of the images."""

    maps: Floats
    """(n, 1, 16, 16): their voltage maps."""
    symmetry: Symmetry = SYMMETRIES[0]
    """What was done to the voltages, and is undone in the images."""


@dataclass(frozen=True)
class Reconstructions:
    """Images (n, side, side) of n measurements."""

    single: Floats
    """The first sampled image of each."""
    mean: Floats
    """The mean of all K sampled images of each: an estimate of the posterior mean."""


@dataclass(frozen=True)
class Sampler:
    """Samples images on a backend, in batches of one shape and steps of one graph."""

    steps: Sequence[SamplingStep]
    side: int
    """Pixels along each side of an image."""
    rows: int
    """Batch size over all ranks."""
    seed: int

    def reconstruct(
        self,
        model: nn.Module,
        backend: Backend,
        views: Sequence[View],
        repeats: int,
        on_image: Callable[[], None] = lambda: None,
    ) -> Reconstructions:
        """Single images and means of `repeats`, which see the measurements in one view after the
        other.

        `on_image` is called after each sampled image.
        """
        single = np.zeros((len(views[0].maps), self.side, self.side), np.float32)
        total = np.zeros(single.shape, np.float64)
        for draw, image in self.images(model, backend, views, repeats):
            total[draw.sample] += image
            if draw.repeat == 0:
                single[draw.sample] = image
            on_image()
        return Reconstructions(single, (total / repeats).astype(np.float32))

    def images(
        self, model: nn.Module, backend: Backend, views: Sequence[View], repeats: int
    ) -> Iterator[tuple[Draw, Floats]]:
        """`repeats` images (side, side) of each measurement, in order.

        Every rank yields all of them.
        """
        count = len(views[0].maps)
        draws = [Draw(sample, k) for sample in range(count) for k in range(repeats)]
        for start in range(0, len(draws), self.rows):
            batch = draws[start : start + self.rows]
            made = self._batch(model, backend, views, batch)
            for draw, image in zip(batch, made, strict=False):
                yield draw, views[draw.repeat % len(views)].symmetry.undo(image)

    def _batch(
        self, model: nn.Module, backend: Backend, views: Sequence[View], draws: Sequence[Draw]
    ) -> Floats:
        own_rows = self.rows // backend.world_size
        filled = [*draws, *([draws[-1]] * (self.rows - len(draws)))]
        own = filled[backend.rank * own_rows : (backend.rank + 1) * own_rows]
        images = denoise(model, backend, self._step_batches(views, own))
        parts: list[Floats] = backend.all_gather_objects(images[:, 0].numpy())
        return np.concatenate(parts)

    def _step_batches(self, views: Sequence[View], draws: Sequence[Draw]) -> Iterator[Batch]:
        count, rows = len(self.steps), len(draws)
        seen = [views[draw.repeat % len(views)] for draw in draws]
        noise = np.stack([
            view.symmetry.of_images(sampling_noise(self.seed, draw, count, self.side))
            for view, draw in zip(seen, draws, strict=True)
        ])  # fmt: skip
        voltages = torch.from_numpy(
            np.stack([view.maps[draw.sample] for view, draw in zip(seen, draws, strict=True)])
        )
        for number, step in enumerate(self.steps):
            after = (number + 1) % count
            yield {
                "voltages": voltages,
                "start": torch.from_numpy(noise[:, :1]),
                "noise": torch.from_numpy(noise[:, after : after + 1]),
                "t": torch.full((rows,), float(step.time)),
                "of_clean": torch.full((rows, 1, 1, 1), step.of_clean),
                "of_noisy": torch.full((rows, 1, 1, 1), step.of_noisy),
                "of_noise": torch.full((rows, 1, 1, 1), step.of_noise),
            }


@torch.no_grad()
def denoise(model: nn.Module, backend: Backend, steps: Iterator[Batch]) -> Tensor:
    """Runs the sampling steps; this rank's images (rows, 1, side, side) on the host."""
    image: Tensor | None = None
    with backend.autocast():
        for batch in backend.batches(steps):
            noisy = batch["start"] if image is None else image
            with backend.autocast():
                clean = model(noisy, batch["t"], batch["voltages"])
            image = (
                batch["of_clean"] * clean.float()
                + batch["of_noisy"] * noisy
                + batch["of_noise"] * batch["noise"]
            )
            backend.finish()
    assert image is not None, "sampling takes at least one step"
    return backend.to_host({"image": image})["image"]
