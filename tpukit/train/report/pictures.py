"""Pictures of a run folder, embedded in a page."""

import base64
import io
from functools import lru_cache
from pathlib import Path

MOST_PICTURES = 16
MOST_BYTES = 1_200_000
"""Maximum bytes of all pictures of a page together, before base64."""
SIDES = 1600, 4000
"""Largest width and height in pixels."""


def pictures_of(path: Path) -> list[Path]:
    """Pictures that evaluations left in a run folder; the loss curve is drawn anew."""
    found = [*path.glob("*.png"), *path.glob("*/*.png")]
    return sorted(path for path in found if path.name != "loss.png")[:MOST_PICTURES]


def data_uri(path: Path, most_bytes: int) -> str | None:
    """A picture in at most `most_bytes` bytes; None where it cannot be read."""
    try:
        stat = path.stat()
        return _encoded(path, (stat.st_mtime_ns, stat.st_size), most_bytes)
    except Exception:  # whatever a damaged picture makes its decoder raise
        return None


@lru_cache(2 * MOST_PICTURES)
def _encoded(path: Path, state: tuple[int, int], most_bytes: int) -> str:
    """The picture of a file in this state, as it is where it is small enough, else shrunk."""
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        if state[1] <= most_bytes and image.format == "PNG":
            return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        shrunk = image.convert("RGB")
    shrunk.thumbnail(SIDES)
    while True:
        content = io.BytesIO()
        shrunk.save(content, "webp", quality=80, method=2)
        if content.tell() <= most_bytes:
            return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"
        scale = 0.9 * (most_bytes / content.tell()) ** 0.5
        shrunk.thumbnail((shrunk.width * scale, shrunk.height * scale))
