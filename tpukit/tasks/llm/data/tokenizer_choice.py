"""Which tokenizer a run gets: GPT-2's own, a local file, or one trained on the data."""

import hashlib
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from tpukit.errors import DataError
from tpukit.io.files import require_regular, write_file
from tpukit.io.folders import cache_folder
from tpukit.io.hub_data import is_hub_silent
from tpukit.io.lock import exclusive
from tpukit.tasks.llm.data.rows import DIALOGUES, Columns, read_rows
from tpukit.tasks.llm.data.token_cache import file_digest
from tpukit.tasks.llm.data.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    of_no_model,
    tokenizer_from_bytes,
    tokenizer_of_ranks,
)

BRING_A_FILE = (
    "Bring the file along: `tokenizer.json` of the Hugging Face repository `gpt2` (or a `.tiktoken`"
    " file) and give it with --tokenizer FILE; --tokenizer train needs no network at all."
)
ROWS_FOR_TOKENIZER = 50_000
"""Most rows that a tokenizer is trained on: more change it little."""


def trained_tokenizer(
    csv_path: Path, vocabulary_size: int, columns: Columns = DIALOGUES
) -> Tokenizer:
    """A tokenizer trained on the file, kept in the cache by content and size."""
    path = cache_folder() / "tokenizers" / f"{file_digest(csv_path)[:32]}-{vocabulary_size}.json"
    if columns != DIALOGUES:
        names = hashlib.sha256(json.dumps(columns.names).encode()).hexdigest()
        path = path.with_stem(f"{path.stem}-{names[:32]}")
    with exclusive(path.with_suffix(".lock"), wait=True):
        if not path.exists():
            rows = islice(read_rows(csv_path, summaries=True, columns=columns), ROWS_FOR_TOKENIZER)
            texts = (text for row in rows for text in (row.dialogue, row.summary))
            write_file(path, train_tokenizer(texts, vocabulary_size).to_bytes())
        return tokenizer_from_bytes(path.read_bytes(), str(path))


def load_tokenizer(name: str) -> Tokenizer:
    """`gpt2`, a .tiktoken or tokenizer.json file, or a model's directory. Raises `DataError`."""
    if name == "gpt2":
        return _gpt2()
    path = Path(name)
    try:
        if path.suffix == ".tiktoken":
            return tokenizer_of_ranks(require_regular(path).read_bytes(), name)
        return Tokenizer.read(path if path.is_dir() else require_regular(path))
    except OSError as error:
        raise DataError(
            f"No tokenizer at {path}: {error.strerror}.",
            "--tokenizer takes gpt2, train, a .tiktoken or tokenizer.json file, or a directory.",
        ) from error


def _gpt2() -> Tokenizer:
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download("gpt2", "tokenizer.json", local_files_only=is_hub_silent())
    except Exception as error:
        raise DataError(
            "The GPT-2 tokenizer is not here and could not be downloaded"
            f" ({type(error).__name__}).",
            BRING_A_FILE,
        ) from error
    return of_no_model(Path(file).read_text(encoding="utf-8"), "gpt2")


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE with GPT-2's rules, trained on `texts`."""
    from tokenizers import Tokenizer as Whole
    from tokenizers.decoders import ByteLevel as Bytes
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    whole: Any = Whole(BPE())
    whole.pre_tokenizer, whole.decoder = ByteLevel(add_prefix_space=False), Bytes()
    trainer = BpeTrainer(
        vocab_size=vocabulary_size - 1,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    whole.train_from_iterator(iter(texts), trainer)
    whole.add_special_tokens([END_OF_TEXT])
    return of_no_model(whole.to_str(), "the trained tokenizer")
