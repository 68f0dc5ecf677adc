"""The options of `probe-batch`, by the panels that its help shows."""

from __future__ import annotations

from typing import Annotated

import typer

from tpukit.commands.options.option_sets import Given, options_of
from tpukit.probe.batch.search import SearchSettings
from tpukit.train.config import TrainConfig

TASK, OWN_MODEL, SEARCH, HARDWARE = "Task", "A model of your own", "Search", "Hardware"
SEARCH_FIELDS = ("start", "max", "multiple_of", "margin", "global_batch_size", "time_limit",
                 "trial_time", "max_time", "exact")  # fmt: skip
HARDWARE_FIELDS = ("hw", "devices", "precision", "shard", "kernels", "memory_limit")

SearchOptions = Annotated[Given, options_of(SearchSettings, {SEARCH: SEARCH_FIELDS})]
PlaceOptions = Annotated[
    Given, options_of(TrainConfig, {HARDWARE: HARDWARE_FIELDS, TASK: ("data_path",)})
]
"""Options of the hardware and the data."""
TargetOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=HARDWARE,
        help="TPU to compile for (v5e-8, v6e-1, ...), or GPUs to predict for (t4, 2xt4, a100-40,"
        " 24GB), instead of measuring.",
    ),
]
CompareOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=HARDWARE,
        metavar="TARGET,TARGET,...",
        help="Targets side by side, in place of --target: t4,l4,a100-40.",
    ),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        rich_help_panel=OWN_MODEL,
        metavar="NAME=SHAPE[:DTYPE[<N]]",
        help="An input of --model, without the batch: image=3x224x224, 'ids=128:int64<1000'.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        rich_help_panel=OWN_MODEL,
        help="my_file.py:make_model, or package.module:function; without a colon the task's"
        " setting `model`.",
    ),
]
