"""The images task: any timm model on folders or tables of images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from tpukit.hardware.backend import Backend
from tpukit.tasks.images.evaluate import Log, evaluate_classes
from tpukit.tasks.images.export import export_classifier
from tpukit.tasks.images.generate import ShapeImages
from tpukit.tasks.images.predict import check_images, predicted_images
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.tasks.images.training import ImageTraining
from tpukit.train.requests import EvaluationRequest, PredictionRequest
from tpukit.train.submission import Predictions
from tpukit.train.task import Preset, TrainingDefaults


class ImagesTask(ImageTraining):
    """Learns what images show; see `ImageTraining` for its samples and batches."""

    name = "images"
    options = ImagesConfig
    data_files: ClassVar[tuple[str, ...]] = (
        "*.jpg", "*.jpeg", "*.jfif", "*.png", "*.bmp", "*.gif", "*.tif", "*.tiff", "*.webp",
        "*.avif", "*.jp2", "*.ppm", "*.pgm",
    )  # fmt: skip
    data_needs: ClassVar[str] = "CLASS/*.jpg, train/CLASS/*.jpg, or train.csv beside images"
    generators: ClassVar[Mapping[str, type[Any]]] = {"images": ShapeImages}
    metric_names: ClassVar[Mapping[str, str]] = {
        "accuracy": "accuracy ↑", "top5_accuracy": "top-5 accuracy ↑",
        "balanced_accuracy": "balanced accuracy ↑",
    }  # fmt: skip
    earlier_settings: ClassVar[Mapping[str, str]] = {"metrics": "Metrics are named by --metric."}
    selftest: ClassVar[Mapping[str, Any]] = {"model": "resnet10t", "image_size": 64}
    defaults = TrainingDefaults(
        global_batch_size=128,
        epochs=10,
        lr=1e-3,
        schedule="cosine",
        warmup_steps=100,
        final_lr_fraction=0.01,
        weight_decay=0.05,
    )
    presets: ClassVar[Mapping[str, Preset]] = {
        "quick": Preset(
            train={"global_batch_size": 64, "epochs": None, "max_steps": 240, "warmup_steps": 20,
                   "lr": 3e-3},
            task={"model": "resnet10t", "image_size": 64, "smallest_crop": 0.7,
                  "color_jitter": 0.2},
        ),
    }  # fmt: skip

    def evaluate(
        self, model: nn.Module, backend: Backend, request: EvaluationRequest, log: Log
    ) -> dict[str, Any]:
        """Accuracies with intervals, a confusion matrix and the worst mistakes as pictures."""
        return evaluate_classes(self, model, backend, request, log)

    def export(
        self, weights: Mapping[str, Tensor], artifacts: Mapping[str, bytes], folder: Path
    ) -> list[Path]:
        """The state dict, the classes, and a README that says how images are prepared."""
        return export_classifier(self, weights, artifacts, folder)

    def check_prediction(self, request: PredictionRequest) -> None:
        check_images(self, request)

    def predict_rows(
        self, model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
    ) -> Predictions:
        """Probabilities, numbers or expected scores of images."""
        return predicted_images(self, model, backend, request, log)
