"""File systems of a test's own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """The new `folder` as a tmpfs with `options`; skips the test where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.call(mount, stderr=subprocess.DEVNULL):
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        subprocess.check_call(["umount", "-l", str(folder)])
