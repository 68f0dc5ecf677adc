"""From an image file to RGB pixels."""

from __future__ import annotations

import warnings

import numpy as np
from PIL import Image, ImageFile

from tpukit.errors import DataError

DRAFT_FACTOR = 4
"""A JPEG is decoded at the smallest of its scales that is this many times the input's side."""
LARGEST_PIXELS = 2**29
"""More than a photograph has; the header of a damaged file may name any number."""
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "F")


def decode(file: str, side: int) -> Image.Image:
    """An image file in RGB: grey, 16-bit, CMYK and palette images are converted.

    side: of the model's input; a JPEG that is much larger is decoded at a smaller scale.

    Raises DataError naming a file that is damaged or not an image.
    """
    try:
        with warnings.catch_warnings():
            # Large images are meant here; `LARGEST_PIXELS` bounds them.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            warnings.simplefilter("ignore", UserWarning)
            with Image.open(file) as image:
                return _as_rgb(image, side)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).replace(repr(file), "it")
        raise DataError(
            f"{file}: not an image that can be read ({reason or type(error).__name__}).",
            "Replace or remove the file; --set damaged=skip takes the next image instead.",
            id="damaged-image",
        ) from error


def _as_rgb(image: ImageFile.ImageFile, side: int) -> Image.Image:
    width, height = image.size
    if width * height > LARGEST_PIXELS:
        raise ValueError(f"{width} x {height} pixels")
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
