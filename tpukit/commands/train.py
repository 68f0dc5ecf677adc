"""`tpukit train`: EIT diffusion, or a task of the user's own."""

from __future__ import annotations

from typing import Annotated

import typer

from tpukit.commands.options.option_sets import with_option_sets
from tpukit.commands.options.training import TrainingOptions, TrainingRequest
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.training_run import run_training

app = typer.Typer()


@app.command()
@with_option_sets
def train(
    training: TrainingOptions,
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

    The same command again goes on where the run stopped.
    """
    usual = "results/deit" if task == "eit" else "results/{name}"
    run_training(TrainingRequest(task, {"size": size}, usual), training, Output(as_json=json))
