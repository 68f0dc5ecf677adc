"""`tpukit train`: an installed task, or one of the user's own."""

from tpukit.commands.options.option_sets import OwnOptions
from tpukit.commands.options.own_options import TaskOption
from tpukit.commands.options.training import (
    PlanOption,
    SourceOptions,
    TrainingOptions,
    read_settings,
)
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.running import chosen_task, run_training


def train(
    training: TrainingOptions,
    sources: SourceOptions,
    own: OwnOptions,
    plan: PlanOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train an installed task (see --task), or one of your own.

    The same command again resumes a run that was stopped.
    """
    output, settings = Output(as_json=json), read_settings(training, sources, own)
    run_training(task or chosen_task(settings, "train", output), settings, plan, output)
