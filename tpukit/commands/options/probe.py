"""The options of `probe-batch`, by the panels that its help shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tpukit.commands.options.option_sets import Given, options_of
from tpukit.train.config import TrainConfig

TASK, SEARCH, HARDWARE = "Task", "Search", "Hardware"
TASK_OWN = ("size", "model", "block_size", "loss", "tokenizer", "init")
"""Options that are settings of a task."""


def _option(*names: str, panel: str, help: str) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help)


@dataclass(frozen=True)
class SearchOptions:
    """Where the batch is looked for."""

    start: Annotated[
        int, _option("--start", panel=SEARCH, help="The first batch a device to try.")
    ] = 4
    maximum: Annotated[
        int, _option("--max", panel=SEARCH, help="The largest batch a device to try.")
    ] = 4096
    multiple_of: Annotated[
        int, _option("--multiple-of", panel=SEARCH, help="Try multiples of this only.")
    ] = 1
    margin: Annotated[
        float, _option("--margin", panel=SEARCH, help="Memory the recommended batch leaves free.")
    ] = 0.05
    time_limit: Annotated[
        str | None,
        _option("--time-limit", panel=SEARCH, help="Longest a trial may take (10m; compiler 30m)."),
    ] = None


@dataclass(frozen=True)
class TaskOptions:
    """What is trained; None is not given."""

    task: Annotated[
        str, _option("--task", panel=TASK, help="`eit`, `summarize`, or my_file.py:MyTask.")
    ] = "eit"
    size: Annotated[
        str | None,
        _option("--size", panel=TASK, help="EIT: tiny, small, published, published-reference."),
    ] = None
    model: Annotated[
        str | None, _option("--model", panel=TASK, help="Summaries: gpt2, ... or 6x6x384.")
    ] = None
    block_size: Annotated[
        int | None, _option("--block-size", panel=TASK, help="Summaries: longest text in tokens.")
    ] = None
    loss: Annotated[
        str | None, _option("--loss", panel=TASK, help="Summaries: lean or reference.")
    ] = None
    tokenizer: Annotated[
        str | None, _option("--tokenizer", panel=TASK, help="Summaries: gpt2, train or a file.")
    ] = None
    init: Annotated[
        str | None, _option("--init", panel=TASK, help="Summaries: the weights to start from.")
    ] = None

    def own(self) -> dict[str, Any]:
        """The task's own options; None is not given."""
        return {name: getattr(self, name) for name in TASK_OWN}


PlaceOptions = Annotated[
    Given,
    options_of(
        TrainConfig,
        {
            HARDWARE: ("hw", "devices", "precision", "shard", "memory_limit"),
            TASK: ("data_path",),
            SEARCH: ("global_batch_size",),
        },
    ),
]
"""Where the task would be trained, on what data, and at which global batch size."""

TargetOption = Annotated[
    str | None,
    _option("--target", panel=HARDWARE, help="Ask the TPU compiler: v5e-8, v6e-1, v4-8, ..."),
]
