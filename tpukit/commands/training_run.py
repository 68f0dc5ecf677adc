"""Running a training from a command: ranks, backend, engine, result."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tpukit.commands.launching import in_all_ranks
from tpukit.commands.options.training import GivenSettings
from tpukit.commands.output import Output
from tpukit.commands.sizing import check_search, size_batch, task_source
from tpukit.hardware.select import opened_backend, prepare_environment
from tpukit.io.lock import wait_for_ending_owner
from tpukit.probe.batch.search import SearchSettings

if TYPE_CHECKING:
    from tpukit.train.plan import TrainingRequest


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
    hardware = settings.backend_options(request.config)
    wait_for_ending_owner(request.folder.lock, partial(_name_ending_run, request, output))
    in_all_ranks(hardware, kind, output)
    with opened_backend(hardware, output.text, runs=request.run_folders) as backend:
        from tpukit.train.run import train_run

        result = train_run(request, backend, output.text)
        if backend.is_main:
            output.result(dataclasses.asdict(result))
    return request.folder.path


def _name_ending_run(request: TrainingRequest, output: Output, process: int) -> None:
    output.text(
        f"The run in {request.folder.path} (process {process}) was interrupted and saves its"
        " checkpoint: waiting for its end."
    )
