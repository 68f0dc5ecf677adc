"""Running a training from a command: processes, backend, engine, result."""

from __future__ import annotations

import dataclasses
import shlex
import sys

from tpukit.commands.launching import in_all_processes
from tpukit.commands.options.training import (
    TrainingOptions,
    TrainingRequest,
    decide,
    hardware_options,
)
from tpukit.commands.output import Output
from tpukit.commands.probe_batch import plan_for_training
from tpukit.hardware.select import open_backend, prepare_environment


def run_training(request: TrainingRequest, options: TrainingOptions, output: Output) -> None:
    """Runs a training command: launches processes where needed, trains, prints the result."""
    hardware = hardware_options(options)
    kind = prepare_environment(hardware)
    if options.plan is not None:
        plan_training(request, options, output)
        return
    # Bad options end here, once, instead of in every process.
    decided = decide(request, options)
    in_all_processes(hardware, kind, output)
    backend = open_backend(hardware)
    try:
        from tpukit.train.run import RunRequest, train
        from tpukit.train.run_folder import RunFolder

        run = RunRequest(
            task=decided.task,
            task_config=decided.task_settings,
            config=decided.config,
            folder=RunFolder(decided.folder),
            command=shlex.join(["tpukit", *sys.argv[1:]]),
        )
        summary = train(run, backend, output.text)
        if backend.is_main:
            output.result(dataclasses.asdict(summary))
    finally:
        backend.close()


def plan_training(request: TrainingRequest, options: TrainingOptions, output: Output) -> None:
    """`--plan TARGET`: the compiler's answer for these settings, and no training."""
    assert options.plan is not None
    decided = decide(request, options)
    plan_for_training(request, decided, options.plan, output)
