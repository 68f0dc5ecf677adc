"""What runs on each host, over ssh: answers questions, a line of JSON each.

python -m tpukit.probe.hosts.agent
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpukit.io.ranges import shown

PACKAGES = ("tpukit", "torch", "torch-xla", "torch-tpu", "libtpu", "accelerate", "timm", "numpy")
CONNECT_SECONDS = 5.0
READ_FILES, READ_BYTES = 1000, 2**16


class Agent:
    """One host's answers: each public method is a question, its arguments the question's fields."""

    def __init__(self) -> None:
        self._listening: socket.socket | None = None

    def versions(self) -> dict[str, str]:
        """Versions of Python and of the packages that ranks must share."""
        found = {"python": platform.python_version(), "machine": platform.machine()}
        for name in PACKAGES:
            with suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found

    def data(self, path: str) -> dict[str, Any]:
        """Number, bytes and digest of the files under a path."""
        root = Path(path)
        if not root.exists():
            raise FileNotFoundError(f"there is no {path}")
        files = sorted(_files(root))
        sizes = [file.stat().st_size for file in files]
        digest = hashlib.sha256()
        every = max(1, len(files) // READ_FILES)
        for index, (file, size) in enumerate(zip(files, sizes, strict=True)):
            digest.update(os.fsencode(file.relative_to(root)) + f"\0{size}\0".encode())
            if index % every == 0:
                with file.open("rb") as opened:
                    digest.update(opened.read(READ_BYTES))
        return {"files": len(files), "bytes": sum(sizes), "digest": digest.hexdigest()}

    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def listen(self, port: int) -> None:
        """Listens on every interface until `close`."""
        self._listening = socket.create_server(("", port), backlog=1024)

    def close(self) -> None:
        """Ends `listen`."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def connect(self, host: str, port: int) -> float:
        """Seconds that a connection took."""
        started = time.monotonic()
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            return time.monotonic() - started


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    for folder, _, names in os.walk(root):
        yield from (path for name in names if (path := Path(folder, name)).is_file())


def main() -> None:
    """Answers until standard input ends."""
    agent = Agent()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"answer": getattr(agent, question.pop("ask"))(**question)}
        except OSError as error:
            answer = {"error": error.strerror or str(error) or shown(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
