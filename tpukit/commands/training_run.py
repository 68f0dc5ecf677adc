"""Running a training from a command: ranks, backend, engine, result."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tpukit.commands.launching import in_all_ranks
from tpukit.commands.options.training import GivenSettings
from tpukit.commands.output import Output
from tpukit.commands.probe_batch import plan_for_training
from tpukit.hardware.select import opened_backend, prepare_environment


def run_training(
    task: str, settings: GivenSettings, plan: str | None, output: Output
) -> Path | None:
    """Trains, with several ranks where needed, and prints the result; the run folder.

    With `plan` it prints the compiler's answer for that TPU instead, and gives None.
    """
    hardware = settings.hardware()
    kind = prepare_environment(hardware)
    # Bad options end here, once, instead of in every process.
    request = settings.request(task)
    if plan is not None:
        plan_for_training(request, plan, output)
        return None
    in_all_ranks(hardware, kind, output)
    with opened_backend(hardware, output.text) as backend:
        from tpukit.train.run import train_run

        result = train_run(request, backend, output.text)
        if backend.is_main:
            output.result(dataclasses.asdict(result))
    return request.folder.path
