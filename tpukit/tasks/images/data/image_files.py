"""Image files as a map-style data set."""

from __future__ import annotations

from typing import Any

from tpukit.errors import DataError
from tpukit.tasks.images.data.image_decoding import decode
from tpukit.tasks.images.data.listing import LabelledImages

MOST_SKIPPED = 100
"""Damaged files in a row: more are no accident."""


class ImageFiles:
    """Decoded images with their labels; `ImagesTask.draw` makes arrays of them."""

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
        place = index
        while True:
            try:
                image = decode(self.images.files[place], self.side)
            except DataError:
                place = (place + 1) % len(self)
                if not self.skip_damaged or (place - index) % len(self) in (0, MOST_SKIPPED):
                    raise
            else:
                label = self.images.labels[place]
                return {"image": image, "label": label, "augment": self.augment}
