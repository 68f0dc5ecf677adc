"""Settings of the image classification task."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tpukit.io.ranges import Range, setting
from tpukit.tasks.images.data.depth import ValueRange
from tpukit.train.labelled import TableSettings
from tpukit.train.target_loss import LossName

SHARE = Range(0, 1, whole=False)
RATE = Range(0, 0.999, whole=False)
ALPHA = Range(0, 10, whole=False)
VIEWS = ("flip", "vflip", "scale", "crops")
"""Names of test-time augmentations."""
VIEW = 0.875
"""Part of the side that an enlarged view shows."""


@dataclass(frozen=True)
class ImagesConfig(TableSettings):
    """The task's settings (`--set NAME=VALUE`); see `listing.py` for the layouts of the data."""

    folder: str | None = None
    """Folder of the table's images, in the data path (default: train_images, images or train)."""
    features: str | None = None
    """Columns of the table that the model sees too, separated by commas, or all (those that the
    test table has as well): numbers standardised, categories embedded."""
    model: str = "convnext_tiny"
    """Any timm model."""
    pretrained: str = "none"
    """Initial weights: none, timm (downloaded from timm's hub), or a .safetensors or .pth file."""
    image_size: int | None = setting(None, Range(16, 4096))
    """Height and width of the model's input (default: the model's own)."""
    drop_path: float = setting(0.0, RATE)
    """Rate of stochastic depth, for models that have it."""
    layer_decay: float = setting(1.0, Range(0.01, 1, whole=False))
    """Factor of the learning rate from each layer to the one before; 1 is off."""
    auto_augment: str | None = None
    """timm's policy, such as rand-m9-mstd0.5-inc1 (default: none)."""
    smallest_crop: float = setting(0.08, Range(0.001, 1, whole=False))
    """Smallest part of the image's area that a random crop keeps; 1 crops nothing."""
    hflip: float = setting(0.5, SHARE)
    """Probability of a horizontal flip."""
    vflip: float = setting(0.0, SHARE)
    """Probability of a vertical flip."""
    color_jitter: float = setting(0.4, SHARE)
    """Strength of random brightness, contrast and saturation; not used with auto_augment."""
    mixup: float = setting(0.0, ALPHA)
    """Alpha of mixup (Zhang et al., 2018); 0 is off."""
    cutmix: float = setting(0.0, ALPHA)
    """Alpha of cutmix (Yun et al., 2019); 0 is off. With both, each pair draws one of them."""
    loss: LossName | None = None
    """Loss: of one class cross_entropy; of labels bce or asymmetric; of numbers mse, mae or huber;
    of an ordered score these, ordinal or cross_entropy (default: the first of each)."""
    smoothing: float = setting(0.1, RATE)
    """Label smoothing of cross_entropy."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights in the training loss: balanced counts each class or score alike, images / (classes x
    its images), and of each label both values."""
    damaged: Literal["stop", "skip"] = "stop"
    """Image files that cannot be read are an error, or are left out (in training the next image
    takes their place; `predict` writes `damaged_row`)."""
    damaged_row: str = "frequencies"
    """What `predict` writes for them: frequencies (of the classes in training; as a label the most
    frequent class), uniform, or a class."""
    value_range: str | None = None
    """Values that are black and white in images of more than 8 bits, MIN:MAX (default: by the
    smallest and the largest of the data set)."""
    tta: str = "none"
    """Test-time augmentation of `test` and `predict`, views whose predictions are averaged with the
    image's, separated by commas: flip and vflip (mirrored), scale (its middle, enlarged), crops
    (four corners, enlarged)."""
    force_tta: bool = False
    """Whether views that the training never showed are averaged all the same."""
    probabilities: bool = False
    """Whether `predict` writes a column of probabilities for each class."""
    classes: int = setting(1000, Range(1, 10**6))
    """Number of classes where no data is opened, as in `probe-batch`."""

    def problems(self) -> Iterator[str]:
        """What is wrong beyond types and ranges."""
        try:
            _ = self.value_range and ValueRange.parse(self.value_range)
        except ValueError:
            yield (
                f"value_range {self.value_range!r} is not MIN:MAX, two numbers, the smaller first."
            )
        yield from super().problems()
        for name in self.views:
            if name not in VIEWS:
                yield f"tta {name!r} is not one of {', '.join(VIEWS)}."
        if self.features is not None and (self.mixup or self.cutmix):
            yield "mixup and cutmix mix images, not the features beside them."

    @property
    def views(self) -> list[str]:
        """The names in `tta`."""
        return [] if self.tta == "none" else [name.strip() for name in self.tta.split(",")]

    def unseen_views(self) -> Iterator[str]:
        """Views of `tta` that training never shows, with the setting that it lacks."""
        cropped = f"smallest_crop={self.smallest_crop:g}"
        has = {
            "flip": (self.hflip > 0, "hflip=0"), "vflip": (self.vflip > 0, "vflip=0"),
            "scale": (self.smallest_crop <= VIEW**2, cropped),
            "crops": (self.smallest_crop <= VIEW**2, cropped),
        }  # fmt: skip
        yield from (f"{name} ({has[name][1]})" for name in self.views if not has[name][0])
