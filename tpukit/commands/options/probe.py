"""The options of `probe-batch`, by the panels that its help shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tpukit.commands.options.option_sets import Given, options_of
from tpukit.probe.batch.search import SearchSettings
from tpukit.train.config import TrainConfig

TASK, SEARCH, HARDWARE = "Task", "Search", "Hardware"
TASK_OWN = ("size", "model", "block_size", "loss", "tokenizer", "init")
"""Options that are settings of a task."""


def _option(*names: str, panel: str, help: str) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help)


SearchOptions = Annotated[
    Given,
    options_of(
        SearchSettings,
        {
            SEARCH: ("start", "max", "multiple_of", "margin", "global_batch_size", "time_limit"),
        },
    ),
]


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
        },
    ),
]
"""Where the task would be trained, and on what data."""

TargetOption = Annotated[
    str | None,
    _option(
        "--target",
        panel=HARDWARE,
        help="TPU to compile for (v5e-8, v6e-1, v4-8, ...) instead of measuring.",
    ),
]
