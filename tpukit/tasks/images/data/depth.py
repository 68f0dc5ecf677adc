"""Images of more than 8 bits: the values that are black and white in a data set.

One scale holds for all files: a value means the same in each of them (a Hounsfield unit, a count of
photons). 8-bit images have theirs.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tpukit.errors import DataError
from tpukit.io.folders import JsonCache, cache_folder
from tpukit.io.process import allowed_cores, is_first_rank
from tpukit.io.progress import Progress

Kind = Literal["8 bits", "16-bit colours", "16 bits", "whole numbers", "floating point"]
Values = NDArray[Any]
KINDS: Mapping[str, Kind] = {
    "I;16": "16 bits", "I;16B": "16 bits", "I;16L": "16 bits", "I;16N": "16 bits",
    "I": "whole numbers", "F": "floating point",
}  # fmt: skip
"""Pillow's mode -> the kind of its values; others have 8 bits."""
SHALLOW_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".avif")
"""Formats of 8 bits alone."""
LARGEST_PIXELS = 2**29
"""More than a photograph has; the header of a damaged file may name any number."""
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What Pillow raises for a file that is damaged, or not an image."""
SHALLOW_KINDS: tuple[Kind, ...] = ("8 bits", "16-bit colours")
"""Those that Pillow gives 8 bits of."""
DEEP_COLOURS = re.compile(";16[BLN]")
"""What Pillow calls their pixels in a file."""
DARKEST = 63
"""Largest upper 8 bits of colours that have 14 bits or fewer: shown by them they are near black."""
WHOLE_KINDS: tuple[Kind, ...] = ("16 bits", "whole numbers")
SAMPLE_FORMAT, SIGNED = 339, 2
"""A tag of TIFF files, and its value for signed numbers."""
HALF = 32767
"""Largest value of 15 bits."""
MANY = 1000
"""Files from which on the progress is shown."""
AT_ONCE = 16
"""Files between two looks at the progress and at what is known."""
FORMAT = 1
"""Version of what the cache keeps."""
HINT = "Store them alike, or give the values of black and white: --set value_range=MIN:MAX"


@dataclass(frozen=True)
class ValueRange:
    """Values that are black (`low`) and white (`high`) in images of more than 8 bits.

    kinds: of the values that it is for; none: it was given, and holds for any.
    """

    low: float
    high: float
    kinds: tuple[Kind, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """`MIN:MAX`. Raises ValueError."""
        low, high = map(float, text.split(":"))
        if not -math.inf < low < high < math.inf:
            raise ValueError(text)
        return cls(low, high)

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        found = json.loads(content)
        return cls(found["low"], found["high"], tuple(found["kinds"]))

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def is_full(self) -> bool:
        """Whether it is that of unsigned 16 bits, beside which 8 bits show the same."""
        return (self.low, self.high) == (0, 65535)

    def __str__(self) -> str:
        return f"{self.low:.9g}:{self.high:.9g}"

    def grey(self, values: Values) -> NDArray[np.uint8]:
        """0 to 255; values outside the range are black or white, NaN is black."""
        scaled = (values.astype(np.float64) - self.low) * (255.0 / (self.high - self.low))
        return np.clip(np.nan_to_num(scaled, nan=0.0), 0, 255).astype(np.uint8)


SIXTEEN_BITS = ValueRange(0, 65535, ("16 bits",))
"""Range of a data set without deep images, for those of other data."""


def opened(file: str) -> Image.Image:
    """The image of a file, its header read. Raises `UNREADABLE`."""
    image = Image.open(file)
    width, height = image.size
    if width * height > LARGEST_PIXELS:
        image.close()
        raise ValueError(f"{width} x {height} pixels")
    return image


@contextmanager
def large_images_meant() -> Iterator[None]:
    """Silences Pillow's warnings of large images; `LARGEST_PIXELS` bounds them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def kind_of(image: Image.Image) -> Kind:
    """The kind of an image's values, by its header."""
    if image.mode == "L" and _is_signed(image):
        return "whole numbers"
    is_deep = any(DEEP_COLOURS.search(str(tile[3])) for tile in getattr(image, "tile", ()))
    return KINDS.get(image.mode, "16-bit colours" if is_deep else "8 bits")


def _is_signed(image: Image.Image) -> bool:
    return SIGNED in getattr(image, "tag_v2", {}).get(SAMPLE_FORMAT, ())


def values_of(image: Image.Image) -> Values:
    """(height, width) values as the file has them."""
    values = np.asarray(image)
    if image.mode == "L":
        values = values.view(np.int8)
    elif image.mode == "I" and image.format == "TIFF" and not _is_signed(image):
        values = values.view(np.uint32)  # Pillow has signed ones alone
    return values


def require_kind(file: str, kind: Kind, values: ValueRange) -> None:
    """Raises DataError for a file whose values a scale is not for: they may mean anything."""
    if kind in values.kinds or (kind in SHALLOW_KINDS and values.is_full):
        return
    if kind == "16-bit colours":
        raise _dark_colours(file)
    if not values.kinds:
        return
    of = "8-bit images" if values == SIXTEEN_BITS else values.kinds[-1]
    raise DataError(
        f"{file} has {kind}; the data set's scale is that of {of}.",
        "Convert it, or give the values of black and white: --set value_range=MIN:MAX",
        id="value-range",
    )


# -- the range of a data set -----------------------------------------------------------------------
def range_of(kinds: Mapping[str, Kind], unread: Sequence[str]) -> tuple[ValueRange, str | None]:
    """The range of a data set, by the kind of each file's values, and a line about it.

    unread: files whose headers were not read in time.

    The line is None where all have 8 bits. Raises DataError where the values have no common scale.
    """
    colours = [file for file, kind in kinds.items() if kind == "16-bit colours"]
    if colours and _extremes(colours, DARKEST)[1] <= DARKEST:
        raise _dark_colours(colours[0])
    kinds = {**kinds, **dict.fromkeys(colours, "8 bits")}
    deep = [file for file, kind in kinds.items() if kind != "8 bits"]
    if not deep:
        return SIXTEEN_BITS, None
    there = {kind: file for file, kind in kinds.items()}
    is_whole = "floating point" not in there
    if not is_whole and len(there) > 1:
        raise _no_common_scale(there)
    # Of unsigned 16 bits the upper half decides the range.
    stops_at = HALF if there.keys() <= {"8 bits", "16 bits"} else math.inf
    ends = _rounded(*_extremes([*deep, *unread], stops_at), is_whole)
    found = ValueRange(*ends, WHOLE_KINDS if is_whole else ("floating point",))
    if "8 bits" in there and not found.is_full:
        raise _no_common_scale(there)
    count = f"{len(deep)} of {len(kinds)}" if len(deep) < len(kinds) else f"all {len(deep)}"
    return found, (
        f"Values of {count} images: {found.kinds[-1]}, black is {found.low:.9g}, white"
        f" {found.high:.9g}; others: --set value_range=MIN:MAX"
    )


def _dark_colours(file: str) -> DataError:
    return DataError(
        f"{file} has colours of 16 bits, of which the upper 8 are read: no scale is applied to"
        " them, and those of 14 bits or fewer are near black.",
        "Store them in 8 bits, or as grey images.",
        id="value-range",
    )


def _no_common_scale(there: Mapping[Kind, str]) -> DataError:
    names = " and ".join(f"{kind} ({file})" for kind, file in there.items())
    return DataError(f"the images have {names}: their values have no common scale.", HINT)


def _rounded(low: float, high: float, whole: bool) -> tuple[float, float]:
    """Extremes as a range: from 0 without negative values, whole numbers to the end of their bits,
    others to 1 or 255 where they come near."""
    if low < 0:
        return low, high if high > low else low + 1
    if whole:
        return 0, 2.0 ** max(8, math.ceil(math.log2(high + 1))) - 1
    return 0, next((end for end in (1.0, 255.0) if end / 2 < high <= end), high or 1.0)


def _extremes(files: Sequence[str], stops_at: float) -> tuple[float, float]:
    """The smallest and largest finite value of files, kept in the cache for the next run; those
    that cannot be read are left out. A value above `stops_at` ends the search."""
    cache, key = JsonCache(cache_folder() / "images", FORMAT), {"files": _digest(files)}
    if (known := cache.read(key)) is not None:
        return float(known["low"]), float(known["high"])
    low, high = math.inf, -math.inf
    enabled = is_first_rank() and len(files) > MANY
    with (
        Progress("reading values", len(files), enabled=enabled) as progress,
        ThreadPoolExecutor(allowed_cores()) as threads,
        large_images_meant(),
    ):
        for start in range(0, len(files), AT_ONCE):
            some = files[start : start + AT_ONCE]
            for least, most in threads.map(_extremes_of, some):
                low, high = min(low, least), max(high, most)
            progress.update(start + len(some))
            if high > stops_at:
                break
    if low > high:
        low = high = 0.0
    cache.write(key, {"low": low, "high": high})
    return low, high


def _extremes_of(file: str) -> tuple[float, float]:
    try:
        with opened(file) as image:
            if kind_of(image) == "8 bits":
                return math.inf, -math.inf
            values = values_of(image)
    except UNREADABLE:
        return math.inf, -math.inf
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size else (math.inf, -math.inf)


def _digest(files: Sequence[str]) -> str:
    """Changes with the name, size and time of a file, not with their order: folds have one."""
    places = ((path.absolute(), path.stat()) for path in map(Path, sorted(files)))
    lines = [(str(path), status.st_size, status.st_mtime_ns) for path, status in places]
    return hashlib.sha256(repr(lines).encode()).hexdigest()
