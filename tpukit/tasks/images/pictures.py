"""Pictures of a classifier's results: confusion matrix, mistakes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpukit.io.files import write_picture
from tpukit.tasks.images.data.depth import ValueRange
from tpukit.tasks.images.data.files import decode
from tpukit.tasks.images.data.listing import LabelledImages

NAMED_CLASSES = 40
"""With more their names would overlap."""
COUNTED_CLASSES = 15
"""With more their counts are not written in."""
COLUMNS = 4


def draw_confusion(path: Path, counts: NDArray[np.int64], classes: Sequence[str]) -> None:
    """A PNG: rows are true classes, columns predicted ones; colour is the share of the row."""
    from matplotlib.figure import Figure

    side = min(14.0, 3.0 + 0.35 * len(classes))
    figure = Figure(figsize=(side, side))
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if len(classes) <= NAMED_CLASSES:
        # Of names in another encoding than UTF-8 a byte cannot be drawn.
        names = [name.encode(errors="replace").decode() for name in classes]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8, parse_math=False)
        axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    if len(classes) <= COUNTED_CLASSES:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center",
                      fontsize=7, color=colour)  # fmt: skip
    axes.set_title(f"{counts.trace()} of {counts.sum()} right", fontsize=10)
    figure.tight_layout()
    write_picture(path, figure)


def draw_mistakes(
    path: Path,
    images: LabelledImages,
    probabilities: NDArray[np.float32],
    places: NDArray[np.int64],
    side: int,
    values: ValueRange,
) -> None:
    """A PNG of the images at `places`, each with its class, the predicted one and its share."""
    from matplotlib.figure import Figure

    rows = max(1, -(-len(places) // COLUMNS))
    figure = Figure(figsize=(2.2 * COLUMNS, 2.6 * rows))
    cells = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for cell in cells:
        cell.set_axis_off()
    if not len(places):
        cells[0].text(0, 0.5, "no mistakes", fontsize=10)
    for cell, place in zip(cells, places, strict=False):
        best = int(probabilities[place].argmax())
        cell.imshow(decode(images.files[place], side, values))
        title = (
            f"{images.classes[images.labels[place]]}\npredicted {images.classes[best]}"
            f" {probabilities[place, best]:.0%}\n{Path(images.files[place]).name}"
        )
        title = title.encode(errors="replace").decode()
        cell.set_title(title, fontsize=7, parse_math=False)
    figure.tight_layout()
    write_picture(path, figure)
