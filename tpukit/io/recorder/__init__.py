"""Records uncaught exceptions with the values around them, in any Python program."""

import os
from pathlib import Path

RECORD_VARIABLE = "TPUKIT_RECORD"
"""Names the file of the records."""


def recording_environment(file: Path) -> dict[str, str]:
    """The environment in which every Python program records its uncaught exceptions in a file.

    The folder comes first on PYTHONPATH; its `sitecustomize` then imports the platform's own.
    """
    file.unlink(missing_ok=True)
    path = os.environ.get("PYTHONPATH")
    folders = [str(Path(__file__).parent), *([path] if path else [])]
    return {**os.environ, RECORD_VARIABLE: str(file), "PYTHONPATH": os.pathsep.join(folders)}
