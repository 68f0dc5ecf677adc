"""`tpukit train`: EIT diffusion, or a task of the user's own."""

from __future__ import annotations

from typing import Annotated

import typer

from tpukit.commands.options.option_sets import with_option_sets
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
    plan: PlanOption = None,
    task: Annotated[
        str, typer.Option("--task", help="`eit`, or your own: my_file.py:MyTask.")
    ] = "eit",
    size: Annotated[
        str | None,
        typer.Option("--size", help="EIT network: tiny, small, published, published-reference."),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train EIT diffusion, or a task of your own.

    The same command again resumes a run that was stopped.
    """
    folder = "results/deit" if task == "eit" else "results/{name}"
    settings = read_settings(training, sources, {"size": size})
    run_training(task, settings, folder, plan, Output(as_json=json))
