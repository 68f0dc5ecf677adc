"""Texts of a table, and their tokens."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import ConfigError, DataError
from tpukit.io.tables import Table, column_place, plain_name
from tpukit.tasks.text.settings import TextConfig
from tpukit.train.task import Sample

TEXT_NAMES = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"),
    ("text1", "text2"), ("text_a", "text_b"), ("text",), ("full_text",), ("comment_text",),
    ("excerpt",), ("sentence",), ("essay",), ("content",), ("review",), ("tweet",), ("document",),
    ("question",),
)  # fmt: skip
"""Columns of texts by their names in small letters, the likeliest first."""
FEWEST_WORDS = 3
"""Mean number of words of a column that holds texts."""
SHORTEST_WORDS = 200
"""Rows that are looked at for it."""
Tokens = NDArray[np.int32]


def text_columns(
    table: Table, config: TextConfig, ids: str, learned: Sequence[str], tests: Sequence[str]
) -> list[str]:
    """The columns of the texts. Raises DataError where they are not clear.

    learned: columns that are predicted; tests: columns of the test table, where there is one.
    """
    names = [plain_name(name) for name in table.columns]
    if config.texts:
        for name in config.texts:
            if column_place(table.columns, name) is None:
                raise DataError(
                    f"{table.path}: text_columns {name}: there is no such column.",
                    f"Its columns are {', '.join(names)}: --set text_columns=NAME",
                )
        return [plain_name(name) for name in config.texts]
    known = {*map(plain_name, tests)} or {*names}
    apart = {ids, *learned, config.fold_column, config.group_column}
    left = [name for name in names if name in known and name not in apart]
    by_name = {name.lower(): name for name in left}
    for pair in TEXT_NAMES:
        if all(name in by_name for name in pair):
            return [by_name[name] for name in pair]
    likely = [name for name in left if _words(table.column(name)) >= FEWEST_WORDS]
    if len(likely) != 1:
        raise DataError(
            f"{table.path}: which column is the text is not clear: {', '.join(likely or left)}.",
            "Name it: --set text_columns=NAME, or NAME,NAME for a pair.",
        )
    return likely


def _words(texts: Sequence[str]) -> float:
    return float(np.mean([len(text.split()) for text in texts[:SHORTEST_WORDS]] or [0]))


@dataclass(frozen=True)
class TextSamples:
    """Tokens of texts with what is true of them; a long text may have several windows."""

    tokens: Sequence[Tokens]
    kinds: Sequence[Tokens] | None
    """Which text of a pair each token is of, for models that take it (`token_type_ids`)."""
    text: NDArray[np.int64]
    """(windows,) the row of each."""
    values: NDArray[Any]
    """(rows, ...) see `Target.values`."""
    weights: Mapping[str, NDArray[np.float32]]
    """(rows, ...) weights of rows or labels, by their names in a batch."""

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(tokens) for tokens in self.tokens], np.int64)

    @cached_property
    def windows(self) -> NDArray[np.int64]:
        """(rows,) of each text."""
        return np.bincount(self.text)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Sample:
        row = int(self.text[index])
        kinds = {} if self.kinds is None else {"token_type_ids": self.kinds[index]}
        # Each text counts once, however many windows it has.
        weights = {"weight": np.float32(1.0), **{n: w[row] for n, w in self.weights.items()}}
        weights["weight"] = weights["weight"] / np.float32(self.windows[row])
        return {
            "input_ids": self.tokens[index], **kinds, "label": self.values[row],
            "sample": np.int64(row), **weights,
        }  # fmt: skip


def tokenised(
    tokenizer: Any, texts: Sequence[Sequence[str]], values: NDArray[Any], config: TextConfig,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
) -> TextSamples:  # fmt: skip
    """Samples of texts, or of pairs of them (columns, rows). Raises ConfigError for windows of
    pairs."""
    windows = config.long_texts == "windows"
    if windows and len(texts) > 1:
        raise ConfigError("long_texts=windows: a pair of texts has no windows.", "Leave it out.")
    # Of more than two texts the others are the second one.
    separator = f" {tokenizer.sep_token or tokenizer.eos_token or ''} "
    others = [[separator.join(row) for row in zip(*texts[1:], strict=True)]] * (len(texts) > 1)
    further = {"stride": config.overlap, "return_overflowing_tokens": True} if windows else {}
    with_kinds = "token_type_ids" in tokenizer.model_input_names
    found = tokenizer(
        list(texts[0]), *others, truncation=True, max_length=config.max_length,
        return_attention_mask=False, return_token_type_ids=with_kinds, verbose=False, **further,
    )  # fmt: skip
    # An empty text of a tokenizer without special tokens.
    empty = [tokenizer.pad_token_id]
    tokens = [np.array(row or empty, np.int32) for row in found["input_ids"]]
    kinds = None
    if with_kinds:
        kinds = [np.array(row or [0], np.int32) for row in found["token_type_ids"]]
    text = np.array(found.get("overflow_to_sample_mapping", range(len(tokens))), np.int64)
    return TextSamples(tokens, kinds, text, values, weights or {})


def digest(*parts: Any) -> str:
    """Of texts and values, whose change is another data set."""
    found = hashlib.sha256()
    for part in parts:
        found.update(repr(part.tolist() if isinstance(part, np.ndarray) else part).encode())
    return found.hexdigest()[:16]
