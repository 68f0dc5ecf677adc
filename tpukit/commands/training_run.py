"""Running a training from a command: ranks, backend, engine, result."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tpukit.commands.launching import in_all_ranks
from tpukit.commands.options.training import GivenSettings
from tpukit.commands.output import Output
from tpukit.commands.probe_batch import plan_for_training
from tpukit.hardware.select import open_backend, prepare_environment


def run_training(
    task: str, settings: GivenSettings, default_folder: str, plan: str | None, output: Output
) -> Path | None:
    """Trains, with several ranks where needed, and prints the result; the run folder.

    With `plan` it prints the compiler's answer for that TPU instead, and gives None.
    """
    hardware = settings.hardware()
    kind = prepare_environment(hardware)
    # Bad options end here, once, instead of in every process.
    request = settings.request(task, default_folder)
    if plan is not None:
        plan_for_training(request, plan, output)
        return None
    in_all_ranks(hardware, kind, output)
    backend = open_backend(hardware)
    try:
        from tpukit.train.run import train_run

        result = train_run(request, backend, output.text)
        if backend.is_main:
            output.result(dataclasses.asdict(result))
    finally:
        backend.close()
    return request.folder.path
