"""`tpukit probe-batch`: the batch that fits, measured on this machine or by the TPU compiler."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from tpukit.commands.options.option_sets import OwnOptions
from tpukit.commands.options.own_options import DEFAULT_TASKS, TaskOption, app_with_own_options
from tpukit.commands.options.probe import (
    InputOption,
    ModelOption,
    PlaceOptions,
    SearchOptions,
    TargetOption,
)
from tpukit.commands.options.training import SettingSources, read_settings
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.sizing import check_search, size_batch, size_model, task_source
from tpukit.errors import ConfigError
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import prepare_environment
from tpukit.probe.batch.search import SearchSettings


def make_app(arguments: Sequence[str]) -> typer.Typer:
    return app_with_own_options(probe_batch, "probe-batch", arguments)


def probe_batch(
    sources: SettingSources,
    search: SearchOptions,
    place: PlaceOptions,
    own: OwnOptions,
    task: TaskOption = DEFAULT_TASKS["probe-batch"],
    model: ModelOption = None,
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
    factory = model if _is_factory(model, task, inputs) else None
    if factory is None and model is not None:
        own["model"] = model
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
    """Whether `--model` names a function; raises ConfigError for mixtures."""
    if model is None or ":" not in model:
        if inputs:
            raise ConfigError(
                f"--input {inputs[0]}: only a model of your own takes inputs.",
                "Name the function that builds it, too: --model FILE:FUNCTION.",
            )
        return False
    if task != DEFAULT_TASKS["probe-batch"]:
        raise ConfigError(
            f"--task {task} and --model {model} exclude each other.", "Give one of them."
        )
    return True
