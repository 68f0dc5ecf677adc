"""`tpukit probe-batch`: which batch fits, measured here or asked of the TPU compiler."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.training_options import (
    DecidedTraining,
    TrainingOptions,
    TrainingRequest,
    decide,
)
from tpukit.errors import ConfigError
from tpukit.train.config import parse_duration

if TYPE_CHECKING:
    from tpukit.probe.answerers import Answerer
    from tpukit.probe.finder import FindSettings
    from tpukit.probe.trial import TaskSource

app = typer.Typer()
TASK_FACTORY = "tpukit.tasks.registry:load_task"
MEASURED_SECONDS, COMPILED_SECONDS = 600.0, 1800.0
TASK, SEARCH, HARDWARE = "Task", "Search", "Hardware"


def _option(*names: str, panel: str, help: str) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help)


@app.command()
def probe_batch(
    task: Annotated[
        str, _option("--task", panel=TASK, help="`eit`, `summarize`, or my_file.py:MyTask.")
    ] = "eit",
    target: Annotated[
        str | None,
        _option("--target", panel=HARDWARE, help="Ask the TPU compiler: v5e-8, v6e-1, v4-8, ..."),
    ] = None,
    start: Annotated[
        int, _option("--start", panel=SEARCH, help="The first batch a device to try.")
    ] = 4,
    maximum: Annotated[
        int, _option("--max", panel=SEARCH, help="The largest batch a device to try.")
    ] = 4096,
    multiple_of: Annotated[
        int, _option("--multiple-of", panel=SEARCH, help="Try multiples of this only.")
    ] = 1,
    margin: Annotated[
        float, _option("--margin", panel=SEARCH, help="Memory the recommended batch leaves free.")
    ] = 0.05,
    global_batch_size: Annotated[
        int | None,
        _option("--global-batch-size", panel=SEARCH, help="Find the accumulation that reaches it."),
    ] = None,
    time_limit: Annotated[
        str | None,
        _option("--time-limit", panel=SEARCH, help="Longest a trial may take (10m; compiler 30m)."),
    ] = None,
    size: Annotated[
        str | None,
        _option("--size", panel=TASK, help="EIT: tiny, small, published, published-reference."),
    ] = None,
    model: Annotated[
        str | None, _option("--model", panel=TASK, help="Summaries: gpt2, ... or 6x6x384.")
    ] = None,
    block_size: Annotated[
        int | None, _option("--block-size", panel=TASK, help="Summaries: longest text in tokens.")
    ] = None,
    loss: Annotated[
        str | None, _option("--loss", panel=TASK, help="Summaries: lean or reference.")
    ] = None,
    tokenizer: Annotated[
        str | None, _option("--tokenizer", panel=TASK, help="Summaries: gpt2, train or a file.")
    ] = None,
    init: Annotated[
        str | None, _option("--init", panel=TASK, help="Summaries: the weights to start from.")
    ] = None,
    settings: Annotated[
        list[str] | None, _option("--set", panel=TASK, help="NAME=VALUE: any other setting.")
    ] = None,
    config: Annotated[
        str | None, _option("--config", panel=TASK, help="A TOML file of settings.")
    ] = None,
    preset: Annotated[
        str | None, _option("--preset", panel=TASK, help="quick, safe, balanced or fast.")
    ] = None,
    data_path: Annotated[
        str | None, _option("--data-path", panel=TASK, help="Folder of the data, for its lengths.")
    ] = None,
    hw: Annotated[
        str | None, _option("--hw", panel=HARDWARE, help="Measure on auto, tpu, gpu or cpu.")
    ] = None,
    devices: Annotated[
        int | None, _option("--devices", "--nproc", panel=HARDWARE, help="Devices to use (all).")
    ] = None,
    precision: Annotated[
        str | None, _option("--precision", panel=HARDWARE, help="auto, bf16, fp16, fp32 (auto).")
    ] = None,
    shard: Annotated[
        bool, _option("--shard", panel=HARDWARE, help="Shard weights and optimizer over devices.")
    ] = False,
    memory_limit: Annotated[
        str | None,
        _option("--memory-limit", panel=HARDWARE, help="Memory to live within (measured): 4GB."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the batch that fits: measured here, or asked of the TPU compiler (--target).

    Every trial runs the training step itself in a process of its own.
    """
    options = TrainingOptions(
        data_path=data_path,
        global_batch_size=global_batch_size,
        preset=preset,
        config=config,
        hw=hw,
        devices=devices,
        precision=precision,
        shard=shard or None,
        memory_limit=memory_limit,
        settings=settings,
    )
    given = {"size": size, "model": model, "block_size": block_size, "loss": loss,
             "tokenizer": tokenizer, "init": init}  # fmt: skip
    request = TrainingRequest(task, given, "")
    output = Output(as_json=as_json)
    search = _search_settings(start, maximum, multiple_of, margin, global_batch_size)
    _check_target(target, options)
    decided = decide(request, options)
    seconds = parse_duration(time_limit) if time_limit else None
    _find(request, decided, target, search, seconds, output)


def plan_for_training(
    request: TrainingRequest, decided: DecidedTraining, target: str, output: Output
) -> None:
    """`--plan TARGET` of a training command: the compiler's answer for its settings."""
    _check_target(target, None)
    wanted = decided.config.global_batch_size
    search = _search_settings(4, 4096, 1, 0.05, wanted)
    _find(request, decided, target, search, None, output)


def _find(
    request: TrainingRequest,
    decided: DecidedTraining,
    target: str | None,
    search: FindSettings,
    seconds: float | None,
    output: Output,
) -> None:
    from tpukit.commands.probe_report import as_fields, as_text
    from tpukit.probe.finder import Finder

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
    from tpukit.probe.answerers import CompiledAnswerer, MeasuredAnswerer
    from tpukit.probe.targets import find_target

    source = task_source(request, decided)
    if target is None:
        return MeasuredAnswerer(source, decided.config, seconds or MEASURED_SECONDS)
    return CompiledAnswerer(
        source, decided.config, find_target(target), seconds or COMPILED_SECONDS
    )


def task_source(request: TrainingRequest, decided: DecidedTraining) -> TaskSource:
    """How a child builds the same task."""
    from tpukit.probe.trial import TaskSource

    path, separator, name = request.task.rpartition(":")
    spec = f"{Path(path).resolve()}:{name}" if separator else request.task
    settings = dict(decided.task_settings)
    return TaskSource(
        TASK_FACTORY, {"spec": spec, "settings": settings, "data_path": decided.config.data_path}
    )


def _search_settings(
    start: int, maximum: int, multiple: int, margin: float, wanted: int | None
) -> FindSettings:
    from tpukit.probe.finder import FindSettings

    problems = [
        f"{name} {value} must be at least 1."
        for name, value in (("--start", start), ("--max", maximum), ("--multiple-of", multiple))
        if value < 1
    ]
    if not 0 <= margin < 1:
        problems.append(f"--margin {margin} must lie in [0, 1).")
    if maximum < multiple:
        problems.append(f"--max {maximum} is under --multiple-of {multiple}.")
    if problems:
        raise ConfigError(" ".join(problems), "`tpukit probe-batch --help` lists the options.")
    return FindSettings(start, maximum, multiple, margin, wanted)


def _check_target(target: str | None, options: TrainingOptions | None) -> None:
    """Names an impossible target, and options that mean nothing to the compiler, at once."""
    if target is None:
        return
    from tpukit.probe.targets import find_target

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
