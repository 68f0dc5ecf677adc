"""`tpukit predict`: writes the predictions of a trained run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpukit.commands.options.option_sets import Given, OwnOptions, options_of
from tpukit.commands.options.own_options import build_own, default_run
from tpukit.commands.options.training import parse_settings
from tpukit.commands.output import DebugOption, JsonOption, Output, plain
from tpukit.commands.running import (
    TaskOptions,
    UseHardware,
    hardware_options,
    use_in_all_ranks,
    with_files_here,
)
from tpukit.errors import ConfigError
from tpukit.hardware.select import prepare_environment
from tpukit.io.mirror import send_output
from tpukit.train.config import build
from tpukit.train.requests import AveragedRun, PredictionOptions, PredictionRequest

if TYPE_CHECKING:
    from torch import nn

    from tpukit.commands.running import Use
    from tpukit.hardware.backend import Backend
    from tpukit.registry.trained import TrainedTask
    from tpukit.train.run_folder import TrainedRun

    Log = Callable[[str], None]


PredictOptions = Annotated[Given, options_of(PredictionOptions)]


def predict(
    *,
    run: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run folder (default: the one run here), its own options in --help; several are"
            " averaged (images)."
        ),
    ] = None,
    task: TaskOptions,
    options: PredictOptions,
    own: OwnOptions,
    hardware: UseHardware,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a trained run's predictions: summaries or classes of a test file, images of a folder.

    The same command again goes on where a killed one stopped.
    """
    from tpukit.registry.trained import open_trained

    output, given = Output(as_json=as_json), build(PredictionOptions, options)
    chosen = hardware_options(hardware)
    kind = prepare_environment(chosen)
    settings = parse_settings(task.settings or [])
    trained, *others = (
        open_trained(path, output.text, task.task, settings)
        for path in run or [default_run(task.task)]
    )
    use_in_all_ranks(trained, prediction(trained, given, own, others), chosen, kind, output)


def prediction(
    trained: TrainedTask, options: PredictionOptions, own: Given, others: Sequence[TrainedTask] = ()
) -> Use:
    """What `predict` does with the model of a run, averaged with others where there are any.

    own: options that the task declares. Raises what is known before a device is opened.
    """
    from tpukit.io.sample_submission import match_sample
    from tpukit.io.tables import read_table
    from tpukit.train.checks import expect

    if trained.run is None:
        raise ConfigError("Predictions need a run.", "Give the folder of one.")
    averaged = [_averaged(trained, other) for other in others]
    for run in (trained.run, *(other.run for other in averaged)) if averaged else ():
        _require_finished(run)
    here = with_files_here(options)
    request = PredictionRequest(
        trained.run, **vars(here), options=build_own(trained.task, "predict", own),
        averaged=averaged,
    )  # fmt: skip
    sample = None if here.sample_submission is None else read_table(here.sample_submission)
    trained.task.check_prediction(request)
    method = trained.task.predict

    def predicted(model: nn.Module, backend: Backend, log: Log) -> dict[str, Any]:
        if where := request.run.unfinished:
            log(f"Warning: the run in {request.run.folder.shown} is not finished ({where}).")
        found = method(model, backend, request, log)
        fields: dict[str, Any] = plain(expect(found, dict, method, "a dict of JSON fields"))
        if sample is not None and backend.is_main:
            match_sample(_written(fields, request), sample, log)
        if backend.is_main:
            send_output(options.out)
        return fields

    return predicted


def _averaged(trained: TrainedTask, other: TrainedTask) -> AveragedRun:
    """Another run, as one of the first's task. Raises ConfigError where that is not averaged."""

    task = trained.task
    same = type(other.task) is type(task) or (
        type(task).source is not None and type(other.task).source == type(task).source
    )
    if not task.averages_runs or other.run is None or not same:
        raise ConfigError(
            f"several --run: predictions of task {task.name!r} are not averaged"
            + (f" with those of {other.task.name!r}." if task.averages_runs else "."),
            "Give one run, or several of the task images.",
        )
    return AveragedRun(other.run, other.task, other.model_on)


def _require_finished(run: TrainedRun) -> None:
    """Raises ConfigError for a run that was stopped: it would count as much as the others."""
    if run.unfinished:
        raise ConfigError(
            f"several --run: the run in {run.path} is not finished ({run.unfinished}).",
            "Finish it with its training command, or name the checkpoint that is meant:"
            f" --run {run.checkpoint.path}",
        )


def _written(fields: dict[str, Any], request: PredictionRequest) -> Path:
    """The file that a task wrote."""
    path = fields.get("path", request.out)
    if path is None:
        raise ConfigError(
            "--sample-submission: the task does not say which file it wrote.",
            'Return {"path": str(out), ...} from `predict`, or name the file with --out.',
        )
    return Path(path)
