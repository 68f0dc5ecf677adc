"""`tpukit test`: evaluates a trained run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpukit.commands.options.option_sets import Given, OwnOptions, options_of
from tpukit.commands.options.own_options import DEFAULT_TASK, build_own, default_run
from tpukit.commands.options.training import parse_settings
from tpukit.commands.output import DebugOption, JsonOption, Output, plain, shown_in_cell
from tpukit.commands.running import (
    TaskOptions,
    TrainedSource,
    UseHardware,
    hardware_options,
    use_in_all_ranks,
    with_files_here,
)
from tpukit.errors import ConfigError
from tpukit.hardware.select import prepare_environment
from tpukit.io.mirror import output_here, send_output
from tpukit.io.remote import address_of
from tpukit.train.config import build
from tpukit.train.requests import EvaluationOptions, EvaluationRequest

if TYPE_CHECKING:
    from torch import nn

    from tpukit.commands.running import Use
    from tpukit.hardware.backend import Backend
    from tpukit.registry.trained import TrainedTask

    Log = Callable[[str], None]

TestOptions = Annotated[Given, options_of(EvaluationOptions)]


def test(
    *,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, or one checkpoint in it (default: the one run here); with --help, its"
            " own options."
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
    given = build(EvaluationOptions, options)
    output = Output(as_json=as_json)
    chosen = hardware_options(hardware)
    kind = prepare_environment(chosen)
    trained = _open(run, checkpoint, task, output)
    if export is not None:
        _export(trained, export, output)
        return
    use_in_all_ranks(trained, evaluation(trained, given, own), chosen, kind, output)


def evaluation(trained: TrainedTask, options: EvaluationOptions, own: Given) -> Use:
    """What `test` does with the model of a trained task; `own`: options that the task declares."""
    from tpukit.train.evaluation import metrics_of_run
    from tpukit.train.report.page import report_test
    from tpukit.train.report.tested import metric_lines

    own_options = build_own(trained.task, "test", own)
    here = with_files_here(options)
    request = EvaluationRequest(
        trained.run, trained.checkpoint, options=own_options, **vars(here),
        data_address=address_of(options.data_path),
    )  # fmt: skip

    def evaluated(model: nn.Module, backend: Backend, log: Log) -> dict[str, Any]:
        fields: dict[str, Any] = plain(metrics_of_run(trained.task, model, backend, request, log))
        if backend.is_main and not shown_in_cell():
            for line in metric_lines(fields):
                log(line)
        if backend.is_main:
            send_output(options.out)
        if trained.run is not None and backend.is_main:
            report_test(trained.run, fields, log)
        return fields

    return evaluated


def _open(
    run: Path | None, checkpoint: Path | None, options: TrainedSource, output: Output
) -> TrainedTask:
    from tpukit.registry.trained import open_checkpoint_file, open_trained

    settings = parse_settings(options.settings or [])
    if checkpoint is None:
        return open_trained(run or default_run(options.task), output.text, options.task, settings)
    return open_checkpoint_file(checkpoint, options.task or DEFAULT_TASK, settings)


def _export(trained: TrainedTask, folder: Path, output: Output) -> None:
    files = trained.export(output_here(folder) or folder)
    send_output(folder)
    names = ", ".join(file.name for file in files)
    output.text(f"Exported to {folder}: {names}")
    output.result({"task": trained.task.name, "path": str(folder), "files": list(map(str, files))})
