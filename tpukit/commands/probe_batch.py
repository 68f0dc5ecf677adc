"""`tpukit probe-batch`: the batch that fits, measured on this machine or by the TPU compiler."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tpukit.commands.options.option_sets import with_option_sets
from tpukit.commands.options.probe import (
    InputOption,
    PlaceOptions,
    ProbedModelOptions,
    SearchOptions,
    TargetOption,
    TaskOption,
)
from tpukit.commands.options.task_options import ModelOptions, NetworkOptions
from tpukit.commands.options.training import (
    TRAINING_PANELS,
    GivenSettings,
    SettingSources,
    read_settings,
)
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import prepare_environment, settle_kernels
from tpukit.io.ranges import BATCH, DECAY, Range, flag, range_problems
from tpukit.io.units import size_text
from tpukit.probe.batch.search import SearchSettings

if TYPE_CHECKING:
    from tpukit.probe.batch.evaluators import ChildEvaluator
    from tpukit.probe.batch.predicted_trials import PredictedBeside
    from tpukit.probe.batch.trial import TaskSource
    from tpukit.train.requests import TrainingRequest

    WriteCommand = Callable[[TrainingRequest, int, int], str]

app = typer.Typer()
SEARCH_RANGES: Mapping[str, Range] = {
    "start": BATCH,
    "max": BATCH,
    "multiple_of": BATCH,
    "margin": DECAY,
    "global_batch_size": BATCH,
    "time_limit": Range(1, 30 * 86400, whole=False),
    "trial_time": Range(1, 30 * 86400, whole=False),
    "max_time": Range(1, 30 * 86400, whole=False),
}
COMMAND_OPTIONS: Mapping[str, Any] = {"eit": NetworkOptions, "summarize": ModelOptions}
"""Settings of our tasks that have an option of their training command."""


@app.command()
@with_option_sets
def probe_batch(
    network: NetworkOptions,
    model: ProbedModelOptions,
    sources: SettingSources,
    search: SearchOptions,
    place: PlaceOptions,
    task: TaskOption = "eit",
    inputs: InputOption = None,
    target: TargetOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the batch that fits: measured on this machine, or by the TPU compiler (--target).

    Trials run the training step in child processes.
    """
    output, settings = Output(as_json=json), SearchSettings(**search)
    check_search(settings, target, place)
    own = {**dataclasses.asdict(network), **dataclasses.asdict(model)}
    factory = own.pop("model") if _is_factory(model.model, task, inputs) else None
    given = {**place, "global_batch_size": settings.global_batch_size}
    read = read_settings(given, sources, own)
    # With a target only its children compute, in an environment of their own.
    kind = prepare_environment(HardwareOptions(hw="cpu") if target else read.hardware())
    if factory is not None:
        fields = size_model(factory, inputs or [], read, target, settings, output.text)
    else:
        request = read.request(task, None if target else kind)
        for remark in request.remarks():
            output.text(remark)
        fields = size_batch(request, task_source(request), target, settings, output.text)
    output.result(fields)


def _is_factory(model: str | None, task: str, inputs: list[str] | None) -> bool:
    """Whether `--model` names a function, not a size of GPT-2; raises ConfigError for mixtures."""
    if model is None or ":" not in model:
        if inputs:
            raise ConfigError(
                f"--input {inputs[0]}: only a model of your own takes inputs.",
                "Name the function that builds it, too: --model FILE:FUNCTION.",
            )
        return False
    if task != "eit":
        raise ConfigError(
            f"--task {task} and --model {model} exclude each other.", "Give one of them."
        )
    return True


def training_command(request: TrainingRequest, global_batch: int, accumulate: int) -> str:
    """The training command with the recommended batch."""
    words = ["tpukit", "summarize-train" if request.spec == "summarize" else "train"]
    own: set[str] = set()
    if request.spec in COMMAND_OPTIONS:
        own = {field.name for field in dataclasses.fields(COMMAND_OPTIONS[request.spec])}
    else:
        words += ["--task", request.spec]
    for name, value in request.task_settings.items():
        words += [flag(name), str(value)] if name in own else ["--set", f"{name}={value}"]
    for name, value in settings_to_repeat(request, global_batch, accumulate).items():
        words += _words(name, value)
    return shlex.join(words)


def _words(name: str, value: Any) -> list[str]:
    """A training setting on the command line."""
    if name not in itertools.chain.from_iterable(TRAINING_PANELS.values()):
        return ["--set", f"{name}={json.dumps(value) if isinstance(value, bool) else value}"]
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no-{name}")]
    return [flag(name), size_text(value) if name == "memory_limit" else str(value)]


def settings_to_repeat(
    request: TrainingRequest, global_batch: int, accumulate: int
) -> dict[str, Any]:
    """The training settings that differ from what the task has without any: a preset's, a file's,
    the hardware's, and the recommended batch."""
    from tpukit.commands.options.training import task_defaults
    from tpukit.train.config import resolve

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
    from tpukit.probe.batch.carried import carried
    from tpukit.probe.batch.model_task import ModelTask

    task = ModelTask(model, inputs, given.task)
    request = dataclasses.replace(given, task={}).request(task)
    request = dataclasses.replace(request, spec=task.label)
    with carried(task) as source:
        return size_batch(request, source, target, settings, log, command=None)


def plan_for_training(request: TrainingRequest, target: str, output: Output) -> None:
    """`--plan TARGET` of a training command: the compiler's recommendation for its settings."""
    settings = SearchSettings(global_batch_size=request.config.global_batch_size)
    check_search(settings, target, {})
    source = task_source(request)
    output.result(size_batch(request, source, target, settings, output.text))


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
    from tpukit.probe.batch.predicted_trials import keep_predictions
    from tpukit.probe.batch.recommend import Recommender

    with open_evaluator(request, source, target, settings.time_limit, log) as evaluator:
        found = Recommender(evaluator, settings, log).recommend()
    keep_predictions(request, found)
    if target is not None:
        config = dataclasses.replace(request.config, hw="tpu")
        request = dataclasses.replace(request, config=config)
    text = command and command(request, found.recommended_global_batch, found.accumulate)
    for line in as_text(found, request.spec, text):
        log(line)
    return as_fields(found, request.spec, text)


def open_evaluator(
    request: TrainingRequest,
    source: TaskSource,
    target: str | None,
    seconds: float | None,
    log: Callable[[str], None],
) -> ChildEvaluator | PredictedBeside:
    """The TPU compiler where there is a target, else the hardware of this machine."""
    from tpukit.probe.batch.evaluators import CompilerEvaluator
    from tpukit.probe.batch.predicted_trials import measured_evaluator
    from tpukit.probe.compiler.targets import find_target

    if target is None:
        return measured_evaluator(source, settle_kernels(request.config, log), seconds, log)
    return CompilerEvaluator(source, request.config, find_target(target), seconds)


def task_source(request: TrainingRequest) -> TaskSource:
    """How a child builds the task that a user named."""
    from tpukit.probe.batch.trial import TASK_FACTORY, TaskSource

    path, _, name = request.spec.rpartition(":")
    spec = f"{Path(path).resolve()}:{name}" if path.endswith(".py") else request.spec
    settings = dict(request.task_settings)
    return TaskSource(
        TASK_FACTORY, {"spec": spec, "settings": settings, "data_path": request.config.data_path}
    )


def check_search(settings: SearchSettings, target: str | None, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for what cannot be searched, before anything is built."""
    _check_settings(settings)
    _check_target(target, options)


def _check_settings(settings: SearchSettings) -> None:
    problems = range_problems(vars(settings), SEARCH_RANGES)
    if settings.top < settings.multiple_of:
        problems.append(f"--max {settings.max} is below --multiple-of {settings.multiple_of}.")
    if problems:
        raise ConfigError(" ".join(problems), "`tpukit probe-batch --help` lists the options.")


def _check_target(target: str | None, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an unknown target, and for options that do not apply to one."""
    if target is None:
        return
    from tpukit.probe.compiler.targets import find_target

    find_target(target)
    if options.get("memory_limit"):
        raise ConfigError(
            "--memory-limit applies to measured trials only, not to --target.",
            "Leave one of them out.",
        )
    if devices := options.get("devices"):
        raise ConfigError(
            f"--devices {devices}: a target's name gives its number of devices.",
            f"Choose the target by them: {target.rpartition('-')[0]}-{devices}.",
        )
    if options.get("precision") == "fp16":
        raise ConfigError("--precision fp16: TPUs have no fp16.", "Use --precision bf16.")
