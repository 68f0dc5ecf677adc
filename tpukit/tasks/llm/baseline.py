"""Two summaries that need no model: the first line, and the nearest training dialogue's summary."""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path

import numpy as np

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
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.preprocessing import normalize

    # A word that is in every text has no weight; without any, texts of marks alone are refused.
    words = CountVectorizer(analyzer=lambda text: ["", *WORD.findall(text.lower())])
    counts = words.fit_transform([row.dialogue for row in rows])
    weights = np.log(len(rows) / counts.astype(bool).sum(0))
    known, asked = (
        normalize(part.multiply(weights).tocsr()) for part in (counts, words.transform(dialogues))
    )
    # A block of rows at a time: the products would not fit for large sets.
    nearest: list[int] = []
    for start in range(0, asked.shape[0], 256):
        nearest += (asked[start : start + 256] @ known.T).toarray().argmax(1).tolist()
    return [rows[index].summary for index in nearest]
