"""Trackers of other libraries: wandb and trackio get each line of metrics.jsonl."""

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

TrackerName = Literal["tensorboard", "wandb", "trackio"]
"""Libraries that show curves; the event files of the first are always written."""


def missing_tracker(name: str) -> str | None:
    """What to say where a tracker's library is not installed."""
    if name == "tensorboard" or importlib.util.find_spec(name) is not None:
        return None
    return f"--track {name}: the package {name} is not installed. Use pip install {name}."


def start_tracker(name: TrackerName, folder: Path, tables: Mapping[str, Any]) -> Any:
    """A library's run, with `log` and `finish`; None: TensorBoard's files suffice.

    The same run folder goes on with the same run of the library. Whether it sends anything is its
    own matter (WANDB_MODE=offline).
    """
    if name == "tensorboard":
        return None
    library: Any = importlib.import_module(name)
    project = os.environ.get("WANDB_PROJECT", str(tables["task"]["name"]))
    own: dict[str, Any] = {}
    if name == "wandb":
        place = str(folder.resolve())
        own = {"dir": place, "id": hashlib.sha256(place.encode()).hexdigest()[:16]}
    config = {table: dict(values) for table, values in tables.items()}
    return library.init(project=project, name=folder.name, config=config, resume="allow", **own)
