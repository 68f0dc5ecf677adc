"""Settings of the image classification task."""

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from tpukit.errors import ConfigError
from tpukit.io.ranges import Range, range_problems, setting
from tpukit.tasks.images.data.depth import ValueRange

SHARE = Range(0, 1, whole=False)
RATE = Range(0, 0.999, whole=False)
ALPHA = Range(0, 10, whole=False)


@dataclass(frozen=True)
class ImagesConfig:
    """The task's settings (`--set NAME=VALUE`)."""

    data_path: str = "./data"
    """Folder of the images; see `listing.py` for the layouts."""
    table: str | None = None
    """CSV of ids and labels, in the data path (default: train.csv, where there is one)."""
    folder: str | None = None
    """Folder of the table's images, in the data path (default: train_images, images or train)."""
    id_column: str | None = None
    """Column of the image's name or path (default: the first)."""
    label_column: str | None = None
    """Column of the class (default: the sample submission's, what test.csv lacks, label or the
    like, else the only one whose values repeat)."""
    sample_submission: str | None = None
    """Sample submission in the data path, whose columns are learned (default:
    sample_submission.csv, where there is one)."""
    valid_fraction: float = setting(0.1, Range(0, 0.9, whole=False))
    """Part of each class that is validated on, where the data has no validation part."""
    fold: str | None = None
    """Validate on the table's rows with this value in `fold_column`, instead of a fraction."""
    fold_column: str | None = None
    """Column of the table that numbers its folds (default: fold)."""
    group_column: str | None = None
    """Column of the table whose equal values (a patient, a video) stay in one part."""
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
    smoothing: float = setting(0.1, RATE)
    """Label smoothing."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights in the training loss: balanced counts each class alike, images / (classes x its
    images)."""
    damaged: Literal["stop", "skip"] = "stop"
    """Image files that cannot be read are an error, or are left out (in training the next image
    takes their place; `predict` writes `damaged_row`)."""
    damaged_row: str = "frequencies"
    """What `predict` writes for them: frequencies (of the classes in training; as a label the most
    frequent class), uniform, or a class."""
    value_range: str | None = None
    """Values that are black and white in images of more than 8 bits, MIN:MAX (default: by the
    smallest and the largest of the data set)."""
    tta: Literal["none", "flip"] = "none"
    """Test-time augmentation of `test` and `predict`: flip averages with the mirrored image."""
    probabilities: bool = False
    """Whether `predict` writes a column of probabilities for each class."""
    classes: int = setting(1000, Range(1, 10**6))
    """Number of classes where no data is opened, as in `probe-batch`."""

    def __post_init__(self) -> None:
        problems = range_problems(self, str)
        for name, hint in get_type_hints(ImagesConfig).items():
            value, allowed = getattr(self, name), get_args(hint)
            if get_origin(hint) is Literal and value not in allowed:
                problems.append(f"{name} {value!r} is not {' or '.join(allowed)}.")
            elif hint in (str, str | None) and value is not None:
                # What is named by a number is read as one by `--set`.
                object.__setattr__(self, name, str(value))
        try:
            _ = self.value_range and ValueRange.parse(self.value_range)
        except ValueError:
            problems.append(
                f"value_range {self.value_range!r} is not MIN:MAX, two numbers, the smaller first."
            )
        if self.fold_column is not None and self.fold is None:
            problems.append("fold_column needs the fold to validate on: --set fold=0.")
        if self.fold is not None and self.group_column is not None:
            problems.append("fold and group_column exclude each other.")
        if problems:
            raise ConfigError(" ".join(problems))
