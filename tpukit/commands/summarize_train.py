"""`tpukit summarize-train`: fine-tunes a language model on prompts and completions."""

from pathlib import Path
from typing import Annotated

import typer

from tpukit.commands.options.training import PlanOption, TrainingSettings
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.running import run_training
from tpukit.io.process import is_first_rank


def summarize_train(
    settings: TrainingSettings,
    plan: PlanOption = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the best weights as a Hugging Face directory at the end."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Fine-tune a language model on dialogue summaries (train.csv: id, dialogue, summary).

    The same command again resumes a run that was stopped.
    """
    output = Output(as_json=as_json)
    run = run_training("llm", settings, plan, output)
    if run is not None and export is not None and is_first_rank():
        from tpukit.registry.trained import open_trained

        open_trained(run, output.text).export(export)
        output.text(f"Exported to {export}: transformers loads it.")
