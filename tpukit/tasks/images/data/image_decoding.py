"""From an image file to RGB pixels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageFile

from tpukit.errors import DataError

DRAFT_FACTOR = 4
"""A JPEG is decoded at the smallest of its scales that is this many times the input's side."""
LARGEST_PIXELS = 2**29
"""More than a photograph has; the header of a damaged file may name any number."""
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "F")


UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What Pillow raises for a file that is damaged, or not an image."""
DAMAGED_HINT = (
    "Replace or remove what is damaged. Where that is not possible: --set damaged=skip trains and"
    " tests without such files, and predicts the frequencies of the training classes for them."
)


def decode(file: str, side: int) -> Image.Image:
    """An image file in RGB: grey, 16-bit, CMYK and palette images are converted.

    side: of the model's input; a JPEG that is much larger is decoded at a smaller scale.

    Raises DataError naming a file that is damaged or not an image.
    """
    try:
        with large_images_meant(), _opened(file) as image:
            return _as_rgb(image, side)
    except UNREADABLE as error:
        raise DataError(
            f"{file}: not an image that can be read ({_reason(file, error)}).",
            DAMAGED_HINT,
            id="damaged-image",
        ) from error


def header_problem(file: str) -> str | None:
    """Why a file cannot be read, as far as its header shows it; None: it shows nothing."""
    try:
        with _opened(file):
            return None
    except UNREADABLE as error:
        return _reason(file, error)


@contextmanager
def large_images_meant() -> Iterator[None]:
    """Silences Pillow's warnings of large images; `LARGEST_PIXELS` bounds them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def _opened(file: str) -> ImageFile.ImageFile:
    image = Image.open(file)
    width, height = image.size
    if width * height > LARGEST_PIXELS:
        image.close()
        raise ValueError(f"{width} x {height} pixels")
    return image


def _reason(file: str, error: Exception) -> str:
    return str(error).replace(repr(file), "it") or type(error).__name__


def _as_rgb(image: ImageFile.ImageFile, side: int) -> Image.Image:
    image.draft("RGB", (DRAFT_FACTOR * side, DRAFT_FACTOR * side))
    if image.mode in DEEP_MODES:
        return _from_deep(image)
    if image.mode in ("P", "LA", "PA", "RGBA") or "transparency" in image.info:
        # Transparent pixels have any colour: they are shown on white.
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        return opaque.convert("RGB")
    return image.convert("RGB")


def _from_deep(image: Image.Image) -> Image.Image:
    """16 bits and floating point by their own range: Pillow would cut values above 255 off."""
    pixels = np.asarray(image, dtype=np.float64)
    most = 65535.0 if image.mode != "F" else max(1.0, float(pixels.max(initial=0.0)))
    most = most if pixels.max(initial=0.0) > 255 or image.mode.startswith("I;16") else 255.0
    grey = np.clip(pixels * (255.0 / most), 0, 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
