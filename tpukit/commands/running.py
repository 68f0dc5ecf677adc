"""What commands share that use devices: ranks, backend, training, a trained run, result."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tpukit.commands.options.option_sets import Given, options_of
from tpukit.commands.options.own_options import DEFAULT_TASK, task_for
from tpukit.commands.options.training import GivenSettings
from tpukit.commands.output import Output
from tpukit.commands.sizing import check_search, size_batch, task_source
from tpukit.errors import HardwareError
from tpukit.hardware.options import HardwareOptions, Kind
from tpukit.hardware.select import opened_backend, prepare_environment, rank_count
from tpukit.io.hub_data import is_hub_data
from tpukit.io.lock import wait_for_ending_owner
from tpukit.io.mirror import local_copy, output_here
from tpukit.io.process import is_first_rank
from tpukit.probe.batch.search import SearchSettings
from tpukit.train.config import build
from tpukit.train.requests import EvaluationOptions, PredictionOptions

Options = TypeVar("Options", EvaluationOptions, PredictionOptions)

if TYPE_CHECKING:
    from torch import nn

    from tpukit.hardware.backend import Backend
    from tpukit.registry.trained import TrainedTask
    from tpukit.train.plan import TrainingRequest
    from tpukit.train.requests import TrainingResult

    Use = Callable[[nn.Module, Backend, Callable[[str], None]], Mapping[str, Any]]


def chosen_task(settings: GivenSettings, command: str, output: Output) -> str:
    """The task that a command without --task is about, said in a line unless it is the default.

    Raises ConfigError for a data path whose task is not clear.
    """
    from tpukit.hardware.launch.launcher import STATUS_VARIABLE

    says = is_first_rank() and STATUS_VARIABLE not in os.environ  # else its launcher does
    given = settings.get("data_path")
    found = task_for(given, command)
    if says and found.reason and (given or found.task != DEFAULT_TASK):
        output.text(f"Task: {found.task}, by {found.reason} (--task chooses another)")
    return found.task


def run_training(
    task: str, settings: GivenSettings, plan: str | None, output: Output
) -> Path | None:
    """Trains, with several ranks where needed, and prints the result; the run folder.

    With `plan` it prints the compiler's answer for that TPU instead, and gives None.
    """
    kind = prepare_environment(settings.hardware())
    # Bad options end here, once, instead of in every process.
    request = settings.request(task, None if plan else kind)
    for remark in request.remarks():
        output.text(remark)
    if plan is not None:
        search = SearchSettings(global_batch_size=request.config.global_batch_size)
        check_search(search, plan, {})
        output.result(size_batch(request, task_source(request), plan, search, output.text))
        return None
    from tpukit.train.loader import import_before_limit
    from tpukit.train.task import for_probing

    hardware = settings.backend_options(request.config)
    wait_for_ending_owner(
        request.folder.lock,
        lambda process: output.text(
            f"The run in {request.folder.shown} (process {process}) was interrupted and saves its"
            " checkpoint: waiting for its end."
        ),
    )
    in_all_ranks(hardware, kind, output)
    if hardware.memory_limit is not None:
        import_before_limit(for_probing(request.task))
    with opened_backend(hardware, output.text, runs=request.run_folders) as backend:
        from tpukit.train.run import train_run

        result = train_run(request, backend, output.text)
        if result.finished and request.task_settings.get("fold") is not None:
            _hold_out(request, result, backend, output)
        if backend.is_main:
            output.result(dataclasses.asdict(result))
    return request.folder.path


def _hold_out(
    request: TrainingRequest, result: TrainingResult, backend: Backend, output: Output
) -> None:
    """Writes what a finished fold predicts of its validation samples, unless it is there."""
    from tpukit.registry.trained import open_trained
    from tpukit.train.held_out import FILE, write_held_out

    path, is_main = request.folder.path, backend.is_main
    known = (path / FILE).is_file() and result.resumed_from == result.steps
    if backend.all_gather_objects(known)[0]:
        return
    trained = open_trained(path, output.text if is_main else lambda _: None, request.spec)
    why_not = write_held_out(trained.task, trained.model_on(backend), backend, path)
    if is_main:
        output.text(f"No out-of-fold predictions: {why_not}." if why_not
                    else f"Out-of-fold predictions: {path / FILE}")  # fmt: skip


# -- a trained run -------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class TrainedSource:
    """The task of a trained run, beside what the run records."""

    task: str | None = None
    """FILE:CLASS of the run's task, if it has moved."""
    settings: list[str] | None = None
    """NAME=VALUE: a setting of the task."""


TaskOptions = Annotated[TrainedSource, options_of(TrainedSource)]


def use_in_all_ranks(
    trained: TrainedTask, use: Use, hardware: HardwareOptions, kind: Kind, output: Output
) -> None:
    """Calls `use(model, backend, log)` in every rank and prints the JSON fields of rank 0."""
    in_all_ranks(hardware, kind, output)
    fields = use_model(trained, use, hardware, output.text)
    if fields is not None:
        output.result(fields)


def use_model(
    trained: TrainedTask,
    use: Use,
    hardware: HardwareOptions,
    log: Callable[[str], None],
    *,
    once: bool = True,
) -> Mapping[str, Any] | None:
    """What `use(model, backend, log)` returns; None in the ranks that are not the first."""
    runs = [trained.run.path] if trained.run else []
    with opened_backend(hardware, log, once=once, runs=runs) as backend:
        log = log if backend.is_main else lambda _: None
        fields = use(trained.model_on(backend), backend, log)
        return fields if backend.is_main else None


def with_files_here(options: Options) -> Options:
    """The options of `test` or `predict` with copies of the files at addresses, and paths to write
    outputs for some to."""
    paths = {name: value for name, value in vars(options).items() if isinstance(value, Path)}
    here: dict[str, Any] = {
        name: output_here(path) if name == "out" else local_copy(path)
        for name, path in paths.items()
        if not is_hub_data(path)
    }
    return dataclasses.replace(options, **here)


USED = ("hw", "devices", "precision", "shard", "kernels", "master_port")
UseHardware = Annotated[Given, options_of(HardwareOptions, {"Hardware": USED})]


def hardware_options(given: Given) -> HardwareOptions:
    """Raises ConfigError for values that are not allowed."""
    return build(HardwareOptions, {**given, "compile": False})


# -- ranks ---------------------------------------------------------------------------------------
def in_all_ranks(hardware: HardwareOptions, kind: Kind, output: Output) -> None:
    """Returns where this process is a rank; otherwise starts the ranks and exits with them."""
    from tpukit.hardware.launch.launcher import is_launched, launch

    ranks = rank_count(hardware, kind)
    if (ranks > 1 or hardware.max_restarts) and not is_launched():
        output.hand_over()
        raise typer.Exit(launch(sys.argv[1:], ranks, hardware))


def in_this_process(hardware: HardwareOptions, log: Callable[[str], None]) -> None:
    """Prepares a call from Python, which is one rank: one GPU, or all devices of a TPU host.

    Raises HardwareError where several ranks were requested and no launcher started them.
    """
    from tpukit.hardware.launch.launcher import is_launched

    kind = prepare_environment(hardware)
    ranks = rank_count(hardware, kind)
    if ranks == 1 or is_launched():
        return
    way = f"the command (`tpukit train --task FILE:CLASS`), `torchrun --nproc-per-node {ranks}`"
    if hardware.devices is None and kind == "gpu":
        log(f"Using 1 of {ranks} GPUs: a call from Python is one process. For all: {way}.")
        return
    raise HardwareError(
        f"{ranks} {kind.upper()} devices take {ranks} processes; a call from Python is one.",
        f"Use {way} with your script, or devices=1.",
        id="one-process",
    )
