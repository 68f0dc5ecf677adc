"""`tpukit summarize-train`: fine-tunes GPT-2 on dialogues and their summaries."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

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
DEFAULT_FOLDER = "out-summarization"
MODEL = "Model"


def _option(name: str, text: str) -> Any:
    return typer.Option(name, rich_help_panel=MODEL, help=text)


@dataclass(frozen=True)
class ModelOptions:
    """The task's own options; None is not given."""

    model: Annotated[
        str | None,
        _option("--model", "gpt2, gpt2-medium, gpt2-large, gpt2-xl or LAYERSxHEADSxWIDTH (gpt2)."),
    ] = None
    init: Annotated[
        str | None,
        _option("--init", "Weights: a directory, a hub name, a nanoGPT checkpoint, scratch."),
    ] = None
    block_size: Annotated[
        int | None,
        _option("--block-size", "Longest prompt and summary together, in tokens (1024)."),
    ] = None
    tokenizer: Annotated[
        str | None,
        _option(
            "--tokenizer", "gpt2, train, a .tiktoken or tokenizer.json file (--init's, or gpt2)."
        ),
    ] = None
    loss: Annotated[
        str | None,
        _option("--loss", "lean projects where there is a target, reference everywhere (lean)."),
    ] = None
    valid_file: Annotated[
        str | None, _option("--valid-file", "A CSV file to validate on (5 % of train.csv).")
    ] = None
    lora_rank: Annotated[
        int | None, _option("--lora-rank", "Train LoRA adapters of this rank only.")
    ] = None


@app.command()
@with_option_sets
def summarize_train(
    training: TrainingOptions,
    sources: SettingSources,
    model: ModelOptions,
    plan: PlanOption = None,
    export: Annotated[
        Path | None,
        _option("--export", "Write the best weights as a Hugging Face directory at the end."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Fine-tune GPT-2 on dialogue summaries (train.csv: id, dialogue, summary).

    The same command again resumes a run that was stopped.
    """
    output = Output(as_json=as_json)
    settings = read_settings(training, sources, asdict(model))
    run = run_training("summarize", settings, DEFAULT_FOLDER, plan, output)
    if run is not None and export is not None and os.environ.get("RANK", "0") == "0":
        _export(run, export, output)


def _export(run: Path, folder: Path, output: Output) -> None:
    from tpukit.tasks.summarize.evaluation.trained import export_run

    export_run(run, folder, output.text)
    output.text(f"Exported to {folder}: transformers loads it.")
