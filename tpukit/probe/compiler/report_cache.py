"""What the compiler said before: one small file a program, target and version."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 2
"""Raised when what is stored changes its meaning."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`$TPUKIT_CACHE_DIR`, or a folder in the user's cache."""
    if given := environment.get("TPUKIT_CACHE_DIR"):
        return Path(given)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tpukit"


class AnswerCache:
    """Answers by the fingerprint of all that decides them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "compiled"

    def path(self, parts: Mapping[str, Any]) -> Path:
        """The file of an answer: `parts` are program, target, versions and effort."""
        text = json.dumps({"format": FORMAT, **parts}, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def read(self, parts: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer, or None; a damaged file counts as none."""
        try:
            answer = json.loads(self.path(parts).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None

    def write(self, parts: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Keeps an answer; a cache that cannot be written is no failure."""
        path = self.path(parts)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(answer, file)
            Path(partial).replace(path)
