"""`tpukit train`: an installed task, or one of the user's own."""

from tpukit.commands.options.option_sets import OwnOptions
from tpukit.commands.options.own_options import DEFAULT_TASKS, TaskOption
from tpukit.commands.options.training import (
    PlanOption,
    SourceOptions,
    TrainingOptions,
    read_settings,
)
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.running import run_training


def train(
    training: TrainingOptions,
    sources: SourceOptions,
    own: OwnOptions,
    plan: PlanOption = None,
    task: TaskOption = DEFAULT_TASKS["train"],
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train an installed task (see --task), or one of your own.

    The same command again resumes a run that was stopped.
    """
    run_training(task, read_settings(training, sources, own), plan, Output(as_json=json))
