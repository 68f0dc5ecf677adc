"""ROUGE-1, -2 and -L F1 with stemming (Lin, 2004), as `rouge_score` computes them."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
KINDS = ("rouge1", "rouge2", "rougeL")
_ALONE = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff"
"""Letters of scripts without spaces between words."""
_MARKS = "\u0300-\u036f\u0610-\u065f\u0900-\u0963\u0970-\u0dff"
_TOKEN = re.compile(rf"[{_ALONE}]|(?:[^\W_{_ALONE}]|[{_MARKS}])+")


class AnyScript:
    """A tokenizer of words in any script; `rouge_score` leaves out all but a to z."""

    def tokenize(self, text: str) -> list[str]:
        return _TOKEN.findall(text.lower())


def rouge_scores(references: Sequence[str], summaries: Sequence[str]) -> dict[str, Array]:
    """F1 of each sample by kind; where few letters are a to z, of words in any script."""
    from rouge_score.rouge_scorer import RougeScorer  # its nltk imports scipy

    letters = list(filter(str.isalpha, "".join(references)))
    is_latin = 2 * sum(map(str.isascii, letters)) >= len(letters)
    scorer = RougeScorer(list(KINDS), use_stemmer=True, tokenizer=None if is_latin else AnyScript())
    scored = [scorer.score(r, s) for r, s in zip(references, summaries, strict=True)]
    return {kind: np.array([score[kind].fmeasure for score in scored]) for kind in KINDS}


def exact_match(references: Sequence[str], made: Sequence[str]) -> float:
    """Share of the texts that are their references but for spaces."""
    pairs = zip(references, made, strict=True)
    return sum(r.split() == m.split() for r, m in pairs) / max(len(references), 1)
