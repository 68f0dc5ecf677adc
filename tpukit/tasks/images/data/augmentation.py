"""timm's transforms, each sample's random draws its own; mixup and cutmix of pairs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.nn.functional import interpolate

from tpukit.errors import ConfigError
from tpukit.tasks.images.model.classifier import InputFormat
from tpukit.tasks.images.settings import VIEW, ImagesConfig

Transform = Callable[[Image.Image], Any]


def transforms(form: InputFormat, config: ImagesConfig) -> dict[bool, Transform]:
    """PIL image -> (3, side, side) uint8, by whether it is augmented: randomly cropped, flipped and
    coloured, or resized and cropped as the model's weights ask.

    Raises ConfigError for an `auto_augment` that timm does not know.
    """
    own = {"normalize": False, "interpolation": form.interpolation}
    plain = create_transform(form.side, crop_pct=form.crop_pct, crop_mode=form.crop_mode, **own)
    try:
        augmenting = create_transform(
            form.side, is_training=True, scale=(config.smallest_crop, 1.0), hflip=config.hflip,
            vflip=config.vflip, color_jitter=config.color_jitter, auto_augment=config.auto_augment,
            **own,
        )  # fmt: skip
    except (AssertionError, ValueError) as error:
        if config.auto_augment is None:
            raise
        raise ConfigError(
            f"auto_augment {config.auto_augment!r} is not a policy of timm.",
            "Give rand-m9-mstd0.5-inc1, augmix-m3-w3, original, v0 or 3a, or leave it out.",
        ) from error
    return {True: augmenting, False: plain}


def views(images: Tensor, names: Sequence[str]) -> Iterator[Tensor]:
    """Images (rows, 3, side, side), and what test-time augmentation shows of them."""
    yield images
    side = images.shape[-1]
    part, middle = round(side * VIEW), (side - round(side * VIEW)) // 2
    end = side - part
    corners = [(0, 0), (0, end), (end, 0), (end, end)]
    places = {"scale": [(middle, middle)], "crops": corners}
    for name in names:
        if name in ("flip", "vflip"):
            yield images.flip(3 if name == "flip" else 2)
        for top, left in places.get(name, ()):
            shown = images[..., top : top + part, left : left + part]
            yield interpolate(shown, size=(side, side), mode="bilinear", align_corners=False)


# -- mixup and cutmix ----------------------------------------------------------------------------
# Rows 2k and 2k + 1 of a micro-batch are a pair, whatever the number of ranks and devices. The host
# draws the share and the box; pixels are mixed on the device.


def draw_mix(rng: np.random.Generator, config: ImagesConfig, side: int) -> dict[str, Any]:
    """`share` of an image that stays its own, and the `box` (top, bottom, left, right) that its
    partner fills: mixup has an empty box."""
    box = np.zeros(4, np.int32)
    cuts = config.cutmix > 0 and (config.mixup == 0 or rng.random() < 0.5)
    alpha = config.cutmix if cuts else config.mixup
    share = float(rng.beta(alpha, alpha)) if alpha > 0 else 1.0
    if cuts:
        box = _draw_box(rng, share, side)
        share = 1 - float((box[1] - box[0]) * (box[3] - box[2])) / side**2
    return {"share": np.float32(share), "box": box}


def _draw_box(rng: np.random.Generator, share: float, side: int) -> NDArray[np.int32]:
    half = np.sqrt(1 - share) * side / 2
    row, column = rng.integers(side, size=2)
    edges = [row - half, row + half, column - half, column + half]
    return np.clip(np.round(edges), 0, side).astype(np.int32)


def not_mixed() -> dict[str, Any]:
    """An image that stays as it is."""
    return {"share": np.float32(1.0), "box": np.zeros(4, np.int32)}


def share_draws(batch: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Gives the second row of each pair the first one's draws; a row without a partner keeps its
    image."""
    for name in ("share", "box"):
        paired = batch[name][: len(batch[name]) // 2 * 2]
        paired[1::2] = paired[0::2]
    alone = samples // 2 * 2
    batch["share"][alone:] = 1.0
    batch["box"][alone:] = 0
    return batch


def partners(rows: Tensor) -> Tensor:
    """(rows, ...): each row's partner; the last one of an odd number is its own."""
    even = rows.shape[0] // 2 * 2
    pairs = rows[:even].reshape(-1, 2, *rows.shape[1:]).flip(1).flatten(0, 1)
    return pairs if even == rows.shape[0] else torch.cat([pairs, rows[even:]])


def mix(images: Tensor, share: Tensor, box: Tensor) -> Tensor:
    """Images (rows, 3, side, side) mixed with their partners by `draw_mix`'s draws."""
    others = partners(images)
    lines = torch.arange(images.shape[-1], device=images.device)
    top, bottom, left, right = (edge.view(-1, 1, 1, 1) for edge in box.unbind(1))
    rows, columns = lines.view(1, 1, -1, 1), lines.view(1, 1, 1, -1)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    cut = (box[:, 1] > box[:, 0]).view(-1, 1, 1, 1)
    part = share.view(-1, 1, 1, 1)
    return torch.where(
        inside, others, torch.where(cut, images, images * part + others * (1 - part))
    )
