"""An image classifier's weights for use without tpukit, with what prepares an image for them."""

import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tpukit.tasks.images.data.depth import SIXTEEN_BITS, ValueRange
from tpukit.tasks.images.model.classifier import InputFormat, size_option
from tpukit.tasks.images.training import CLASSES_FILE, FEATURES_FILE, ImageTraining
from tpukit.train.weights import README_FILE, readme, write_export


def export_classifier(
    task: ImageTraining, weights: Mapping[str, Tensor], artifacts: Mapping[str, bytes], folder: Path
) -> list[Path]:
    """Writes the state dict, the artifacts and a README; the files."""
    tensors = task.plain_model(weights).state_dict()
    images = preprocessing(task.input, task.values, usage(task))
    text = f"{readme(task, tensors, artifacts)}\n{images}"
    return write_export(folder, tensors, {**artifacts, README_FILE: text.encode()})


def usage(task: ImageTraining) -> str:
    """From an image to predictions, as comments."""
    criterion, beside = task.criterion, task.beside
    options = {"num_classes": criterion.outputs, **size_option(task.settings)}
    words = "".join(f", {name}={value}" for name, value in options.items())
    lines = [f'model is timm.create_model("{task.settings.model}"{words})']
    pixels, features = 'transform(image.convert("RGB"))[None]', ""
    if beside is not None:
        lines = [
            "model is that of the second way: timm's beside columns of a table",
            "from tpukit.train.features import TableFeatures",
            f'beside = TableFeatures.from_json(open("{FEATURES_FILE}").read())',
            "row: the texts of " + ", ".join(beside.columns),
        ]
        features = ", torch.tensor(beside.values(row))[None]"
    lines.append(f"scores = model({pixels}{features})")
    lines.append(f"predictions = {criterion.formula()}  # of {criterion.target}")
    return "\n".join(f"# {line}" for line in lines)


def preprocessing(form: InputFormat, values: ValueRange, used: str) -> str:
    """How `test` and `predict` prepare an image, in words and in timm's."""
    side, scale = form.side, math.floor(form.side / form.crop_pct)
    fits = {
        "squash": f"height and width to {scale} pixels each",
        "border": f"long side to {scale} pixels, the short one filled up",
    }.get(form.crop_mode, f"short side to {scale} pixels")
    deep = ""
    if values != SIXTEEN_BITS:
        deep = (
            f"- of more than 8 bits: (value - {values.low:.9g}) * 255 /"
            f" {values.high - values.low:.9g}, cut to 0 to 255, without the fraction\n"
        )
    return f"""## Images

The predictions are in the order of `{CLASSES_FILE}`. `test` and `predict` prepare an image so:

- RGB, transparent pixels on white, EXIF's orientation not applied
{deep}- {fits} ({form.interpolation}), then the middle {side} x {side}
- values / 255, less the mean {tuple(form.mean)}, by the standard deviation {tuple(form.std)}

```python
from timm.data import create_transform
transform = create_transform({side}, interpolation="{form.interpolation}", \
crop_pct={form.crop_pct}, crop_mode="{form.crop_mode}", mean={tuple(form.mean)}, \
std={tuple(form.std)})
{used}
```
"""
