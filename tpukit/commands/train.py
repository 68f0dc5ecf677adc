"""`tpukit train`: an installed task, or one of the user's own."""

import os
from typing import Annotated

import typer

from tpukit.commands.folds import train_folds
from tpukit.commands.options.own_options import TaskOption
from tpukit.commands.options.training import PlanOption, TrainingSettings
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.running import chosen_task, run_training
from tpukit.hardware.launch.launcher import is_launched
from tpukit.io.process import PARENT_VARIABLE, die_with_parent


def train(
    settings: TrainingSettings,
    plan: PlanOption = None,
    task: TaskOption = None,
    folds: Annotated[
        str | None,
        typer.Option(
            rich_help_panel="Run folder",
            help="Train N folds, or those of a column of the table, each in a folder of its own in"
            " the run folder; out-of-fold predictions and scores beside them.",
        ),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train an installed task (see --task), or one of your own.

    The same command again resumes a run that was stopped.
    """
    output = Output(as_json=json)
    if PARENT_VARIABLE in os.environ and not is_launched():
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    task = task or chosen_task(settings, "train", output)
    if folds is not None and plan is None:
        train_folds(task, folds, settings, output)
    else:
        run_training(task, settings, plan, output)
