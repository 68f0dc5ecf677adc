"""`tpukit probe-batch`: which batch fits, measured here or asked of the TPU compiler."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tpukit.commands.options.option_sets import with_option_sets
from tpukit.commands.options.probe import (
    PlaceOptions,
    SearchOptions,
    TaskOptions,
    training_options,
)
from tpukit.commands.options.training import (
    DecidedTraining,
    TrainingOptions,
    TrainingRequest,
    decide,
)
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError
from tpukit.train.config import parse_duration

if TYPE_CHECKING:
    from tpukit.probe.batch.evaluators import Answerer
    from tpukit.probe.batch.recommend import FindSettings
    from tpukit.probe.batch.trial import TaskSource

app = typer.Typer()
TASK_FACTORY = "tpukit.tasks.registry:load_task"
MEASURED_SECONDS, COMPILED_SECONDS = 600.0, 1800.0


@app.command()
@with_option_sets
def probe_batch(
    task: TaskOptions,
    search: SearchOptions,
    place: PlaceOptions,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the batch that fits: measured here, or asked of the TPU compiler (--target).

    Every trial runs the training step itself in a process of its own.
    """
    options = training_options(search, task, place)
    settings = _search_settings(search)
    _check_target(place.target, options)
    request = task.request()
    decided = decide(request, options)
    seconds = parse_duration(search.time_limit) if search.time_limit else None
    _find(request, decided, place.target, settings, seconds, Output(as_json=json))


def plan_for_training(
    request: TrainingRequest, decided: DecidedTraining, target: str, output: Output
) -> None:
    """`--plan TARGET` of a training command: the compiler's answer for its settings."""
    _check_target(target, None)
    search = _search_settings(SearchOptions(global_batch_size=decided.config.global_batch_size))
    _find(request, decided, target, search, None, output)


def _find(
    request: TrainingRequest,
    decided: DecidedTraining,
    target: str | None,
    search: FindSettings,
    seconds: float | None,
    output: Output,
) -> None:
    from tpukit.commands.reports.batch import as_fields, as_text
    from tpukit.probe.batch.recommend import Finder

    with open_answerer(request, decided, target, seconds) as answerer:
        finding = Finder(answerer, output.text).find(search)
    if target is not None:
        decided = dataclasses.replace(decided, config=dataclasses.replace(decided.config, hw="tpu"))
    command = training_command(
        request, decided, finding.recommended_global_batch, finding.accumulate
    )
    for line in as_text(finding, request.task, command):
        output.text(line)
    output.result(as_fields(finding, request.task, command))


def open_answerer(
    request: TrainingRequest, decided: DecidedTraining, target: str | None, seconds: float | None
) -> Answerer:
    """Who is asked: the compiler where there is a target, else the hardware here."""
    from tpukit.probe.batch.evaluators import CompiledAnswerer, MeasuredAnswerer
    from tpukit.probe.compiler.targets import find_target

    source = task_source(request, decided)
    if target is None:
        return MeasuredAnswerer(source, decided.config, seconds or MEASURED_SECONDS)
    return CompiledAnswerer(
        source, decided.config, find_target(target), seconds or COMPILED_SECONDS
    )


def task_source(request: TrainingRequest, decided: DecidedTraining) -> TaskSource:
    """How a child builds the same task."""
    from tpukit.probe.batch.trial import TaskSource

    path, separator, name = request.task.rpartition(":")
    spec = f"{Path(path).resolve()}:{name}" if separator else request.task
    settings = dict(decided.task_settings)
    return TaskSource(
        TASK_FACTORY, {"spec": spec, "settings": settings, "data_path": decided.config.data_path}
    )


def _search_settings(options: SearchOptions) -> FindSettings:
    from tpukit.probe.batch.recommend import FindSettings

    start, maximum, multiple = options.start, options.maximum, options.multiple_of
    problems = [
        f"{name} {value} must be at least 1."
        for name, value in (("--start", start), ("--max", maximum), ("--multiple-of", multiple))
        if value < 1
    ]
    if not 0 <= options.margin < 1:
        problems.append(f"--margin {options.margin} must lie in [0, 1).")
    if maximum < multiple:
        problems.append(f"--max {maximum} is under --multiple-of {multiple}.")
    if problems:
        raise ConfigError(" ".join(problems), "`tpukit probe-batch --help` lists the options.")
    return FindSettings(start, maximum, multiple, options.margin, options.global_batch_size)


def _check_target(target: str | None, options: TrainingOptions | None) -> None:
    """Names an impossible target, and options that mean nothing to the compiler, at once."""
    if target is None:
        return
    from tpukit.probe.compiler.targets import find_target

    find_target(target)
    if options and options.memory_limit:
        raise ConfigError(
            "--memory-limit limits measured trials; a target has the memory it has.",
            "Leave it out, or leave --target out.",
        )
    if options and options.devices:
        raise ConfigError(
            f"--devices {options.devices}: a target's name says how many devices it has.",
            f"Choose the target by them, say {target.rpartition('-')[0]}-{options.devices}.",
        )
    if options and options.precision == "fp16":
        raise ConfigError("--precision fp16: TPUs have no fp16.", "Use --precision bf16.")


def training_command(
    request: TrainingRequest, decided: DecidedTraining, global_batch: int, accumulate: int
) -> str:
    """The training command that uses the answer."""
    words = ["tpukit"]
    own: Mapping[str, Any] = {n: v for n, v in request.task_settings.items() if v is not None}
    extra = {n: v for n, v in decided.task_settings.items() if n not in own}
    if request.task == "summarize":
        words.append("summarize-train")
    else:
        words.append("train")
        if request.task != "eit":
            words += ["--task", request.task]
    for name, value in own.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    for name, value in extra.items():
        words += ["--set", f"{name}={value}"]
    config = decided.config
    words += ["--global-batch-size", str(global_batch), "--accumulate", str(accumulate)]
    words += _changed(config, "hw", "devices", "precision", "memory_limit", "shard")
    if config.data_path != type(config).data_path:
        words += ["--data-path", config.data_path]
    return shlex.join(words)


def _changed(config: Any, *names: str) -> list[str]:
    """Hardware options that are not at their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    words: list[str] = []
    for name in names:
        value = getattr(config, name)
        if value != defaults[name]:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words
