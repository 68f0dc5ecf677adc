"""Image files that cannot be read, found by their headers before a run starts.

A whole header says nothing about the pixels: what else is damaged is met when it is decoded.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.process import is_first_rank
from tpukit.io.progress import Progress
from tpukit.tasks.images.data.image_decoding import (
    DAMAGED_HINT,
    header_problem,
    large_images_meant,
)

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
