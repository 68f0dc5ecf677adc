"""Image files: decoding to RGB, the damaged ones, and a map-style data set of them.

Damaged files are found by their headers before a run starts. A whole header says nothing about the
pixels: what else is damaged is met when it is decoded.
"""

import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from tpukit.errors import DataError
from tpukit.io.process import is_first_rank
from tpukit.io.progress import Progress
from tpukit.tasks.images.data.listing import LabelledImages

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
    largest = float(np.fmax.reduce(pixels, None, initial=0.0))
    if image.mode == "F":
        most = next((most for most in (1.0, 255.0) if largest <= most), largest)
    else:
        most = 65535.0 if largest > 255 or image.mode.startswith("I;16") else 255.0
    grey = np.clip(pixels * (255.0 / most), 0, 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")


# -- damaged files, by their headers ---------------------------------------------------------------
SHOWN = 10
"""Names in a message."""
THREADS = 16
"""They wait for the disk, or the network, most of the time."""
AT_ONCE = 2048
MANY = 5000
"""Files from which on the progress is shown."""
MOST_SECONDS = 60.0
"""For all headers; files that are left are met when they are read."""


def check_headers(*parts: Sequence[str], skip: bool = False) -> None:
    """Looks at the headers of all files of a data set's parts, in the first rank alone.

    skip: damaged files are one line on standard error, and an error where a part has no others.

    Raises DataError naming the damaged files.
    """
    if not is_first_rank():
        return
    files = [file for part in parts for file in part]
    damaged = damaged_headers(files)
    if not damaged:
        return
    message = f"{len(damaged)} of {len(files)} images cannot be read: {name_files(list(damaged))}"
    first = next(iter(damaged.values()))
    if not skip or any(part and damaged.keys() >= {*part} for part in parts):
        raise DataError(f"{message} (the first: {first}).", DAMAGED_HINT, id="damaged-image")
    print(f"{message}. They are left out; in training the next image takes their place.",
          file=sys.stderr, flush=True)  # fmt: skip


def damaged_headers(files: Sequence[str]) -> dict[str, str]:
    """The files whose headers cannot be read, each with the reason."""
    found: dict[str, str] = {}
    ends = time.monotonic() + MOST_SECONDS
    label, enabled = "reading image headers", len(files) >= MANY
    with (
        Progress(label, len(files), enabled=enabled) as progress,
        ThreadPoolExecutor(THREADS) as threads,
        large_images_meant(),
    ):
        for start in range(0, len(files), AT_ONCE):
            if time.monotonic() > ends:
                progress.message(f"{label} took too long: {len(files) - start} are left.")
                break
            some = files[start : start + AT_ONCE]
            problems = threads.map(header_problem, some)
            found |= {f: why for f, why in zip(some, problems, strict=True) if why is not None}
            progress.update(start + len(some))
    return found


def name_files(files: Sequence[str]) -> str:
    """The first of some files, below the folder that holds them all, and how many more."""
    folder = os.path.commonpath([str(Path(file).parent) for file in files])
    return f"{first_names([os.path.relpath(file, folder) for file in files])} in {folder}"


def first_names(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


# -- the data set ----------------------------------------------------------------------------------
MOST_SKIPPED = 100
"""Damaged files in a row: more are no accident."""
NO_IMAGE = -1
"""Label of a sample whose file cannot be read; `ImagesTask.collate` masks its row."""


@dataclass(frozen=True)
class ImageFiles:
    """Decoded images with their labels; `ImagesTask.draw` makes arrays of them.

    skip_damaged: a file that cannot be read is a black image without a label; while training
        (`augment`) the next image takes its place. Else it is a DataError.
    """

    images: LabelledImages
    side: int
    _: KW_ONLY
    augment: bool
    skip_damaged: bool = False

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tries = min(len(self), MOST_SKIPPED) if self.skip_damaged and self.augment else 1
        for offset in range(tries):
            try:
                return self._sample((index + offset) % len(self))
            except DataError as error:
                problem = error
        if self.augment or not self.skip_damaged:
            raise problem
        blank = Image.new("RGB", (self.side, self.side))
        return {"image": blank, "label": NO_IMAGE, "augment": False}

    def _sample(self, index: int) -> dict[str, Any]:
        image = decode(self.images.files[index], self.side)
        return {"image": image, "label": self.images.labels[index], "augment": self.augment}
