"""Files of one JSON object a line, which grow while they are read."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class NewLines:
    """The whole lines that a growing file gained since it was last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def __iter__(self) -> Iterator[str]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line.decode(errors="replace")


def json_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of the lines; a line that is damaged is left out."""
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row
