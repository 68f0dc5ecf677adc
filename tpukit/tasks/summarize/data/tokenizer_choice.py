"""Which tokenizer a run gets, and one trained on the training file."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from tpukit.io.cache import cache_folder
from tpukit.io.files import write_file
from tpukit.io.lock import exclusive
from tpukit.tasks.summarize.data.csv_file import read_rows
from tpukit.tasks.summarize.data.token_cache import file_digest
from tpukit.tasks.summarize.data.tokenizer import Tokenizer, train_tokenizer

ROWS_FOR_TOKENIZER = 50_000
"""Most rows that a tokenizer is trained on: more change it little."""


def default_tokenizer(init: str | None) -> str:
    """The tokenizer that lies beside the weights, else GPT-2's."""
    beside = Path(init or "") / "tokenizer.json"
    return str(beside) if init and beside.is_file() else "gpt2"


def trained_tokenizer(csv_path: Path, vocabulary_size: int) -> Tokenizer:
    """A tokenizer trained on the file, kept in the cache by content and size."""
    path = (
        cache_folder() / "tokenizers" / f"{file_digest(csv_path)[:32]}-{vocabulary_size}.tiktoken"
    )
    with exclusive(path.with_suffix(".lock"), wait=True):
        if not path.exists():
            rows = islice(read_rows(csv_path, summaries=True), ROWS_FOR_TOKENIZER)
            texts = (text for row in rows for text in (row.dialogue, row.summary))
            write_file(path, train_tokenizer(texts, vocabulary_size).to_bytes())
        return Tokenizer.from_bytes(path.read_bytes(), str(path))
