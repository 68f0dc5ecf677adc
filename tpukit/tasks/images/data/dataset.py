"""Image files as a map-style data set."""

from __future__ import annotations

from typing import Any

from PIL import Image

from tpukit.errors import DataError
from tpukit.tasks.images.data.image_decoding import decode
from tpukit.tasks.images.data.listing import LabelledImages

MOST_SKIPPED = 100
"""Damaged files in a row: more are no accident."""
NO_IMAGE = -1
"""Label of a sample whose file cannot be read; `ImagesTask.collate` masks its row."""


class ImageFiles:
    """Decoded images with their labels; `ImagesTask.draw` makes arrays of them.

    skip_damaged: a file that cannot be read is a black image without a label; while training
        (`augment`) the next image takes its place. Else it is a DataError.
    """

    def __init__(
        self, images: LabelledImages, side: int, *, augment: bool, skip_damaged: bool = False
    ) -> None:
        self.images = images
        self.side = side
        self.augment = augment
        self.skip_damaged = skip_damaged

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self._sample(index)
        except DataError:
            if not self.skip_damaged:
                raise
        if self.augment:
            return self._next(index)
        blank = Image.new("RGB", (self.side, self.side))
        return {"image": blank, "label": NO_IMAGE, "augment": False}

    def _sample(self, index: int) -> dict[str, Any]:
        image = decode(self.images.files[index], self.side)
        return {"image": image, "label": self.images.labels[index], "augment": self.augment}

    def _next(self, index: int) -> dict[str, Any]:
        """The next image that can be read. Raises DataError where none follows soon."""
        last = min(len(self), MOST_SKIPPED) - 1
        for offset in range(1, last):
            try:
                return self._sample((index + offset) % len(self))
            except DataError:
                continue
        return self._sample((index + last) % len(self))
