"""`tpukit predict`: writes the predictions of a trained run."""

from __future__ import annotations

import json
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
from tpukit.train.requests import PredictionOptions, PredictionRequest
from tpukit.train.submission import Predictions

if TYPE_CHECKING:
    from torch import nn

    from tpukit.commands.running import Use
    from tpukit.hardware.backend import Backend
    from tpukit.registry.trained import TrainedTask

    Log = Callable[[str], None]


PredictOptions = Annotated[Given, options_of(PredictionOptions)]


def predict(
    *,
    run: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run folder (default: the one run here), its own options in --help; several are"
            " averaged."
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
    folders = run or [default_run(task.task)]
    groups = [_runs_of_folds(folder, output.text) for folder in folders]
    shares = given.shares(len(groups)) or [1.0] * len(groups)
    cuts = _fitted_cuts(folders, groups, shares, output.text)
    paths = [path for group in groups for path in group]
    trained, *others = (open_trained(path, output.text, task.task, settings) for path in paths)
    weights = [share / len(each) for share, each in zip(shares, groups, strict=True) for _ in each]
    use = prediction(trained, given, own, others, cuts, weights)
    use_in_all_ranks(trained, use, chosen, kind, output)


def prediction(
    trained: TrainedTask, options: PredictionOptions, own: Given,
    others: Sequence[TrainedTask] = (), cuts: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> Use:  # fmt: skip
    """What `predict` does with the model of a run, averaged with others where there are any.

    own: options that the task declares; cuts: fitted out of fold, of a folder of folds; weights:
    of each run in the mean (default: the options').

    Raises what is known before a device is opened.
    """
    from tpukit.io.tables import read_table
    from tpukit.train.checks import expect
    from tpukit.train.metric_names import parse_metrics
    from tpukit.train.metrics import is_of_values
    from tpukit.train.submission import DEFAULT_OUT, match_sample, mean_of, write_submission
    from tpukit.train.task import overrides

    runs = [trained, *others]
    here = with_files_here(options)
    _require_csv(here.out)
    requests = [_request(each, here, own) for each in runs]
    weights = weights or options.shares(len(runs))
    if others:
        _require_averaged(runs)
    sample = None if here.sample_submission is None else read_table(here.sample_submission)
    for each, request in zip(runs, requests, strict=True):
        if overrides(each.task, "check_prediction"):
            each.task.check_prediction(request)

    gives_rows = overrides(trained.task, "predict_rows")

    def predicted(model: nn.Module, backend: Backend, log: Log) -> dict[str, Any]:
        if where := requests[0].run.unfinished:
            log(f"Warning: the run in {requests[0].run.folder.shown} is not finished ({where}).")
        fields = (averaged if gives_rows else written)(model, backend, log)
        if backend.is_main:
            send_output(options.out)
        return fields

    def averaged(model: nn.Module, backend: Backend, log: Log) -> dict[str, Any]:
        parts = [_rows_of(trained, requests[0], model, backend, log)]
        for each, request in zip(others, requests[1:], strict=True):
            parts.append(_rows_of(each, request, each.model_on(backend), backend, log))
        mean = mean_of(parts, weights)
        if not backend.is_main:
            return {}
        if others:
            log(f"The mean of {len(runs)} runs.")
        raw = is_of_values(parse_metrics(requests[0].run.train_config.get("metric")))
        fields = write_submission(mean, here.out or DEFAULT_OUT, sample, log, cuts, raw=raw)
        return {"task": trained.task.name, **plain(fields)}

    def written(model: nn.Module, backend: Backend, log: Log) -> dict[str, Any]:
        method = trained.task.predict
        found = method(model, backend, requests[0], log)
        fields: dict[str, Any] = plain(expect(found, dict, method, "a dict of JSON fields"))
        if sample is not None and backend.is_main:
            match_sample(_written(fields, requests[0]), sample, log)
        return fields

    return predicted


def _require_csv(out: Path | None) -> None:
    """Raises ConfigError for another kind of table."""
    from tpukit.io.tables import is_table_name

    if out is not None and is_table_name(out) and out.suffix.lower() != ".csv":
        raise ConfigError(
            f"--out {out.name}: predictions are written as CSV.",
            f"--out {out.name.partition('.')[0]}.csv",
        )


def _rows_of(
    trained: TrainedTask, request: PredictionRequest, model: nn.Module, backend: Backend, log: Log
) -> Predictions:
    """The raw predictions of one run."""
    from tpukit.train.checks import expect
    from tpukit.train.task import overrides

    assert overrides(trained.task, "predict_rows")
    method = trained.task.predict_rows
    rows = method(model, backend, request, log)
    return expect(rows, Predictions, method, "Predictions(ids, values, target)")


def _runs_of_folds(path: Path, log: Log) -> list[Path]:
    """A run alone, or of a folder of folds those that are finished. Raises ConfigError for a folder
    without one."""
    from tpukit.commands.folds import FOLD
    from tpukit.train.held_out import FILE
    from tpukit.train.run_folder import RunFolder, read_config

    folds = sorted(path.glob(f"{FOLD}*"), key=lambda fold: (len(fold.name), fold.name))
    if (path / "config.toml").is_file() or not folds:
        return [path]
    finished = [fold for fold in folds if (fold / FILE).is_file()]
    if not finished:
        raise ConfigError(
            f"{path}: none of its {len(folds)} folds is finished.",
            "Go on with their training command, or name the checkpoint of one: --run"
            f" {folds[0]}/checkpoints/STEP",
        )
    count = read_config(RunFolder(finished[0]))["task"].get("folds") or 0
    begun = [fold for fold in folds if fold not in finished]
    others = [path / f"{FOLD}{number}" for number in range(count)]  # not begun, or removed
    if left := [*map(str, begun), *(str(fold) for fold in others if fold not in folds)]:
        log(f"Warning: not finished, and left out: {', '.join(left)}")
    return finished


def _fitted_cuts(
    folders: Sequence[Path], groups: Sequence[list[Path]], shares: Sequence[float], log: Log
) -> Sequence[float] | None:
    """The cut points of a folder of folds, or those fitted to the mean of several, whose score is
    said; None where a run is none of folds."""
    from tpukit.train.held_out import SUMMARY_FILE, blended

    summaries = [folder / SUMMARY_FILE for folder in folders]
    if not all(summary.is_file() for summary in summaries):
        return None
    found = json.loads(summaries[0].read_bytes())
    if len(folders) == 1 or not found["metrics"]:
        cuts: Sequence[float] | None = found.get("cuts")
        return cuts
    name = next(iter(found["metrics"]))
    score, cuts, cut_score = blended(groups, shares, name)
    if score is None:
        log(
            f"Out of fold the mean has no {name}: the runs held out other samples, or it is a"
            " function of your own."
        )
        return None
    cut = "" if cuts is None else f", with cut points fitted to it {cut_score:.4g}"
    log(f"Out of fold the mean of {len(folders)} has {name} {score:.4g}{cut}.")
    return cuts


def _request(trained: TrainedTask, options: PredictionOptions, own: Given) -> PredictionRequest:
    if trained.run is None:
        raise ConfigError("Predictions need a run.", "Give the folder of one.")
    own = build_own(trained.task, "predict", own)
    return PredictionRequest(trained.run, **vars(options), options=own)


def _require_averaged(runs: Sequence[TrainedTask]) -> None:
    """Raises ConfigError for runs that are not of one task that gives rows, or were stopped: such a
    run would count as much as the others."""
    from tpukit.train.task import overrides

    task = runs[0].task
    for other in runs:
        same = type(other.task) is type(task) or (
            type(task).source is not None and type(other.task).source == type(task).source
        )
        if not same or not overrides(task, "predict_rows"):
            raise ConfigError(
                f"several --run: predictions of task {task.name!r} are not averaged"
                + (f" with those of {other.task.name!r}." if not same else "."),
                "Give one run, or several of a task with `predict_rows`.",
            )
        if other.run is not None and other.run.unfinished:
            raise ConfigError(
                f"several --run: the run in {other.run.folder.shown} is not finished"
                f" ({other.run.unfinished}).",
                "Finish it with its training command, or name the checkpoint that is meant:"
                f" --run {other.run.checkpoint.path}",
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
