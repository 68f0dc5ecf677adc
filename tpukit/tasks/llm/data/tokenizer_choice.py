"""Which tokenizer a run gets: GPT-2's own, a local file, or one trained on the data."""

import subprocess
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import tiktoken

from tpukit.errors import DataError
from tpukit.io.files import require_regular, write_file
from tpukit.io.folders import cache_folder
from tpukit.io.lock import exclusive
from tpukit.tasks.llm.data.hub_tokenizer import HubTokenizer
from tpukit.tasks.llm.data.rows import DIALOGUES, Columns, read_rows
from tpukit.tasks.llm.data.token_cache import file_digest
from tpukit.tasks.llm.data.tokenizer import Tokenizer
from tpukit.tasks.llm.data.tokenizer_json import byte_ranks, pre_tokenizer

DOWNLOAD_SECONDS = 60
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
    path = (
        cache_folder() / "tokenizers" / f"{file_digest(csv_path)[:32]}-{vocabulary_size}.tiktoken"
    )
    if columns != DIALOGUES:
        path = path.with_stem("-".join((path.stem, *columns.names)))
    with exclusive(path.with_suffix(".lock"), wait=True):
        if not path.exists():
            rows = islice(read_rows(csv_path, summaries=True, columns=columns), ROWS_FOR_TOKENIZER)
            texts = (text for row in rows for text in (row.dialogue, row.summary))
            write_file(path, train_tokenizer(texts, vocabulary_size).to_bytes())
        return Tokenizer.from_bytes(path.read_bytes(), str(path))


def load_tokenizer(name: str) -> Tokenizer | HubTokenizer:
    """`gpt2`, a .tiktoken or tokenizer.json file, or a model's directory. Raises `DataError`."""
    if name == "gpt2":
        return _gpt2()
    path = Path(name)
    try:
        if path.suffix == ".tiktoken":
            return Tokenizer.from_bytes(require_regular(path).read_bytes(), name)
        return HubTokenizer.read(path if path.is_dir() else require_regular(path))
    except OSError as error:
        raise DataError(
            f"No tokenizer at {path}: {error.strerror}.",
            "--tokenizer takes gpt2, train, a .tiktoken or tokenizer.json file, or a directory.",
        ) from error


def _gpt2() -> Tokenizer:
    """tiktoken's; its first use downloads, in a child process that cannot hang this one."""
    fetch = [sys.executable, "-c", "import tiktoken; tiktoken.get_encoding('gpt2')"]
    try:
        done = subprocess.run(fetch, capture_output=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(
            f"The GPT-2 tokenizer could not be downloaded in {DOWNLOAD_SECONDS} s.", BRING_A_FILE
        ) from None
    if done.returncode != 0:
        raise DataError(
            "The GPT-2 tokenizer is not here and could not be downloaded.", BRING_A_FILE
        )
    encoding = tiktoken.get_encoding("gpt2")
    return Tokenizer(encoding._mergeable_ranks, encoding.eot_token)


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE trained on `texts` with the tokenizers library."""
    from tokenizers import Tokenizer as Trained
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    trained = Trained(BPE())
    trained.pre_tokenizer = pre_tokenizer()
    trainer = BpeTrainer(
        vocab_size=vocabulary_size - 1,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(iter(texts), trainer)
    ranks = byte_ranks(trained.get_vocab())
    return Tokenizer(ranks, len(ranks))
