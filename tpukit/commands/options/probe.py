"""The options of `probe-batch`, by the panels that its help shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tpukit.commands.options.training import TrainingOptions, TrainingRequest

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
    global_batch_size: Annotated[
        int | None,
        _option("--global-batch-size", panel=SEARCH, help="Find the accumulation that reaches it."),
    ] = None
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
    settings: Annotated[
        list[str] | None, _option("--set", panel=TASK, help="NAME=VALUE: any other setting.")
    ] = None
    config: Annotated[
        str | None, _option("--config", panel=TASK, help="A TOML file of settings.")
    ] = None
    preset: Annotated[
        str | None, _option("--preset", panel=TASK, help="quick, safe, balanced or fast.")
    ] = None
    data_path: Annotated[
        str | None, _option("--data-path", panel=TASK, help="Folder of the data, for its lengths.")
    ] = None

    def request(self) -> TrainingRequest:
        """The task's own part of a training."""
        return TrainingRequest(self.task, {name: getattr(self, name) for name in TASK_OWN}, "")


@dataclass(frozen=True)
class PlaceOptions:
    """Where it would be trained; None is not given."""

    target: Annotated[
        str | None,
        _option("--target", panel=HARDWARE, help="Ask the TPU compiler: v5e-8, v6e-1, v4-8, ..."),
    ] = None
    hw: Annotated[
        str | None, _option("--hw", panel=HARDWARE, help="Measure on auto, tpu, gpu or cpu.")
    ] = None
    devices: Annotated[
        int | None, _option("--devices", "--nproc", panel=HARDWARE, help="Devices to use (all).")
    ] = None
    precision: Annotated[
        str | None, _option("--precision", panel=HARDWARE, help="auto, bf16, fp16, fp32 (auto).")
    ] = None
    shard: Annotated[
        bool, _option("--shard", panel=HARDWARE, help="Shard weights and optimizer over devices.")
    ] = False
    memory_limit: Annotated[
        str | None,
        _option("--memory-limit", panel=HARDWARE, help="Memory to live within (measured): 4GB."),
    ] = None


def training_options(
    search: SearchOptions, task: TaskOptions, place: PlaceOptions
) -> TrainingOptions:
    """What a training command would be given for the same."""
    return TrainingOptions(
        data_path=task.data_path,
        global_batch_size=search.global_batch_size,
        preset=task.preset,
        config=task.config,
        hw=place.hw,
        devices=place.devices,
        precision=place.precision,
        shard=place.shard or None,
        memory_limit=place.memory_limit,
        settings=task.settings,
    )
