"""Sizing a batch: the search for a task or a bare model, and the training command it leads to."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.commands.options.option_sets import read_value
from tpukit.commands.options.own_options import command_of
from tpukit.commands.options.training import GivenSettings, task_defaults
from tpukit.errors import ConfigError
from tpukit.hardware.select import find_kind, settled
from tpukit.io.ranges import flag, range_problems
from tpukit.io.toml import toml_text
from tpukit.probe.batch.search import SearchSettings
from tpukit.train.config import option_name, resolve

if TYPE_CHECKING:
    from tpukit.probe.trial import TaskSource
    from tpukit.train.plan import TrainingRequest

    WriteCommand = Callable[[TrainingRequest, int, int], str]


def training_command(request: TrainingRequest, global_batch: int, accumulate: int) -> str:
    """The training command with the recommended batch."""
    command = command_of(request.spec)
    words = ["tpukit", command]
    if command == "train":
        words += ["--task", request.spec]
    for name, value in request.task_settings.items():
        # Of a path the option alone makes one again.
        words += [flag(name), str(value)] if isinstance(value, Path) else _set(name, value)
    for name, value in settings_to_repeat(request, global_batch, accumulate).items():
        words += _words(name, value)
    return shlex.join(words)


def _words(name: str, value: Any) -> list[str]:
    """A training setting on the command line."""
    if option_name(name) != flag(name):
        return _set(name, value)
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no-{name}")]
    return [flag(name), str(value)]


def _set(name: str, value: Any) -> list[str]:
    """A setting by `--set`, with quotes around a text that would be read as something else."""
    return ["--set", f"{name}={value if read_value(str(value)) == value else toml_text(value)}"]


def settings_to_repeat(
    request: TrainingRequest, global_batch: int, accumulate: int
) -> dict[str, Any]:
    """The training settings that differ from what the task has without any: a preset's, a file's,
    the hardware's, and the recommended batch."""
    wanted = {**vars(request.config), "global_batch_size": global_batch, "accumulate": accumulate}
    present = vars(resolve(task_defaults(request.task)))
    always = ("global_batch_size", "accumulate")
    changed = {n: v for n, v in wanted.items() if n in always or v not in (None, present[n])}
    return {**{name: changed[name] for name in always}, **changed}


def size_model(
    model: Any,
    inputs: Sequence[str],
    given: GivenSettings,
    target: str | None,
    settings: SearchSettings,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """The JSON fields for a bare model: `FILE:FUNCTION`, a function or a module."""
    from tpukit.probe.batch.model_task import ModelTask
    from tpukit.probe.trials.carried import carried

    task = ModelTask(model, inputs, given.task)
    request = dataclasses.replace(given, task={}).request(task)
    request = dataclasses.replace(request, spec=task.label)
    if target is None and find_kind(request.config) == "gpu":
        # As the loop of its own that will train it does, unless its author compiles it.
        eager = dataclasses.replace(request.config, compile=False)
        request = dataclasses.replace(request, config=eager)
    with carried(task) as source:
        return size_batch(request, source, target, settings, log, None)


def size_batch(
    request: TrainingRequest,
    source: TaskSource,
    target: str | None,
    settings: SearchSettings,
    log: Callable[[str], None],
    command: WriteCommand | None = training_command,
) -> dict[str, Any]:
    """Searches, logs the report, and returns its JSON fields.

    command: writes how to train with the recommendation; None for what tpukit does not train.
    """
    from tpukit.commands.reports.batch import as_fields, as_text
    from tpukit.probe.batch.forms import recommend_form
    from tpukit.probe.targets import GpuTarget
    from tpukit.probe.trials.predicted_trials import open_evaluator
    from tpukit.train.task import chosen_settings, form_name, forms_of

    task = request.task
    forms = {form_name(task, form): form for form in forms_of(task)}
    config = request.config if target else settled(request.config, log)
    with open_evaluator(source, config, target, settings.time_limit, log) as evaluator:
        found = recommend_form(evaluator, settings, log, [*forms])
    if target is not None:
        is_gpu = isinstance(found.target, GpuTarget)
        devices = found.devices if is_gpu else None
        config = dataclasses.replace(request.config, hw="gpu" if is_gpu else "tpu", devices=devices)
        request = dataclasses.replace(request, config=config)
    chosen = {**request.task_settings, **chosen_settings(task, forms[found.form])}
    request = dataclasses.replace(request, task_settings=chosen)
    text = command and command(request, found.recommended_global_batch, found.accumulate)
    for line in as_text(found, request.spec, text):
        log(line)
    return as_fields(found, request.spec, text)


def task_source(request: TrainingRequest) -> TaskSource:
    """How a child builds the task that a user named."""
    from tpukit.probe.trial import TASK_FACTORY, TaskSource

    path, _, name = request.spec.rpartition(":")
    spec = f"{Path(path).resolve()}:{name}" if path.endswith(".py") else request.spec
    settings = dict(request.task_settings)
    return TaskSource(
        TASK_FACTORY, {"spec": spec, "settings": settings, "data_path": request.config.data_path}
    )


def check_search(settings: SearchSettings, target: str | None, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for what cannot be searched, before anything is built."""
    problems = range_problems(settings)
    if settings.top < settings.multiple_of:
        problems.append(f"--max {settings.max} is below --multiple-of {settings.multiple_of}.")
    if problems:
        raise ConfigError(" ".join(problems), "`tpukit probe-batch --help` lists the options.")
    if target is not None:
        _check_target(target, options)


def _check_target(target: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an unknown target, and for options that do not apply to one."""
    from tpukit.probe.targets import Target, find_any

    known = find_any(target)
    if options.get("memory_limit"):
        raise ConfigError(
            "--memory-limit applies to measured trials only, not to --target.",
            "Leave one of them out.",
        )
    if devices := options.get("devices"):
        raise ConfigError(
            f"--devices {devices}: a target's name gives its number of devices.",
            f"Choose the target by them: {target.rpartition('-')[0]}-{devices}."
            if isinstance(known, Target)
            else f"Choose the target by them: {devices}x{target.rpartition('x')[2]}.",
        )
    if isinstance(known, Target) and options.get("precision") == "fp16":
        raise ConfigError("--precision fp16: TPUs have no fp16.", "Use --precision bf16.")
