"""`test` on a run: loss, ROUGE with intervals, baselines, the best and the worst completions."""

import json
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from tpukit.errors import DataError
from tpukit.hardware.backend import Backend
from tpukit.io.files import writing_errors
from tpukit.io.hub_data import local_data
from tpukit.io.tables import column_place, is_table_name, open_table, table_file, write_csv
from tpukit.tasks.llm.baseline import (
    lead_line,
    nearest_summaries,
    training_rows,
)
from tpukit.tasks.llm.data.dataset import TokenSamples, sample_sizes, split_indices
from tpukit.tasks.llm.data.packing import SetSizes
from tpukit.tasks.llm.data.rows import DIALOGUES, Columns, Row, read_rows, training_file
from tpukit.tasks.llm.data.token_cache import TokenCache, encoded_chunks, file_digest
from tpukit.tasks.llm.generation.decoding import Decoding, Prompt
from tpukit.tasks.llm.generation.summaries import dialogue_prompts, generate_summaries
from tpukit.tasks.llm.metrics import KINDS, exact_match, rouge_scores
from tpukit.tasks.llm.predict import Log, say_what_differs
from tpukit.train.evaluation import mean_interval, mean_values
from tpukit.train.requests import EvaluationRequest
from tpukit.train.task import SampleSource

if TYPE_CHECKING:
    from tpukit.tasks.llm.task import SummarizeTask

Array = np.ndarray[Any, Any]
SHOWN = 3
"""Samples shown from either end."""
CAPITALISED = re.compile(r"\b[A-Z]\w+")


def evaluate_run(
    task: "SummarizeTask", model: nn.Module, backend: Backend, request: EvaluationRequest, log: Log
) -> dict[str, Any]:
    """The JSON fields of `test`; every rank gets the same.

    The data are a CSV file with summaries, or a folder with test.csv and test_references.csv; the
    folder it was trained from, if none is named. `valid`: the rows held out of training.
    """
    run = request.run
    assert run is not None, "summaries have no checkpoint files of other code"
    home = local_data(request.data_path or task.settings.data_path)
    held_out: frozenset[int] = frozenset()
    if request.data is None and not has_references(home, task.settings.style.columns):
        log("The test file is to be predicted: testing on the rows held out of training.")
        request = replace(request, data="valid")
    if request.data == "valid":
        source = Path(request.named("valid"))
        learned = run.checkpoint.state.identity.get("data")
        rows, held_out = validation_rows(task, training_file(home), learned, log)
    else:
        source = Path(request.data) if request.data and not request.data_path else home
        rows = read_references(source, task.settings.style.columns)
    rows = request.chosen(rows)
    too_long = task.settings.style.too_long(task.prompt_format.block_size)
    metrics, scored, skipped = evaluate_summaries(task, model, backend, source, rows, log, held_out)
    folder = request.folder(request.data or "")
    shown = {"best": scored[::-1][:SHOWN], "worst": scored[:SHOWN]}
    if backend.is_main:
        write_predictions(folder, scored)
        log(f"{len(scored)} samples of {source}; loss {metrics['loss']:.4f}")
        if skipped:
            log(f"{skipped} rows left out: {too_long}")
        for title, sample in ((title, s) for title, samples in shown.items() for s in samples):
            log(f"{title.capitalize()} {sample['id']} (ROUGE-L {sample['rougeL']:.2f})")
            log(f"  written:   {' '.join(sample['summary'].split())}")
            log(f"  reference: {' '.join(sample['reference'].split())}")
        log(f"All summaries, the worst first: {folder / 'predictions.csv'}")
    return {
        "task": task.name,
        "data": str(source),
        "samples": len(scored),
        "skipped": skipped,
        "metrics": metrics,
        "methods": {
            "baseline": "better baseline",
            "lead": "first line",
            "nearest": "nearest training summary",
        },
        "compilations": backend.compilations(),
        **shown,
    }


def evaluate_summaries(
    task: "SummarizeTask",
    model: nn.Module,
    backend: Backend,
    source: Path,
    rows: Sequence[Row],
    log: Log,
    held_out: frozenset[int] = frozenset(),
) -> tuple[dict[str, float], list[dict[str, Any]], int]:
    """Metrics of greedy summaries, every sample with what was written (the worst first), and the
    number of samples that are too long for the context.

    held_out: numbers of rows of the training file that baselines may not use.

    Metrics: `loss`; `rouge1`, `rouge2`, `rougeL` (F1) with `_low`, `_high` (95 %), `_baseline` (the
    better one), `_lead` and `_nearest`; `names_copied`, `unseen_names_copied`.
    """
    config, formats, columns = task.settings, task.prompt_format, task.settings.style.columns
    examples = [formats.example(row) for row in rows]
    kept = [(r, e) for r, e in zip(rows, examples, strict=True) if e is not None]
    if not kept:
        too_long = config.style.too_long(formats.block_size)
        raise DataError(f"{source}: all rows are {too_long}.", "Test on others.")
    cache, every = TokenCache.of([e for _, e in kept]), np.arange(len(kept))
    sizes = SetSizes.of(sample_sizes(cache, every, whole=config.loss_on_prompt))
    data = TokenSamples(cache, every, sizes, whole=config.loss_on_prompt)
    loss = mean_values(task, model, backend, data)["loss"]
    rows = [row for row, _ in kept]
    limit = config.max_new_tokens
    prompts = dialogue_prompts(rows, formats, limit)
    decoding = Decoding(limit)
    say_what_differs(decoding, formats, backend, log)
    made, cut_off = generate_summaries(
        model, backend, prompts, decoding, formats, config.generation_slots
    )
    if cut_off:
        log(
            f"Warning: {cut_off} of {len(rows)} are cut off at max_new_tokens ({limit}) or the end"
            " of the context."
        )
    of_rows, scores = score_rows(rows, made, task.train_file, columns, log, held_out)
    scored = [
        {"id": rows[i].id, "rougeL": float(scores[i]), "summary": made[i],
         "reference": rows[i].summary, "dialogue": rows[i].dialogue}
        for i in np.argsort(scores, kind="stable")
    ]  # fmt: skip
    return {"loss": loss, **of_rows}, scored, len(examples) - len(kept)


def write_predictions(out: Path, shown: Sequence[dict[str, Any]]) -> None:
    """Writes all samples to `predictions.csv` in the folder `out`."""
    columns = ("id", "rougeL", "summary", "reference", "dialogue")
    with writing_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        rows = ([str(sample[column]) for column in columns] for sample in shown)
        write_csv(out / "predictions.csv", [columns, *rows])


def read_references(path: Path, columns: Columns = DIALOGUES) -> list[Row]:
    """Rows with their summaries from one file, or from a folder's test.csv and its references."""
    if is_table_name(path) or path.is_file():
        return list(read_rows(path, summaries=True, columns=columns))
    tests, references = table_file(path, "test"), table_file(path, "test_references")
    if not tests.is_file():
        raise DataError(
            f"There is no {tests}.",
            "Give a folder with test.csv and test_references.csv, or one CSV file with summaries;"
            " --data valid takes the rows held out of training.",
        )
    if not has_references(path, columns):
        raise DataError(
            f"{tests} has no column {columns.completion!r}: its rows are to be predicted.",
            "--data valid tests on the rows held out of training, --data FILE on others.",
        )
    if not references.is_file():
        return list(read_rows(tests, summaries=True, columns=columns))
    completions = read_rows(references, summaries=True, dialogues=False, columns=columns)
    summaries = {row.id: row.summary for row in completions}
    rows = list(read_rows(tests, summaries=False, columns=columns))
    missing = [row.id for row in rows if row.id not in summaries]
    if missing:
        raise DataError(
            f"{references} has no summary for id {missing[0]!r} ({len(missing)} in all).",
            "The ids must be those of test.csv.",
        )
    return [replace(row, summary=summaries[row.id]) for row in rows]


def has_references(path: Path, columns: Columns) -> bool:
    """Whether a file or folder says what the rows to test are answered with."""
    tests = table_file(path, "test")
    if not path.is_dir() or table_file(path, "test_references").is_file():
        return True
    if not tests.is_file():
        return False
    if columns.has_messages:
        return bool(next(read_rows(tests, summaries=False, columns=columns)).summary)
    return column_place(open_table(tests).columns, columns.completion) is not None


def validation_rows(
    task: "SummarizeTask", train_file: Path, learned: str | None, log: Log
) -> tuple[list[Row], frozenset[int]]:
    """The rows that a run was validated on, and their numbers in the training file.

    learned: digest of the file that the run was trained with.
    """
    config, columns = task.settings, task.settings.style.columns
    if config.valid_file is not None:
        rows = list(read_rows(Path(config.valid_file), summaries=True, columns=columns))
        return rows, frozenset()
    if learned not in (None, file_digest(train_file)[:16]):
        log(f"Warning: {train_file} is not the file that the run was trained with: it may have"
            " learned some of the rows that it is tested on.")  # fmt: skip
    # As they were learned, pairs too: rows that are too long are in no part.
    learns = task.learned_format
    rows = list(read_rows(train_file, summaries=True, pairs=True, columns=learns.style.columns))
    examples = chain.from_iterable(encoded_chunks(rows, learns))
    rows = [row for row, example in zip(rows, examples, strict=True) if example is not None]
    chosen = split_indices(len(rows), config.valid_fraction, config.split_seed)[1]
    if not len(chosen):
        raise DataError("the data has no validation rows.", "Name others: --data FILE")
    rows = [rows[index] for index in chosen]
    return rows, frozenset(row.number for row in rows)


# -- scores --------------------------------------------------------------------------------------
def score_samples(
    task: "SummarizeTask", model: nn.Module, backend: Backend, data: SampleSource
) -> dict[str, float]:
    """ROUGE of greedy summaries of the first few validation samples."""
    assert isinstance(data, TokenSamples)
    count = min(task.settings.score_samples, len(data))
    if count == 0 or not task.rows.packed:
        return {}
    parts = [data.prompt_and_targets(index) for index in range(count)]
    prompts = [Prompt(index, prompt) for index, (prompt, _) in enumerate(parts)]
    room = task.shape.block_size - min(len(prompt) for prompt, _ in parts)
    decoding = Decoding(max_new_tokens=min(task.settings.max_new_tokens, room))
    batch_size = task.settings.generation_slots
    was_training = model.training
    model.eval()
    try:
        made, _ = generate_summaries(
            model, backend, prompts, decoding, task.prompt_format, batch_size
        )
    finally:
        model.train(was_training)
    references = [task.prompt_format.written(targets) for _, targets in parts]
    scores = rouge_scores(references, made)
    return {kind: float(values.mean()) for kind, values in scores.items()}


def score_rows(
    rows: Sequence[Row], made: Sequence[str], train_csv: Path, columns: Columns, log: Log,
    held_out: frozenset[int] = frozenset(),
) -> tuple[dict[str, float], Array]:  # fmt: skip
    """ROUGE of the summaries with intervals, and of the baselines beside them; each ROUGE-L."""
    known = training_rows(train_csv, columns, held_out) if train_csv.is_file() else []
    references = [row.summary for row in rows]
    dialogues = [row.dialogue for row in rows]
    scores = rouge_scores(references, made)
    asked = [
        json.loads(row.dialogue)[-1]["content"]
        if columns.has_messages or row.has_messages else row.dialogue for row in rows
    ]  # fmt: skip
    baselines = {"lead": rouge_scores(references, [lead_line(text) for text in asked])}
    if known:
        baselines["nearest"] = rouge_scores(references, nearest_summaries(known, dialogues))
    else:
        log(f"No nearest-summary baseline: {train_csv} is not here.")
    metrics = {"exact_match": exact_match(references, made)}
    for kind in KINDS:
        metrics[kind] = float(scores[kind].mean())
        if interval := mean_interval(scores[kind], 0.0, 1.0):
            metrics |= dict(zip((f"{kind}_low", f"{kind}_high"), interval, strict=True))
        means = {name: float(values[kind].mean()) for name, values in baselines.items()}
        metrics[f"{kind}_baseline"] = max(means.values())
        metrics |= {f"{kind}_{name}": mean for name, mean in means.items()}
    words = {w for row in known for w in CAPITALISED.findall(f"{row.dialogue} {row.summary}")}
    copied = {
        "names_copied": names_copied(dialogues, references, made),
        "unseen_names_copied": names_copied(dialogues, references, made, words) if words else None,
    }
    metrics |= {name: share for name, share in copied.items() if share is not None}
    return metrics, scores["rougeL"]


def names_copied(
    dialogues: Sequence[str],
    references: Sequence[str],
    made: Sequence[str],
    known: AbstractSet[str] = frozenset(),
) -> float | None:
    """Share of the capitalised words of both reference and dialogue that the summary repeats.

    Words in `known` do not count; None where there are no words.
    """
    found = wanted = 0
    for dialogue, reference, summary in zip(dialogues, references, made, strict=True):
        names = set(CAPITALISED.findall(reference)) & set(CAPITALISED.findall(dialogue)) - known
        wanted += len(names)
        found += len(names & set(CAPITALISED.findall(summary)))
    return found / wanted if wanted else None
