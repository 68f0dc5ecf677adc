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
    TargetOption,
    TaskOptions,
)
from tpukit.commands.options.training import SettingSources, read_settings
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError
from tpukit.io.units import parse_duration

if TYPE_CHECKING:
    from tpukit.probe.batch.evaluators import Answerer
    from tpukit.probe.batch.recommend import FindSettings
    from tpukit.probe.batch.trial import TaskSource
    from tpukit.train.config import TrainConfig
    from tpukit.train.requests import TrainingRequest

app = typer.Typer()
TASK_FACTORY = "tpukit.tasks.registry:load_task"
COMMAND_OPTIONS = {
    "eit": ("size",),
    "summarize": ("model", "block_size", "loss", "tokenizer", "init"),
}
"""Settings of our tasks that have an option of their training command."""
MEASURED_SECONDS, COMPILED_SECONDS = 600.0, 1800.0


@app.command()
@with_option_sets
def probe_batch(
    task: TaskOptions,
    sources: SettingSources,
    search: SearchOptions,
    place: PlaceOptions,
    target: TargetOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the batch that fits: measured here, or asked of the TPU compiler (--target).

    Every trial runs the training step itself in a process of its own.
    """
    settings = _search_settings(search, place.get("global_batch_size"))
    _check_target(target, place)
    request = read_settings(place, sources, task.own()).request(task.task)
    seconds = parse_duration(search.time_limit) if search.time_limit else None
    _find(request, target, settings, seconds, Output(as_json=json))


def plan_for_training(request: TrainingRequest, target: str, output: Output) -> None:
    """`--plan TARGET` of a training command: the compiler's answer for its settings."""
    _check_target(target, {})
    search = _search_settings(SearchOptions(), request.config.global_batch_size)
    _find(request, target, search, None, output)


def _find(
    request: TrainingRequest,
    target: str | None,
    search: FindSettings,
    seconds: float | None,
    output: Output,
) -> None:
    from tpukit.commands.reports.batch import as_fields, as_text
    from tpukit.probe.batch.recommend import Finder

    with open_answerer(request, target, seconds) as answerer:
        finding = Finder(answerer, output.text).find(search)
    if target is not None:
        config = dataclasses.replace(request.config, hw="tpu")
        request = dataclasses.replace(request, config=config)
    command = training_command(request, finding.recommended_global_batch, finding.accumulate)
    for line in as_text(finding, request.spec, command):
        output.text(line)
    output.result(as_fields(finding, request.spec, command))


def open_answerer(request: TrainingRequest, target: str | None, seconds: float | None) -> Answerer:
    """Who is asked: the compiler where there is a target, else the hardware here."""
    from tpukit.probe.batch.evaluators import CompiledAnswerer, MeasuredAnswerer
    from tpukit.probe.compiler.targets import find_target

    source = task_source(request)
    if target is None:
        return MeasuredAnswerer(source, request.config, seconds or MEASURED_SECONDS)
    return CompiledAnswerer(
        source, request.config, find_target(target), seconds or COMPILED_SECONDS
    )


def task_source(request: TrainingRequest) -> TaskSource:
    """How a child builds the same task."""
    from tpukit.probe.batch.trial import TaskSource

    path, separator, name = request.spec.rpartition(":")
    spec = f"{Path(path).resolve()}:{name}" if separator else request.spec
    settings = dict(request.task_settings)
    return TaskSource(
        TASK_FACTORY, {"spec": spec, "settings": settings, "data_path": request.config.data_path}
    )


def _search_settings(options: SearchOptions, global_batch_size: int | None) -> FindSettings:
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
    return FindSettings(start, maximum, multiple, options.margin, global_batch_size)


def _check_target(target: str | None, options: Mapping[str, Any]) -> None:
    """Names an impossible target, and options that mean nothing to the compiler, at once."""
    if target is None:
        return
    from tpukit.probe.compiler.targets import find_target

    find_target(target)
    if options.get("memory_limit"):
        raise ConfigError(
            "--memory-limit limits measured trials; a target has the memory it has.",
            "Leave it out, or leave --target out.",
        )
    if devices := options.get("devices"):
        raise ConfigError(
            f"--devices {devices}: a target's name says how many devices it has.",
            f"Choose the target by them, say {target.rpartition('-')[0]}-{devices}.",
        )
    if options.get("precision") == "fp16":
        raise ConfigError("--precision fp16: TPUs have no fp16.", "Use --precision bf16.")


def training_command(request: TrainingRequest, global_batch: int, accumulate: int) -> str:
    """The training command that uses the answer."""
    words = ["tpukit", "summarize-train" if request.spec == "summarize" else "train"]
    if request.spec not in COMMAND_OPTIONS:
        words += ["--task", request.spec]
    own = COMMAND_OPTIONS.get(request.spec, ())
    for name, value in request.task_settings.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag, str(value)] if name in own else ["--set", f"{name}={value}"]
    config = request.config
    words += ["--global-batch-size", str(global_batch), "--accumulate", str(accumulate)]
    words += _changed(config, "hw", "devices", "precision", "memory_limit", "shard")
    if config.data_path != type(config).data_path:
        words += ["--data-path", config.data_path]
    return shlex.join(words)


def _changed(config: TrainConfig, *names: str) -> list[str]:
    """Hardware options that are not at their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    words: list[str] = []
    for name in names:
        value = getattr(config, name)
        if value != defaults[name]:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words
