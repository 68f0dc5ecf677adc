"""`tpukit train`: EIT diffusion, image classification, or a task of the user's own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tpukit.commands.options.option_sets import with_option_sets
from tpukit.commands.options.task_options import NetworkOptions
from tpukit.commands.options.training import (
    PlanOption,
    SettingSources,
    TrainingOptions,
    read_settings,
)
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.training_run import run_training

app = typer.Typer()


@app.command()
@with_option_sets
def train(
    training: TrainingOptions,
    sources: SettingSources,
    network: NetworkOptions,
    plan: PlanOption = None,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help="`eit`, `images`, or your own: my_file.py:MyTask; with --help, its settings.",
        ),
    ] = "eit",
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train EIT diffusion, an image classifier, or a task of your own.

    The same command again resumes a run that was stopped.
    """
    settings = read_settings(training, sources, asdict(network))
    run_training(task, settings, plan, Output(as_json=json))
