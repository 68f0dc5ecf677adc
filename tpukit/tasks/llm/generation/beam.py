"""Beam search, step for step what transformers' `generate` does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpukit.tasks.llm.generation.batch_decoder import Choose
from tpukit.tasks.llm.generation.continuous_batching import ChunkDecoding, Decoder
from tpukit.tasks.llm.generation.decoding import Decoding, Prompt

Array = np.ndarray[Any, Any]
IMPOSSIBLE = np.float32(-1.0e9)


@dataclass
class Group:
    """The beams of one prompt."""

    prompt: Prompt
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
    """Beam search for one chunk after the other; a finished prompt's beams take the next one."""

    def run(self, prompts: Sequence[Prompt]) -> dict[int, list[int]]:
        decoding = _BeamDecoding(self, prompts)
        with self.backend.autocast():
            decoding.run()
        return decoding.done

    @property
    def choose(self) -> Choose:
        return partial(best_continuations, self.vocabulary, 1 + len(self.ends), self.scored)


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


class _BeamDecoding(ChunkDecoding):
    """A group of rows a prompt."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Prompt]) -> None:
        self.beams = decoder.decoding.num_beams
        # Each device holds whole groups of beams.
        per_device = max(1, decoder.plan.batch_size // (self.beams * decoder.devices))
        self.groups: list[Group | None] = [None] * (per_device * decoder.devices)
        super().__init__(decoder, prompts, len(self.groups) * self.beams)

    def run(self) -> None:
        while self.waiting or any(self.groups):
            while self.waiting and not all(self.groups):
                self._fill()
            self.groups = [self.groups[number] for number in self.tighten(self.owners)]
            if any(self.groups):
                self._decode()

    def _fill(self) -> None:
        """The next prompts, as many as are prefilled together."""
        free = self.next_places(self.owners)
        rows = [self.rows_of(g) if g is not None else () for g in free]
        taken, fresh = self.next_prompts(rows), []
        scores = np.full((len(free), self.beams), IMPOSSIBLE, np.float32)
        for place, (prompt, number) in enumerate(zip(taken, free, strict=True)):
            if prompt and number is not None:
                self.groups[number] = group = Group(prompt, self.beams, self.decoder.ends)
                scores[place] = group.scores
                fresh.append((place, number))
        best = self._read(self.prefill(taken, rows, scores))
        order = np.arange(self.batch.shape.rows)
        for place, number in fresh:
            self._advance(number, [part[place] for part in best], order)
        self._reorder(order)

    @property
    def owners(self) -> list[Prompt | None]:
        return [group.prompt if group else None for group in self.groups]

    def _decode(self) -> None:
        backend = self.decoder.backend
        tokens = torch.from_numpy(self.tokens.copy()).to(backend.device)
        scores = np.full((len(self.groups), self.beams), IMPOSSIBLE, np.float32)
        for number, group in enumerate(self.groups):
            if group:
                scores[number] = group.scores
        best = self._read(self.batch.decode(tokens, scores))
        order = np.arange(self.batch.shape.rows)
        for number, group in enumerate(self.groups):
            if group:
                self._advance(number, [part[number] for part in best], order)
        self._reorder(order)

    def _reorder(self, order: Array) -> None:
        # The beams of a prompt share its keys and values: they differ in what they generated.
        self.batch.reorder(order, max((len(g.sequences[0]) for g in self.groups if g), default=0))

    def _read(self, best: Sequence[Tensor]) -> list[Array]:
        """Scores, origins and tokens of each group's best continuations."""
        backend = self.decoder.backend
        backend.finish()
        host = backend.to_host({str(number): part for number, part in enumerate(best)})
        return [part.numpy() for part in host.values()]

    def _advance(self, number: int, best: list[Array], order: Array) -> None:
        group = self.groups[number]
        assert group is not None
        limit = self.decoder.most_new_tokens(group.prompt)
        scores, origins, tokens = best
        going_on = group.advance(scores, origins, tokens, limit, self.decoding)
        if going_on is None:
            self.done[group.prompt.row] = group.best()
            self.groups[number] = None
            self.batch.release(self.rows_of(number))
            return
        rows = self.rows_of(number)
        order[rows.start : rows.stop] = [rows.start + origin for origin in going_on[0]]
        self.tokens[rows.start : rows.stop] = going_on[1]
