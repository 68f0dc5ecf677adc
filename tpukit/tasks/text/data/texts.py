"""Texts of a table, and their tokens."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import ConfigError, DataError
from tpukit.io.tables import Table, column_place, plain_name
from tpukit.tasks.text.settings import TextConfig
from tpukit.train.labelled import column_of
from tpukit.train.target import as_number
from tpukit.train.target_choice import LABEL_NAMES
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
    if not left:
        raise DataError(
            f"{table.path}: of its columns {', '.join(names)} none is a text that the test table"
            f" has; that has {', '.join(map(plain_name, tests))}.",
            "Name the text's column alike in both.",
        )
    if len(likely) != 1:
        raise DataError(
            f"{table.path}: which column is the text is not clear: {', '.join(likely or left)}.",
            "Name it: --set text_columns=NAME, or NAME,NAME for a pair.",
        )
    return likely


def texts_in(table: Table, named: Collection[str] = ()) -> set[str]:
    """Columns that hold texts, by their names or words."""
    known = {name for names in TEXT_NAMES for name in names}
    names = filter(None, map(plain_name, table.columns))
    return {n for n in names if n in named or n.lower() in known
            or _words(table.column(n)) >= FEWEST_WORDS}  # fmt: skip


def with_ids(
    table: Table, config: TextConfig, texts: Collection[str], sample: Table | None = None,
    tests: Sequence[str] = (), needed: int = 2,
) -> tuple[Table, str]:  # fmt: skip
    """A table and the column of its ids: the one that is named, that of the sample, or one beside
    the texts whose name ends in id or whose values differ; else one of row numbers is added.

    tests: columns of the test table, where there is one; needed: columns beside the texts that a
    table with ids has.
    """
    if config.id_column is not None:
        column_of(table, "id_column", config.id_column)
        return table, plain_name(config.id_column)
    there = [name for name in map(plain_name, table.columns) if name and name not in texts]
    there = [name for name in there if not name.startswith("Unnamed: ")]
    names = [name for name in there if name.lower() not in LABEL_NAMES]
    tested = [*map(plain_name, tests)]
    likely = [n for n in names if n.lower().endswith("id")
              or (_differ(table.column(n)) and n in (tested or names))]  # fmt: skip
    likely.sort(key=lambda name: (name.lower() != "id", not _differ(table.column(name))))
    shared = [plain_name(name) for name in sample.columns[:1]] if sample else []
    if found := [name for name in shared if name in names]:
        return table, found[0]
    if likely and (len(there) >= needed or likely[0] in tested):
        return table, next((name for name in tested if name in likely), likely[0])
    own = next(name for name in ("id", "row", "row_number") if name not in there)
    rows = [[str(number), *row] for number, row in enumerate(table.rows)]
    return replace(table, columns=[own, *table.columns], rows=rows), own


def _differ(values: Sequence[str]) -> bool:
    """Whether values may be ids: no two alike, and no fractions."""
    numbers = (as_number(value) for value in values)
    return len({*values}) == len(values) and not any(n and n % 1 for n in numbers)


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
