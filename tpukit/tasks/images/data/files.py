"""Image files: decoding to RGB, the damaged ones, and a map-style data set of them.

Damaged files are found by their headers before a run starts. A whole header says nothing about the
pixels: what else is damaged is met when it is decoded.
"""

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tpukit.errors import DataError
from tpukit.io.process import is_first_rank
from tpukit.io.progress import Progress
from tpukit.tasks.images.data.depth import (
    SHALLOW_KINDS,
    SHALLOW_SUFFIXES,
    SIXTEEN_BITS,
    UNREADABLE,
    Kind,
    ValueRange,
    kind_of,
    large_images_meant,
    opened,
    range_of,
    require_kind,
    values_of,
)
from tpukit.tasks.images.data.listing import LabelledImages
from tpukit.train.features import TableFeatures

DRAFT_FACTOR = 4
"""A JPEG is decoded at the smallest of its scales that is this many times the input's side."""
DAMAGED = "damaged-image"
"""Id of the errors about files that cannot be read."""
DAMAGED_HINT = (
    "Replace or remove what is damaged. Where that is not possible: --set damaged=skip trains and"
    " tests without such files, and predicts the frequencies of the training classes for them."
)


def decode(file: str, side: int, values: ValueRange = SIXTEEN_BITS) -> Image.Image:
    """An image file in RGB: grey, 16-bit, CMYK and palette images are converted.

    side: of the model's input; a JPEG that is much larger is decoded at a smaller scale.
    values: the scale of images of more than 8 bits.

    Raises DataError naming a file that is damaged, not an image, or not of the kind that the scale
    is for.
    """
    try:
        with large_images_meant(), opened(file) as image:
            return _as_rgb(file, image, side, values)
    except UNREADABLE as error:
        raise DataError(
            f"{file}: not an image that can be read ({_reason(file, error)}).",
            DAMAGED_HINT,
            id=DAMAGED,
        ) from error


def _reason(file: str, error: Exception) -> str:
    return str(error).replace(repr(file), "it") or type(error).__name__


def _as_rgb(file: str, image: Image.Image, side: int, values: ValueRange) -> Image.Image:
    image.draft("RGB", (DRAFT_FACTOR * side, DRAFT_FACTOR * side))
    kind = kind_of(image)
    require_kind(file, kind, values)
    if kind not in SHALLOW_KINDS:
        return Image.fromarray(values.grey(values_of(image))).convert("RGB")
    if image.mode in ("P", "LA", "PA", "RGBA") or "transparency" in image.info:
        # Transparent pixels have any colour: they are shown on white.
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        return opaque.convert("RGB")
    return image.convert("RGB")


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


def check_headers(
    *parts: Sequence[str], skip: bool = False, values: ValueRange | None = None
) -> dict[str, Kind]:
    """The kind of each file's values, by the headers of all files of a data set's parts.

    Ranks but the first leave out formats of 8 bits, and say nothing of what is damaged.

    skip: damaged files are one line on standard error, and an error where a part has no others.
    values: the scale that the files are for.

    Raises DataError naming the damaged files, or one of another kind than the scale's.
    """
    files = [file for part in parts for file in part]
    if not is_first_rank():
        files = [file for file in files if not file.lower().endswith(SHALLOW_SUFFIXES)]
    kinds, damaged = read_headers(files)
    if values is not None:
        for file, kind in kinds.items():
            require_kind(file, kind, values)
    if not damaged or not is_first_rank():
        return kinds
    message = f"{len(damaged)} of {len(files)} images cannot be read: {name_files(list(damaged))}"
    first = next(iter(damaged.values()))
    if not skip or any(part and damaged.keys() >= {*part} for part in parts):
        raise DataError(f"{message} (the first: {first}).", DAMAGED_HINT, id=DAMAGED)
    print(f"{message}. They are left out; in training the next image takes their place.",
          file=sys.stderr, flush=True)  # fmt: skip
    return kinds


def find_range(*parts: Sequence[str], known: ValueRange | None, skip: bool) -> ValueRange:
    """The scale of a data set's files of more than 8 bits; see `check_headers` for damaged ones.

    The first rank looks at the files before the others, which find their extremes in the cache.
    """
    if known is not None and not is_first_rank():
        return known
    kinds = check_headers(*parts, skip=skip)
    if known is not None:
        return known
    files = [file for part in parts for file in part]
    unread = [f for f in files if not (f in kinds or f.lower().endswith(SHALLOW_SUFFIXES))]
    values, line = range_of(kinds, unread)
    if line is not None and is_first_rank():
        print(line, file=sys.stderr, flush=True)
    return values


def read_headers(files: Sequence[str]) -> tuple[dict[str, Kind], dict[str, str]]:
    """The kind of the files' values, and those whose headers cannot be read, with the reason."""
    kinds: dict[str, Kind] = {}
    damaged: dict[str, str] = {}
    ends = time.monotonic() + MOST_SECONDS
    label, enabled = "reading image headers", is_first_rank() and len(files) >= MANY
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
            for file, (kind, problem) in zip(some, threads.map(_header, some), strict=True):
                if problem is None:
                    kinds[file] = kind
                else:
                    damaged[file] = problem
            progress.update(start + len(some))
    return kinds, damaged


def _header(file: str) -> tuple[Kind, str | None]:
    """The kind of a file's values, and why it cannot be read, as far as its header shows it."""
    try:
        with opened(file) as image:
            return kind_of(image), None
    except UNREADABLE as error:
        return "8 bits", _reason(file, error)


def name_files(files: Sequence[str]) -> str:
    """The first of some files, below the folder that holds them all, and how many more."""
    folder = os.path.commonpath([str(Path(file).parent) for file in files])
    names = [os.path.relpath(file, folder) for file in files[:SHOWN]]
    more = [f"and {len(files) - SHOWN} more"] if len(files) > SHOWN else []
    return f"{', '.join([*names, *more])} in {folder}"


# -- the data set ----------------------------------------------------------------------------------
MOST_SKIPPED = 100
"""Damaged files in a row: more are no accident."""


@dataclass(frozen=True)
class ImageFiles:
    """Decoded images with their labels; `ImagesTask.draw` makes arrays of them.

    values: the scale of images of more than 8 bits; see `decode`.
    skip_damaged: a file that cannot be read is a black image, `readable` 0; while training
        (`augment`) the next image takes its place. Else it is a DataError.
    """

    images: LabelledImages
    side: int
    _: KW_ONLY
    augment: bool
    skip_damaged: bool = False
    values: ValueRange = SIXTEEN_BITS
    features: TableFeatures | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tries = min(len(self), MOST_SKIPPED) if self.skip_damaged and self.augment else 1
        for offset in range(tries):
            try:
                return self._sample((index + offset) % len(self))
            except DataError as error:
                if error.id != DAMAGED:
                    raise
                problem = error
        if self.augment or not self.skip_damaged:
            raise problem
        blank = Image.new("RGB", (self.side, self.side))
        return {**self._labelled(index, blank), "augment": False, "readable": np.float32(0)}

    def _sample(self, index: int) -> dict[str, Any]:
        image = decode(self.images.files[index], self.side, self.values)
        return self._labelled(index, image)

    def _labelled(self, index: int, image: Image.Image) -> dict[str, Any]:
        label = np.array(self.images.labels[index])
        label = label if label.dtype.kind == "i" else label.astype(np.float32)
        sample = {"image": image, "label": label, "augment": self.augment}
        if self.features is not None:
            sample["features"] = self.features.values(self.images.texts[index])
        return {**sample, "readable": np.float32(1)}
