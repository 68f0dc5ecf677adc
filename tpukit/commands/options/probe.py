"""The options of `probe-batch`, by the panels that its help shows."""

from __future__ import annotations

from typing import Annotated

import typer

from tpukit.commands.options.option_sets import Given, options_of
from tpukit.probe.batch.search import SearchSettings
from tpukit.train.config import TrainConfig

TASK, SEARCH, HARDWARE = "Task", "Search", "Hardware"
SEARCH_FIELDS = ("start", "max", "multiple_of", "margin", "global_batch_size", "time_limit",
                 "exact")  # fmt: skip
HARDWARE_FIELDS = ("hw", "devices", "precision", "shard", "memory_limit")

SearchOptions = Annotated[Given, options_of(SearchSettings, {SEARCH: SEARCH_FIELDS})]
PlaceOptions = Annotated[
    Given, options_of(TrainConfig, {HARDWARE: HARDWARE_FIELDS, TASK: ("data_path",)})
]
"""Where the task would be trained, and on what data."""
TaskOption = Annotated[
    str,
    typer.Option("--task", rich_help_panel=TASK, help="`eit`, `summarize`, or my_file.py:MyTask."),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=HARDWARE,
        help="TPU to compile for (v5e-8, v6e-1, v4-8, ...) instead of measuring.",
    ),
]
