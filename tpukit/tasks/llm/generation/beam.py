"""Beam search, step for step what transformers' `generate` does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from tpukit.tasks.llm.generation.batch_decoder import Choose
from tpukit.tasks.llm.generation.continuous_batching import Decoder
from tpukit.tasks.llm.generation.decoding import Decoding, Prompt

Array = np.ndarray[Any, Any]
IMPOSSIBLE = np.float32(-1.0e9)


@dataclass
class Group:
    """The beams of one prompt."""

    beams: int
    ends: frozenset[int]
    scores: Array = field(init=False)
    """float32 (beams,): accumulated log-probabilities of the running beams."""
    sequences: list[list[int]] = field(init=False)
    finished: list[tuple[np.float32, list[int]]] = field(default_factory=list)
    """At most `beams` ended sequences with their scores, the best first."""

    def __post_init__(self) -> None:
        self.scores = np.full(self.beams, IMPOSSIBLE, np.float32)
        self.scores[0] = 0.0
        self.sequences = [[] for _ in range(self.beams)]

    def advance(
        self, scores: Array, beams: Array, tokens: Array, limit: int, how: Decoding
    ) -> tuple[list[int], list[int]] | None:
        """Takes the best continuations, the best first: enough that beams go on beside those that
        end.

        Returns each running beam's origin and next token; None when the search is over.
        """
        length = len(self.sequences[0]) + 1
        at_limit = length >= limit
        ends = [at_limit or int(token) in self.ends for token in tokens]
        candidates = [[*self.sequences[b], int(t)] for b, t in zip(beams, tokens, strict=True)]
        for place in range(self.beams):
            if ends[place]:
                score = np.float32(scores[place] / np.float32(length**how.length_penalty))
                self.finished.append((score, candidates[place]))
        self.finished.sort(key=lambda pair: -pair[0])
        del self.finished[self.beams :]
        running = [place for place in range(len(ends)) if not ends[place]][: self.beams]
        if len(running) < self.beams or self._is_over(scores[running[0]], length, how):
            return None
        running = self._in_their_rows(running, beams)
        self.scores = scores[running].astype(np.float32)
        self.sequences = [candidates[place] for place in running]
        return [int(beams[place]) for place in running], [int(tokens[place]) for place in running]

    def _in_their_rows(self, running: list[int], origins: Array) -> list[int]:
        """These continuations (places in `origins`) ordered so that the first of each beam stays
        in its row: only the others' keys and values have to be copied."""
        stays: dict[int, int] = {}
        for place in running:
            stays.setdefault(int(origins[place]), place)
        moves = iter([place for place in running if place not in stays.values()])
        return [stays[row] if row in stays else next(moves) for row in range(self.beams)]

    def _is_over(self, best_running: np.float32, length: int, how: Decoding) -> bool:
        """Whether no running beam can beat the worst ended one any more."""
        if len(self.finished) < self.beams:
            return False
        if how.early_stopping:
            return True
        return not best_running / np.float32(length**how.length_penalty) > self.finished[-1][0]

    def best(self) -> list[int]:
        return self.finished[0][1] if self.finished else self.sequences[self.scores.argmax()]


class BeamGenerator(Decoder):
    """Beam search: the rows of a place are the beams of its prompt."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._groups: dict[int, Group] = {}

    @property
    def choose(self) -> Choose:
        return partial(best_continuations, self.vocabulary, 1 + len(self.ends), self.scored)

    def start(self, prompt: Prompt) -> None:
        self._groups[prompt.row] = Group(self.decoding.num_beams, self.ends)

    def given(self, places: Sequence[int | None], step: int) -> Array:
        """Scores of the running beams."""
        scores = np.full((len(places), self.decoding.num_beams), IMPOSSIBLE, np.float32)
        for index, place in enumerate(places):
            if place is not None and (owner := self.owners[place]):
                scores[index] = self._groups[owner.row].scores
        return scores

    def take(self, chosen: Sequence[Array], places: Sequence[int | None]) -> None:
        order = np.arange(self.batch.shape.rows)
        for scores, beams, tokens, place in zip(*chosen, places, strict=True):
            if place is None or (owner := self.owners[place]) is None:
                continue
            limit, group = self.most_new_tokens(owner), self._groups[owner.row]
            going_on = group.advance(scores, beams, tokens, limit, self.decoding)
            if going_on is None:
                self.done[owner.row] = self._groups.pop(owner.row).best()
                self.release(place)
                continue
            rows = slice(self.rows_of(place).start, self.rows_of(place).stop)
            order[rows] = rows.start + np.array(going_on[0])
            self.tokens[rows] = going_on[1]
        # The beams of a prompt share its keys and values: they differ in what they generated.
        lengths = [len(group.sequences[0]) for group in self._groups.values()]
        self.batch.reorder(order, max(lengths, default=0))


def best_continuations(
    vocabulary: int,
    times: int,
    scored: Callable[[Tensor | None, Tensor], Tensor],
    logits: Tensor,
    before: Tensor | None,
    scores: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each group's `times` x beams best continuations, the best first: scores, beams, tokens.

    scores (groups, beams): of the running beams. Where a group's beams all hold the same, they
    share a row of logits.
    """
    assert scores is not None
    of_tokens = scored(before, logits[:, :vocabulary].log_softmax(-1))
    of_tokens = of_tokens.repeat_interleave(scores.numel() // len(logits), 0)
    total = of_tokens + scores.reshape(-1, 1)
    best, places = total.reshape(len(scores), -1).topk(times * scores.shape[1])
    return best, places // total.shape[-1], places % total.shape[-1]
