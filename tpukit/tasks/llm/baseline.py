"""Two summaries that need no model: the first line, and the nearest training dialogue's summary."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from tpukit.tasks.llm.data.rows import Columns, Row, read_rows

MOST_TRAINING_ROWS = 50_000
WORD = re.compile(r"\w+")


def training_rows(path: Path, columns: Columns, held_out: AbstractSet[int]) -> list[Row]:
    """The first 50,000 rows of a training file but for those with the numbers `held_out`."""
    rows = islice(read_rows(path, summaries=True, columns=columns), MOST_TRAINING_ROWS)
    return [row for row in rows if row.number not in held_out]


def lead_line(dialogue: str) -> str:
    """Lead-1: the dialogue's first line that is not empty."""
    return next((line.strip() for line in dialogue.splitlines() if line.strip()), "")


def nearest_summaries(rows: Sequence[Row], dialogues: Sequence[str]) -> list[str]:
    """For each dialogue the summary of the row whose dialogue has the highest TF-IDF cosine."""
    counts = [Counter(_words(row.dialogue)) for row in rows]
    documents: Counter[str] = Counter(word for count in counts for word in count)
    places = {word: column for column, word in enumerate(documents)}
    weights = {word: math.log(len(rows) / n) for word, n in documents.items()}
    known = _matrix(counts, places, weights)
    asked = _matrix([Counter(_words(text)) for text in dialogues], places, weights)
    # A block of rows at a time: the products would not fit for large sets.
    nearest: list[int] = []
    for start in range(0, asked.shape[0], 256):
        nearest += (asked[start : start + 256] @ known.T).toarray().argmax(1).tolist()
    return [rows[index].summary for index in nearest]


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _matrix(
    counts: Sequence[Counter[str]], columns: dict[str, int], weights: dict[str, float]
) -> Any:
    """(texts, words) with rows of length 1."""
    entries = [
        (row, columns[word], times * weights[word])
        for row, count in enumerate(counts)
        for word, times in count.items()
        if word in columns
    ]
    rows, places, values = np.array(entries).reshape(-1, 3).T
    found = (values.astype(np.float32), (rows.astype(np.int64), places.astype(np.int64)))
    matrix = sparse.csr_matrix(found, (len(counts), len(columns)))
    lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(1)).ravel())
    return sparse.diags(1 / np.maximum(lengths, 1e-9)) @ matrix
