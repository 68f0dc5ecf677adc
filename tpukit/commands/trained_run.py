"""Using a trained run from a command: its task, ranks, backend, result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpukit.commands.launching import in_all_ranks
from tpukit.commands.output import Output
from tpukit.hardware.options import HardwareOptions, Kind
from tpukit.hardware.select import opened_backend

if TYPE_CHECKING:
    from torch import nn

    from tpukit.hardware.backend import Backend
    from tpukit.registry.trained import TrainedTask

    Use = Callable[[nn.Module, Backend, Callable[[str], None]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """The task of a trained run, beside what the run records."""

    task: Annotated[
        str | None, typer.Option("--task", help="FILE:CLASS of the run's task, if it has moved.")
    ] = None
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE: a setting of the task.")
    ] = None


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
