"""`tpukit probe-batch`: the batch that fits, measured on this machine or by the TPU compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import typer

from tpukit.commands.options.option_sets import OwnOptions
from tpukit.commands.options.own_options import DEFAULT_TASKS, TaskOption, app_with_own_options
from tpukit.commands.options.probe import (
    CompareOption,
    InputOption,
    ModelOption,
    PlaceOptions,
    SearchOptions,
    TargetOption,
)
from tpukit.commands.options.training import SettingSources, read_settings
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.reports.batch import comparison
from tpukit.commands.sizing import check_search, size_batch, size_model, task_source
from tpukit.errors import ConfigError, OutOfMemoryError
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
    compare: CompareOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the batch that fits: measured on this machine, or by the TPU compiler (--target).

    Trials run the training step in child processes.
    """
    output, settings = Output(as_json=json), SearchSettings(**search)
    targets = [target] if compare is None else [name.strip() for name in compare.split(",")]
    if target and compare is not None:
        raise ConfigError("--target and --compare exclude each other.", "Give one of them.")
    for name in targets:
        check_search(settings, name, place)
    factory = model if _is_factory(model, task, inputs) else None
    if factory is None and model is not None:
        own["model"] = model
    given = {**place, "global_batch_size": settings.global_batch_size}
    read = read_settings(given, sources, own)
    # With a target only its children compute, in an environment of their own.
    here = targets == [None]
    kind = prepare_environment(read.hardware() if here else HardwareOptions(hw="cpu"))
    request = None if factory else read.request(task, kind if here else None)
    for remark in request.remarks() if request else ():
        output.text(remark)

    def size(name: str | None, log: Callable[[str], None]) -> dict[str, Any]:
        if factory is not None:
            return size_model(factory, inputs or [], read, name, settings, log)
        assert request is not None
        return size_batch(request, task_source(request), name, settings, log)

    if compare is None:
        output.result(size(target, output.text))
        return
    rows = []
    for name in targets:
        output.text(f"{name} ...")
        try:
            rows.append(size(name, lambda line: None))
        except OutOfMemoryError as error:
            rows.append({"target": name, "error": error.message})
    for line in comparison(rows):
        output.text(line)
    output.result({"compared": rows})


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
