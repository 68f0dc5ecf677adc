"""The EIT task: conditional diffusion from boundary voltages to conductivity images."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from tpukit.errors import CheckpointError
from tpukit.hardware.backend import Backend, Batch, ModelOps
from tpukit.tasks.eit.data.dataset import (
    Normalisation,
    data_normalisation,
    existing_data_path,
    open_split,
    split_files,
)
from tpukit.tasks.eit.generate import SimulatedData
from tpukit.tasks.eit.model.diffusion import Diffusion
from tpukit.tasks.eit.model.network import Network, fit_images
from tpukit.tasks.eit.model.published import load_published, read_published
from tpukit.tasks.eit.predict import Log, Trained, image_file, predict_images
from tpukit.tasks.eit.settings import TRAINING, EITConfig, SamplingOptions
from tpukit.train.requests import EvaluationRequest, PredictionRequest
from tpukit.train.task import Datasets, PlanSettings, Preset, Sample, Task, stack_samples

NORMALISATION_FILE = "normalisation.npz"


class EITTask(Task):
    """Learns to predict the clean image from a noisy one and the voltages.

    A sample is `voltages` (1, 16, 16) and `image` (1, 128, 128); `draw` adds its time and noise.
    """

    name = "eit"
    settings: EITConfig
    options = EITConfig
    test_options = SamplingOptions
    folder = "results/deit"
    data_files: ClassVar[tuple[str, ...]] = ("*.npz", "mean.pth")
    data_needs: ClassVar[str] = "train/*.npz and valid/*.npz"
    generators: ClassVar[Mapping[str, type[Any]]] = {"eit": SimulatedData}
    metric_names: ClassVar[Mapping[str, str]] = {
        "correlation": "correlation ↑", "rmse": "RMSE ↓", "rmse_pooled": "RMSE, all frames ↓",
        "psnr": "PSNR, dB ↑", "ssim": "SSIM ↑",
    }  # fmt: skip
    selftest: ClassVar[Mapping[str, Any]] = {"size": "tiny"}
    selftest_parts: ClassVar[Mapping[str, Any]] = {
        "prediction": {"size": "small"}, "largest-batch": {"size": "small"},
    }  # fmt: skip
    cpu_preset = "quick"
    presets: ClassVar[Mapping[str, Preset]] = {
        "quick": Preset(
            train={"global_batch_size": 32, "max_steps": 1500, "ckpt_every": 200},
            task={"size": "tiny"},
        )
    }

    def __init__(self, *, normalisation: Normalisation | None = None, **settings: Any) -> None:
        """Settings are the fields of `EITConfig`; `normalisation` is a run's, None: the data's."""
        super().__init__(**settings)
        self.defaults = TRAINING[self.settings.size]
        self.diffusion = Diffusion()
        self.normalisation = normalisation

    def datasets(self) -> Datasets:
        """The train and valid splits of the data path, their normalisation and their digest."""
        root = existing_data_path(Path(self.settings.data_path))
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
        loss = {"loss": "l1"} if self.settings.error is torch.abs else {}
        refinement = {"refinement": True} if self.settings.network.refinement_channels else {}
        return {"size": self.settings.size, **loss, **refinement}

    def as_recorded(self, identity: Mapping[str, Any]) -> Self:
        settings, earlier = asdict(self.settings), {"loss": "l2", "refinement": False}
        missing = {n: v for n, v in earlier.items() if settings[n] is None and n not in identity}
        return type(self)(normalisation=self.normalisation, **{**settings, **missing})

    def restore(self, artifacts: Mapping[str, bytes]) -> Self:
        if NORMALISATION_FILE not in artifacts:
            raise CheckpointError(
                f"The checkpoint holds no {NORMALISATION_FILE}.", "Is it a run of the eit task?"
            )
        normalisation = Normalisation.from_bytes(artifacts[NORMALISATION_FILE])
        return type(self)(normalisation=normalisation, **asdict(self.settings))

    def build_model(self, ops: ModelOps) -> Network:
        return Network(self.settings.network, ops)

    def initialize(self, model: nn.Module, data: Datasets) -> None:
        """The smaller networks start from ridge regression of images on voltages."""
        assert isinstance(model, Network)
        if model.voltage_images is not None:
            side = self.settings.network.learned_side
            model.voltage_images.start_from(*fit_images(data.train, side))

    def draw(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Adds `t`, `of_image`, `of_noise` (numbers) and `noise` (1, 128, 128)."""
        t = int(rng.integers(self.diffusion.steps))
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
        return {"loss": self.settings.error(predicted.float() - image).flatten(1).mean(1)}

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        rng = np.random.default_rng(0)
        side, map_side = self.settings.network.image_side, self.settings.network.map_side
        sample = {
            "voltages": rng.standard_normal((1, map_side, map_side), dtype=np.float32),
            "image": rng.uniform(-1, 1, (1, side, side)).astype(np.float32),
        }
        rows = settings.micro_rows
        return [stack_samples([self.draw(sample, rng) for _ in range(rows)], rows)]

    def count_samples(self) -> int:
        return len(split_files(existing_data_path(Path(self.settings.data_path)), "train"))

    # -- a trained run ----------------------------------------------------------------------------
    def read_checkpoint_file(self, path: Path) -> dict[str, Tensor]:
        """The weights of a checkpoint of the published code."""
        return read_published(path)

    def inference_model(self, ops: ModelOps, weights: Mapping[str, Tensor]) -> nn.Module:
        model = self.build_model(ops)
        load_published(model, weights)
        return model

    def evaluate(
        self, model: nn.Module, backend: Backend, request: EvaluationRequest, log: Log
    ) -> dict[str, Any]:
        """Reconstructs a test set; metrics, baselines and pictures."""
        from tpukit.tasks.eit.evaluate import evaluate_images

        return evaluate_images(self.trained(model, backend), request, log)

    def check_prediction(self, request: PredictionRequest) -> None:
        image_file(request)

    def predict(
        self, model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
    ) -> dict[str, Any]:
        """Writes the images of a folder of measurements to one file."""
        return predict_images(self.trained(model, backend), request, log)

    def trained(self, model: nn.Module, backend: Backend) -> Trained:
        """A trained model, to sample images with."""
        return Trained(model, backend, self.settings, self.normalisation)


def _column(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)
