"""`predict`: the summaries of a test file, in its order, the same bytes after any number of kills.

Finished chunks are kept in a journal beside the output; the plan of chunks is a function of the
file and a row's draws of (seed, row), so what is computed again comes out the same.
"""

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch import nn

from tpukit.errors import UsageError
from tpukit.hardware.backend import Backend
from tpukit.io.files import is_writable, writing_errors
from tpukit.io.hub_data import local_data
from tpukit.io.lock import LockedError, exclusive
from tpukit.io.progress import Progress
from tpukit.io.tables import is_table_name, read_table, table_file, write_csv
from tpukit.tasks.llm.data.prompt import PromptFormat
from tpukit.tasks.llm.data.rows import extra_columns, read_rows
from tpukit.tasks.llm.data.token_cache import file_digest
from tpukit.tasks.llm.generation.decoding import Decoding, GenerationPlan
from tpukit.tasks.llm.generation.summaries import (
    Summary,
    dialogue_prompts,
    plan_prompts,
    summaries_of_chunks,
)
from tpukit.tasks.llm.settings import SummarizeConfig
from tpukit.train.requests import PredictionRequest
from tpukit.train.submission import require_match

if TYPE_CHECKING:
    from tpukit.tasks.llm.task import SummarizeTask

Log = Callable[[str], None]
SUBMISSION = Path("submission.csv")
JOURNAL_FORMAT = 7
"""Changes with what a journal holds, and with the rules of prompts and ends."""


def checked_job(config: SummarizeConfig, request: PredictionRequest) -> PredictionRequest:
    """A request with the defaults filled in. Raises what is known before a device is opened."""
    decoding = request.options or Decoding()
    if decoding.max_new_tokens is None:
        decoding = replace(decoding, max_new_tokens=config.max_new_tokens)
    data = local_data(request.data_path or config.data_path)
    # Of a training file the one beside it.
    folder = data.parent if is_table_name(data) else data
    out = request.out or SUBMISSION
    require_writable(out)
    test_csv = request.test_csv or table_file(folder, "test")
    return replace(request, test_csv=test_csv, out=out, options=decoding)


def require_writable(out: Path) -> None:
    """Raises `UsageError` before any work where `out` could not be written at its end."""
    folder = out.parent
    if not folder.is_dir():
        raise UsageError(
            f"--out {out}: there is no folder {folder}.",
            f"Make it first: mkdir -p {shlex.quote(str(folder))}",
        )
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder.", "Name a file, such as submission.csv.")
    if not is_writable(folder):
        raise UsageError(
            f"--out {out}: the folder {folder} cannot be written.",
            "Name a file in a folder you can write to.",
        )


def predict_run(
    task: "SummarizeTask", model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
) -> dict[str, Any]:
    """Writes the summaries of a test file; the JSON fields of `predict`."""
    started = time.monotonic()
    job = checked_job(task.settings, request)
    rows, cut_off = predict_rows(task, model, backend, job, log)
    seconds = time.monotonic() - started
    log(f"{rows:,} summaries in {job.out}, {seconds:.1f} s")
    return {
        "rows": rows,
        "cut_off": cut_off,
        "path": str(job.out),
        "seconds": seconds,
        "compilations": backend.compilations(),
    }


def predict_rows(
    task: "SummarizeTask", model: nn.Module, backend: Backend, job: PredictionRequest, log: Log
) -> tuple[int, int]:
    """Writes the summaries; the number of rows, and of those that are cut off. Every rank must
    call it."""
    assert job.test_csv is not None and job.out is not None
    formats, columns = task.prompt_format, task.settings.style.columns
    for name in extra_columns(job.test_csv, columns) if backend.is_main else ():
        log(f"{job.test_csv}: column {name} is not used.")
    say_what_differs(job.options, formats, backend, log)
    rows = list(read_rows(job.test_csv, summaries=False, columns=columns))
    ids, names = [row.id for row in rows], (columns.id or "id", columns.completion)
    if job.sample_submission is not None:
        require_match(names, ids, read_table(job.sample_submission))
    prompts = dialogue_prompts(rows, formats, job.options.limit)
    plan = plan_prompts(prompts, backend, task.settings.generation_slots, job.options.num_beams)
    key = _key(job, backend, plan)
    with _open_journal(job.out, backend) as file:
        journal = Journal(file, key)
        own = range(backend.rank, len(plan.chunks), backend.world_size)
        missing = [number for number in own if number not in journal.chunks]
        if any(backend.all_gather_objects(bool(missing))):
            total, done = sum(len(plan.chunks[number]) for number in own), len(journal.rows)
            chunks = summaries_of_chunks(model, backend, plan, missing, job.options, formats)
            is_main = backend.is_main
            with Progress("Writing summaries", total, done=done, enabled=is_main) as progress:
                for number, summaries in chunks:
                    journal.add(number, summaries)
                    progress.update(len(journal.rows))
        parts = backend.all_gather_objects(journal.rows)
        made = {row: summary for part in parts for row, summary in part.items()}
        cut_off = sum(summary.is_cut_off for summary in made.values())
        if backend.is_main:
            empty = sum(not summary.text for summary in made.values())
            if empty:
                log(f"Warning: {empty} of {len(ids)} summaries are empty.")
            if cut_off:
                log(
                    f"Warning: {cut_off} of {len(ids)} are cut off at"
                    f" --max-new-tokens {job.options.limit} or the end of the context."
                )
            with writing_errors(job.out.parent):
                write_csv(job.out, [names, *((id_, made[n].text) for n, id_ in enumerate(ids))])
        backend.all_gather_objects(None)  # written, before any rank drops its journal
        _journal_path(job.out, backend).unlink(missing_ok=True)
    return len(ids), cut_off


def say_what_differs(how: Decoding, formats: PromptFormat, backend: Backend, log: Log) -> None:
    """A line where transformers would generate otherwise, by a file of the weights."""
    text = formats.tokenizer.files.get("generation_config.json", "{}")
    if backend.is_main and (line := how.unlike(text)):
        log(line)


# -- the journal ---------------------------------------------------------------------------------
class Journal:
    """Finished chunks, one JSON line each, under a key that says what they belong to."""

    def __init__(self, file: IO[bytes], key: str) -> None:
        self.file = file
        self.chunks: set[int] = set()
        self.rows: dict[int, Summary] = {}
        file.seek(0)
        good = 0
        for number, line in enumerate(file):
            entry = _parse(line)
            if entry is None or (number == 0 and entry != {"key": key}):
                break
            if number:
                self.chunks.add(entry["chunk"])
                self.rows |= {int(row): Summary(*made) for row, made in entry["rows"].items()}
            good += len(line)
        # Whatever follows the last whole line was being written when its process was killed.
        file.truncate(good)
        file.seek(good)
        if good == 0:
            self._write({"key": key})

    def add(self, chunk: int, rows: dict[int, Summary]) -> None:
        """Keeps a finished chunk; it is on the disk when this returns."""
        self._write({"chunk": chunk, "rows": rows})
        self.chunks.add(chunk)
        self.rows |= rows

    def _write(self, entry: dict[str, Any]) -> None:
        self.file.write(json.dumps(entry).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return entry


def _journal_path(out: Path, backend: Backend) -> Path:
    return out.with_name(f".{out.name}.journal-{backend.rank}")


@contextmanager
def _open_journal(out: Path, backend: Backend) -> Iterator[IO[bytes]]:
    """The journal, locked: two predictions into one file would mix."""
    path = _journal_path(out, backend)
    lock = path.with_name(f"{path.name}.lock")
    try:
        with exclusive(lock), path.open("ab+") as file:
            yield file
            lock.unlink()
    except LockedError as error:
        raise UsageError(
            f"Another prediction is writing {out}.", "Wait for it, or name another --out."
        ) from error


def _key(job: PredictionRequest, backend: Backend, plan: GenerationPlan) -> str:
    """Everything that the summaries depend on."""
    assert job.test_csv is not None
    weights = sorted(job.run.checkpoint.path.glob("*.safetensors"))
    parts = {
        "format": JOURNAL_FORMAT,
        "test": file_digest(job.test_csv),
        "weights": [file_digest(path) for path in weights],
        "decoding": asdict(job.options),
        "slots": plan.batch_size,
        "chunks": len(plan.chunks),
        "hardware": [
            backend.describe()["hardware"],
            backend.devices,
            backend.world_size,
            backend.precision,
        ],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
