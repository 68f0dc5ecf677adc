"""Results to look at: a grid of images, and the predictions as `.npz` and `.mat`."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.io.files import write_picture
from tpukit.tasks.eit.metrics import Images, disk_mask

INCHES = 1.5
COLOURS = ("-1: resistive", "0: background", "+1: conductive")
"""Labels below the colour bar."""


def draw_grid(
    path: Path,
    columns: Mapping[str, Images],
    names: Sequence[str],
    notes: Mapping[str, Sequence[str]],
    caption: str,
) -> None:
    """A PNG: a row a sample, a column for each entry of `columns` (n, 128, 128).

    `notes` gives a column's text under each image. Colours run from -1 (blue) to 1 (red).
    """
    from matplotlib.figure import Figure

    rows = len(names)
    width, height = INCHES * len(columns) + 0.6, (INCHES + 0.2) * rows + 1.25
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, len(columns), squeeze=False)
    for column, (title, images) in enumerate(columns.items()):
        axes[0, column].set_title(title, fontsize=9)
        for row in range(rows):
            cell = axes[row, column]
            # Outside the disk it stays white.
            inside = np.where(disk_mask(images.shape[-1]), images[row], np.nan)
            drawn = cell.imshow(inside, vmin=-1, vmax=1, cmap="RdBu_r")
            cell.set_xticks([])
            cell.set_yticks([])
            cell.set_frame_on(False)
            if title in notes:
                cell.set_xlabel(notes[title][row], fontsize=7)
    for row, name in enumerate(names):
        axes[row, 0].set_ylabel(name, fontsize=7)
    figure.subplots_adjust(
        left=0.35 / width, right=1 - 0.15 / width, bottom=0.95 / height, top=1 - 0.3 / height,
        wspace=0.05, hspace=0.15,
    )  # fmt: skip
    place = figure.add_axes((0.8 / width, 0.5 / height, 1 - 1.6 / width, 0.12 / height))
    bar = figure.colorbar(drawn, cax=place, orientation="horizontal", ticks=[-1, 0, 1])
    bar.ax.set_xticklabels(COLOURS, fontsize=7)
    figure.text(0.5, 0.005, caption, ha="center", fontsize=6, wrap=True)
    write_picture(path, figure)


def encode_predictions(arrays: Mapping[str, NDArray[Any]], names: list[str]) -> bytes:
    """An `.npz` with the arrays and `names`."""
    stream = io.BytesIO()
    np.savez(stream, **arrays, names=np.array(names))  # type: ignore[arg-type]
    return stream.getvalue()


def encode_matlab(arrays: Mapping[str, NDArray[Any]], names: list[str]) -> bytes:
    """A `.mat` with the arrays and `names`, a cell array."""
    from scipy.io import savemat

    stream = io.BytesIO()
    savemat(stream, {**arrays, "names": np.array(names, dtype=object)}, do_compression=True)
    return stream.getvalue()


ENCODERS = {".npz": encode_predictions, ".mat": encode_matlab}
