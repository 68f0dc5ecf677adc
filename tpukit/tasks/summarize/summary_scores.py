"""The scores of a run's summaries, as lines for people and as a CSV file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpukit.io.files import writing_errors
from tpukit.tasks.summarize.submission import write_rows

SHOWN = 3
"""Samples shown from either end."""


@dataclass(frozen=True)
class SummaryScores:
    """Scores of a run's summaries."""

    data: str
    samples: int
    skipped: int
    """Samples whose summary is too long for the context."""
    metrics: dict[str, float]
    """`loss`; `rouge1`, `rouge2`, `rougeL` (F1) with `_low`, `_high` (95 %), `_baseline` (the
    better one), `_lead` and `_nearest`; `names_copied`, `unseen_names_copied`."""
    scored: list[dict[str, Any]]
    """Every sample with what was written, the worst first."""


def write_predictions(out: Path, shown: Sequence[dict[str, Any]]) -> None:
    """Writes all samples to `predictions.csv` in the folder `out`."""
    columns = ("id", "rougeL", "summary", "reference", "dialogue")
    rows = [[str(sample[column]) for column in columns] for sample in shown]
    with writing_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        write_rows(out / "predictions.csv", columns, rows)


def result_lines(result: SummaryScores) -> list[str]:
    """The result for people."""
    metrics = result.metrics
    lines = [f"{result.samples} samples of {result.data}; loss {metrics['loss']:.4f}"]
    if result.skipped:
        lines.append(f"{result.skipped} left out: their summaries are too long for the context")
    shown = {"Best": result.scored[::-1][:SHOWN], "Worst": result.scored[:SHOWN]}
    for title, samples in shown.items():
        for sample in samples:
            lines.append(f"{title} {sample['id']} (ROUGE-L {sample['rougeL']:.2f})")
            lines.append(f"  written:   {sample['summary']}")
            lines.append(f"  reference: {sample['reference']}")
    return lines
