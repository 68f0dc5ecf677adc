"""The options that are settings of our tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

EIT, SUMMARIES = "EIT", "Summaries"


def _option(name: str, text: str) -> Any:
    return typer.Option(name, rich_help_panel=SUMMARIES, help=text)


@dataclass(frozen=True)
class NetworkOptions:
    """Settings of the EIT task; None is not given."""

    size: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=EIT, help="Network: tiny, small, published, published-reference."
        ),
    ] = None


@dataclass(frozen=True)
class ModelOptions:
    """Settings of the summarize task; None is not given."""

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
