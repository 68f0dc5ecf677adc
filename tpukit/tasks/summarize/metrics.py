"""ROUGE-1, -2 and -L F1 with stemming (Lin, 2004), as `rouge_score` computes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
KINDS = ("rouge1", "rouge2", "rougeL")


def rouge_scores(references: Sequence[str], summaries: Sequence[str]) -> dict[str, Array]:
    """F1 of each sample: for each of `KINDS` an array (samples,)."""
    from rouge_score.rouge_scorer import RougeScorer  # its nltk imports scipy

    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    scored = [scorer.score(r, s) for r, s in zip(references, summaries, strict=True)]
    return {kind: np.array([score[kind].fmeasure for score in scored]) for kind in KINDS}


def exact_match(references: Sequence[str], made: Sequence[str]) -> float:
    """Share of the texts that are their references but for spaces."""
    pairs = zip(references, made, strict=True)
    return sum(r.split() == m.split() for r, m in pairs) / max(len(references), 1)
