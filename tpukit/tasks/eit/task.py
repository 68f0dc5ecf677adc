"""The EIT task: conditional diffusion from boundary voltages to conductivity images."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from tpukit.errors import CheckpointError, ConfigError
from tpukit.hardware.backend import Backend, Batch, ModelOps
from tpukit.io.ranges import Range, range_problems
from tpukit.tasks.eit.data.dataset import (
    data_normalisation,
    existing_data_path,
    open_split,
    split_files,
)
from tpukit.tasks.eit.data.normalisation import Normalisation
from tpukit.tasks.eit.data.ridge_regression import fit_images
from tpukit.tasks.eit.model.diffusion import Diffusion, DiffusionConfig, Sampler
from tpukit.tasks.eit.model.lean import lean_network
from tpukit.tasks.eit.model.network import SIZES, Network, NetworkConfig, reference_network
from tpukit.tasks.eit.model.published import load_published, read_published
from tpukit.train.requests import EvaluationRequest, PredictionRequest
from tpukit.train.task import Datasets, Preset, Sample, Task, TrainingDefaults, stack_samples

Log = Callable[[str], None]
NORMALISATION_FILE = "normalisation.npz"
REFERENCE_SUFFIX = "-reference"
"""A size with it is the same network in published instead of lean form."""

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
    "published-reference": PUBLISHED_TRAINING,
}


@dataclass(frozen=True)
class EITConfig:
    """The task's settings."""

    size: str = "published"
    """tiny, small, published (in lean form), or published-reference (in published form)."""
    data_path: str = "./data"
    """Folder with train/, valid/ and test/."""
    sampling_steps: int = 5
    """DDIM steps from noise to an image."""
    loss: Literal["l1", "l2"] | None = None
    """Loss on the clean image: l1 (mean absolute error) or l2 (mean squared error). None: l1, as
    published, for the published sizes, else l2."""
    refinement: bool | None = None
    """Convolutions over the assembled image, which see across patches. None: for tiny and small."""

    def __post_init__(self) -> None:
        if self.size not in TRAINING:
            close = difflib.get_close_matches(self.size, TRAINING, n=1, cutoff=0.3)
            raise ConfigError(
                f"Unknown size {self.size!r}; there are {', '.join(TRAINING)}.",
                f"Did you mean {close[0]}?" if close else None,
            )
        if self.loss not in (None, "l1", "l2"):
            raise ConfigError(f"loss {self.loss!r} is neither l1 nor l2.")
        if self.refinement and not SIZES[self.base_size].refinement_channels:
            raise ConfigError(f"size {self.size} has no refinement: leave it out, or false.")
        steps = {"sampling_steps": Range(1, DiffusionConfig.steps)}
        if problems := range_problems(vars(self), steps, str):
            raise ConfigError(problems[0])

    @property
    def base_size(self) -> str:
        """The size without the form."""
        return self.size.removesuffix(REFERENCE_SUFFIX)

    @property
    def network(self) -> NetworkConfig:
        network = SIZES[self.base_size]
        return replace(network, refinement_channels=0) if self.refinement is False else network

    @property
    def error(self) -> Callable[[Tensor], Tensor]:
        """The loss of each pixel's error."""
        loss = self.loss or ("l1" if self.size.startswith("published") else "l2")
        return torch.abs if loss == "l1" else torch.square

    @property
    def reference(self) -> bool:
        """Whether the network keeps its published form."""
        return self.size.endswith(REFERENCE_SUFFIX)


class EITTask(Task):
    """Learns to predict the clean image from a noisy one and the voltages.

    A sample is `voltages` (1, 16, 16) and `image` (1, 128, 128); `draw` adds its time and noise.
    """

    name = "eit"
    config_class = EITConfig
    cpu_preset = "quick"
    presets: ClassVar[Mapping[str, Preset]] = {
        "quick": Preset(
            train={"global_batch_size": 32, "max_steps": 1500, "ckpt_every": 200},
            task={"size": "tiny"},
        ),
    }

    def __init__(self, *, normalisation: Normalisation | None = None, **settings: Any) -> None:
        """Settings are the fields of `EITConfig`; `normalisation` is a run's, None: the data's."""
        self.config = EITConfig(**settings)
        self.defaults = TRAINING[self.config.size]
        self.diffusion = Diffusion(DiffusionConfig())
        self.normalisation = normalisation

    def datasets(self) -> Datasets:
        """The train and valid splits of the data path, their normalisation and their digest."""
        root = existing_data_path(Path(self.config.data_path))
        normalisation = self.normalisation or data_normalisation(root)
        train, valid = (open_split(root, name, normalisation) for name in ("train", "valid"))
        digests = f"{train.samples.digest()} {valid.samples.digest()}"
        return Datasets(
            train,
            valid,
            artifacts={NORMALISATION_FILE: normalisation.to_bytes()},
            identity={"data": hashlib.sha256(digests.encode()).hexdigest()[:16]},
        )

    def identity(self) -> dict[str, Any]:
        # Runs without these entries were trained with l2, and without a refinement.
        loss = {"loss": "l1"} if self.config.error is torch.abs else {}
        refinement = {"refinement": True} if self.config.network.refinement_channels else {}
        return {"size": self.config.size, **loss, **refinement}

    def as_recorded(self, identity: Mapping[str, Any]) -> Self:
        earlier = {"loss": "l2", "refinement": False}
        settings = asdict(self.config)
        missing = {
            name: value
            for name, value in earlier.items()
            if settings[name] is None and name not in identity
        }
        if not missing:
            return self
        return type(self)(normalisation=self.normalisation, **{**settings, **missing})

    def restore(self, artifacts: Mapping[str, bytes]) -> Self:
        if NORMALISATION_FILE not in artifacts:
            raise CheckpointError(
                f"The checkpoint holds no {NORMALISATION_FILE}.", "Is it a run of the eit task?"
            )
        normalisation = Normalisation.from_bytes(artifacts[NORMALISATION_FILE])
        return type(self)(normalisation=normalisation, **asdict(self.config))

    def build_model(self, ops: ModelOps) -> Network:
        if self.config.reference:
            return reference_network(self.config.network)
        return lean_network(self.config.network, ops)

    def initialize(self, model: nn.Module, data: Datasets) -> None:
        """The smaller networks start from ridge regression of images on voltages."""
        assert isinstance(model, Network)
        if model.voltage_images is not None:
            side = self.config.network.learned_side
            model.voltage_images.start_from(fit_images(data.train, side))

    def draw(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Adds `t`, `of_image`, `of_noise` (numbers) and `noise` (1, 128, 128)."""
        t = int(rng.integers(self.diffusion.config.steps))
        of_image, of_noise = self.diffusion.noisy_parts(t)
        # torch draws normal numbers faster than numpy: this is most of a sample's cost.
        source = torch.Generator().manual_seed(int(rng.integers(2**32)))
        noise = torch.randn(np.shape(sample["image"]), generator=source).numpy()
        added = {"t": np.float32(t), "of_image": of_image, "of_noise": of_noise, "noise": noise}
        return {**sample, **added}

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Each row's mean error of the predicted clean image."""
        image = batch["image"]
        noisy = _column(batch["of_image"]) * image + _column(batch["of_noise"]) * batch["noise"]
        predicted = model(noisy, batch["t"], batch["voltages"])
        return {"loss": self.config.error(predicted.float() - image).flatten(1).mean(1)}

    def example_batches(self, rows: int) -> list[Batch]:
        rng = np.random.default_rng(0)
        side, map_side = self.config.network.image_side, self.config.network.map_side
        sample = {
            "voltages": rng.standard_normal((1, map_side, map_side), dtype=np.float32),
            "image": rng.uniform(-1, 1, (1, side, side)).astype(np.float32),
        }
        return [stack_samples([self.draw(sample, rng) for _ in range(rows)], rows)]

    def count_samples(self) -> int:
        return len(split_files(existing_data_path(Path(self.config.data_path)), "train"))

    # -- a trained run ----------------------------------------------------------------------------
    def read_checkpoint_file(self, path: Path) -> dict[str, Tensor]:
        """The weights of a checkpoint of the published code."""
        return read_published(path).weights

    def inference_model(self, ops: ModelOps, weights: Mapping[str, Tensor]) -> nn.Module:
        model = self.build_model(ops)
        load_published(model, weights)
        return model

    def evaluate(
        self, model: nn.Module, backend: Backend, request: EvaluationRequest, log: Log
    ) -> dict[str, Any]:
        """Reconstructs a test set; metrics, baselines and pictures."""
        from tpukit.tasks.eit.evaluation.evaluate import evaluate_images

        return evaluate_images(self, model, backend, request, log)

    def check_prediction(self, request: PredictionRequest) -> None:
        from tpukit.tasks.eit.evaluation.prediction import image_file

        image_file(request)

    def predict(
        self, model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
    ) -> dict[str, Any]:
        """Writes the images of a folder of measurements to one file."""
        from tpukit.tasks.eit.evaluation.prediction import predict_images

        return predict_images(self, model, backend, request, log)

    def sampler(self, rows: int, *, steps: int | None = None, seed: int = 0) -> Sampler:
        """Samples images in batches of `rows` over all ranks."""
        config = self.config if steps is None else replace(self.config, sampling_steps=steps)
        chosen = self.diffusion.sampling_steps(config.sampling_steps)
        return Sampler(chosen, self.config.network.image_side, rows, seed)


def _column(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)
