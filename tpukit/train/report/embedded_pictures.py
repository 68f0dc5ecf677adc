"""Pictures of a run folder, embedded in a page."""

from __future__ import annotations

import base64
import io
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


class EmbeddedPictures:
    """Pictures as data URIs; each is read again only when its file has changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, int, int, int], str] = {}

    def uri(self, path: Path, most_bytes: int) -> str | None:
        """The picture in at most `most_bytes` bytes; None where it cannot be read."""
        try:
            stat = path.stat()
            key = path, stat.st_mtime_ns, stat.st_size, most_bytes
            if key not in self._known:
                self._known[key] = data_uri(path, most_bytes)
            return self._known[key]
        except Exception:  # whatever a damaged picture makes its decoder raise
            return None


def data_uri(path: Path, most_bytes: int) -> str:
    """A picture as it is where that is small enough, else shrunk."""
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        if path.stat().st_size <= most_bytes and image.format == "PNG":
            return _encoded(path.read_bytes(), "png")
        shrunk = image.convert("RGB")
    shrunk.thumbnail(SIDES)
    while True:
        content = io.BytesIO()
        shrunk.save(content, "webp", quality=80, method=2)
        if content.tell() <= most_bytes:
            return _encoded(content.getvalue(), "webp")
        scale = 0.9 * (most_bytes / content.tell()) ** 0.5
        shrunk.thumbnail((shrunk.width * scale, shrunk.height * scale))


def _encoded(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
