"""`tpukit test`: evaluates a trained run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpukit.commands.options.hardware import UseHardware, hardware_options
from tpukit.commands.options.option_sets import Given, OwnOptions
from tpukit.commands.options.own_options import (
    DEFAULT_TASKS,
    app_with_own_options,
    build_own,
    default_run,
)
from tpukit.commands.options.training import parse_settings
from tpukit.commands.output import DebugOption, JsonOption, Output, shown_in_cell
from tpukit.commands.trained_run import TaskOptions, use_in_all_ranks
from tpukit.errors import ConfigError
from tpukit.hardware.select import prepare_environment
from tpukit.io.ranges import BATCH, COUNT, SEED, Range, range_problems

if TYPE_CHECKING:
    from torch import nn

    from tpukit.commands.trained_run import Use
    from tpukit.hardware.backend import Backend
    from tpukit.registry.trained import TrainedTask

    Log = Callable[[str], None]

RANGES: Mapping[str, Range] = {"limit": COUNT, "batch_size": BATCH, "seed": SEED}


@dataclasses.dataclass(frozen=True)
class TestOptions:
    """Fields of `EvaluationRequest`."""

    __test__ = False

    data: Annotated[
        str | None, typer.Option(help="Data set: a name that the task knows, or a path.")
    ] = None
    data_path: Annotated[
        Path | None, typer.Option(help="Folder the data lies in (the run's, else ./data).")
    ] = None
    limit: Annotated[int | None, typer.Option(help="Only the first N samples.")] = None
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", help="Samples in a batch, over all devices."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0
    out: Annotated[
        Path | None, typer.Option(help="Folder for predictions and pictures (in the run folder).")
    ] = None


def make_app(arguments: Sequence[str]) -> typer.Typer:
    return app_with_own_options(test, "test", arguments)


def test(
    *,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, or one checkpoint in it (results/deit); with --help, its own options."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A file of the published code (best.pt) instead of a run.")
    ] = None,
    task: TaskOptions,
    options: TestOptions,
    own: OwnOptions,
    hardware: UseHardware,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the weights as safetensors with a README to DIR, and exit."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Evaluate a trained run: metrics, baselines and pictures."""
    if run is not None and checkpoint is not None:
        raise ConfigError("--run and --checkpoint exclude each other.", "Give one of them.")
    if problems := range_problems(vars(options), RANGES):
        raise ConfigError(" ".join(problems), "`tpukit test --help` lists the options.")
    output = Output(as_json=as_json)
    chosen = hardware_options(hardware)
    kind = prepare_environment(chosen)
    trained = _open(run, checkpoint, task, output)
    if export is not None:
        _export(trained, export, output)
        return
    use_in_all_ranks(trained, evaluation(trained, options, own), chosen, kind, output)


def evaluation(trained: TrainedTask, options: TestOptions, own: Given) -> Use:
    """What `test` does with the model of a trained task; `own`: options that the task declares."""
    from tpukit.train.report.metric_table import metric_lines
    from tpukit.train.report.run_report import report_test
    from tpukit.train.requests import EvaluationRequest
    from tpukit.train.validation import metrics_of_run

    own_options = build_own(trained.task, "test", own)
    request = EvaluationRequest(
        trained.run, trained.checkpoint, options=own_options, **vars(options)
    )

    def evaluated(model: nn.Module, backend: Backend, log: Log) -> dict[str, Any]:
        fields = metrics_of_run(trained.task, model, backend, request, log)
        if backend.is_main and not shown_in_cell():
            for line in metric_lines(fields):
                log(line)
        if trained.run is not None and backend.is_main:
            report_test(trained.run, fields, log)
        return fields

    return evaluated


def _open(
    run: Path | None, checkpoint: Path | None, options: TaskOptions, output: Output
) -> TrainedTask:
    from tpukit.registry.trained import open_checkpoint_file, open_trained

    settings = parse_settings(options.settings or [])
    if checkpoint is None:
        return open_trained(run or default_run("test"), output.text, options.task, settings)
    return open_checkpoint_file(checkpoint, options.task or DEFAULT_TASKS["test"], settings)


def _export(trained: TrainedTask, folder: Path, output: Output) -> None:
    files = trained.export(folder)
    names = ", ".join(file.name for file in files)
    output.text(f"Exported to {folder}: {names}")
    output.result({"task": trained.task.name, "path": str(folder), "files": list(map(str, files))})
