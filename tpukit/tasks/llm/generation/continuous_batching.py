"""Continuous batching: a row whose summary is finished takes the next prompt."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Backend
from tpukit.tasks.llm.generation.batch_decoder import (
    BatchDecoder,
    CacheShape,
    Choose,
    Stored,
    stored,
)
from tpukit.tasks.llm.generation.decoding import Decoding, GenerationPlan, Prompt

Array = np.ndarray[Any, Any]
PREFILL_TOKENS = 1024
"""Maximum tokens of prompts that are prefilled together, where shapes are free."""
WORTH_TIGHTENING = 0.75
"""The cache is copied into a smaller one once so much of it is enough."""


@dataclass(frozen=True)
class Decoder:
    """What every way of decoding takes: greedy, sampling and beam search."""

    model: nn.Module
    backend: Backend
    plan: GenerationPlan
    decoding: Decoding
    block_size: int
    """Positions that the model knows."""
    vocabulary: int
    """Tokens that may be chosen; a model may have more, to fill its matrices up."""
    ends: frozenset[int]
    """The tokens that end an answer."""
    kept: list[BatchDecoder] = field(default_factory=list)
    """The last chunk's cache, of which the next one's programs are, where it has its shape."""

    @property
    def choose(self) -> Choose:
        """How the next tokens are chosen."""
        raise NotImplementedError

    def batch_decoder(self, shape: CacheShape) -> BatchDecoder:
        """A cache of this shape without prompts."""
        if not self.kept or self.kept[0].shape != shape:
            self.kept.clear()
            decoder = BatchDecoder(
                self.model, self.backend, shape, self.stored, self.choose,
                block_size=self.block_size, keeps_tokens=self.decoding.repetition_penalty != 1,
            )  # fmt: skip
            self.kept.append(decoder)
        self.kept[0].restart()
        return self.kept[0]

    @cached_property
    def stored(self) -> list[Stored]:
        """What a cache of this model holds."""
        return stored(self.model, self.backend, self.devices)

    @cached_property
    def scored(self) -> Callable[[Tensor | None, Tensor], Tensor]:
        """Scores of the vocabulary as transformers' processors leave them, of the tokens before
        them."""
        processors: Callable[[Tensor | None, Tensor], Tensor] = self.decoding.processors()
        return processors

    @property
    def devices(self) -> int:
        """Devices of this rank."""
        return self.backend.devices // self.backend.world_size

    @property
    def steps_a_read(self) -> int:
        # Reading a token executes the lazy graph: there, several steps are queued before a read.
        return 4 if self.backend.compiles_everything else 1

    def most_new_tokens(self, prompt: Prompt) -> int:
        """New tokens until the limit or the end of the context."""
        room = self.block_size - len(prompt.tokens)
        return min(self.decoding.limit, room)


Owners = Sequence[Prompt | None]
"""The prompt of each place; None where it is free."""


class ChunkDecoding:
    """The state of one chunk: waiting prompts, the places of those that are decoded, finished
    tokens. A place is a row of the cache, or the rows of a prompt's beams."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Prompt], rows: int) -> None:
        self.decoder = decoder
        self.decoding = decoder.decoding
        shape = CacheShape(rows, self.cache_positions(prompts), decoder.devices)
        self.batch = decoder.batch_decoder(shape)
        self.waiting = list(reversed(prompts))
        self.tokens = np.zeros(rows, np.int64)
        """The token each row is fed next."""
        self.done: dict[int, list[int]] = {}

    def cache_positions(self, prompts: Sequence[Prompt]) -> int:
        """Positions of a KV cache that holds these prompts and what follows them."""
        new_tokens = self.decoding.limit + self.decoder.steps_a_read
        return self.decoder.plan.cache_positions(prompts, new_tokens)

    def rows_of(self, place: int) -> range:
        count = self.decoding.num_beams
        return range(place * count, (place + 1) * count)

    def free_places(self, owners: Owners) -> list[list[int]]:
        """Those of each device."""
        own = len(owners) // self.batch.shape.devices
        return [
            [place for place in range(start, start + own) if owners[place] is None]
            for start in range(0, len(owners), own)
        ]

    def next_places(self, owners: Owners) -> list[int | None]:
        """The places that the next prompts take; None for a device that has none."""
        free = self.free_places(owners)
        if not self.batch.packs:
            return [next(iter(own), None) for own in free]
        tokens = itertools.accumulate(len(prompt.tokens) for prompt in reversed(self.waiting))
        return list(free[0][: max(1, sum(count <= PREFILL_TOKENS for count in tokens))])

    def tighten(self, owners: Owners) -> list[int]:
        """Drops places and positions that no prompt needs any more, where shapes may change;
        returns the places that are left."""
        owned = [place for place, owner in enumerate(owners) if owner]
        kept = list(range(len(owners))) if self.waiting or not owned else owned
        prompts = [*self.waiting, *filter(None, owners)]
        if not self.batch.packs or not prompts:
            return list(range(len(owners)))
        rows = np.array([row for place in kept for row in self.rows_of(place)])
        now, positions = self.batch.shape, self.cache_positions(prompts)
        if len(rows) * positions > WORTH_TIGHTENING * now.rows * now.positions:
            return list(range(len(owners)))
        self.batch.keep(rows, positions)
        self.tokens = self.tokens[rows]
        return kept

    def next_prompts(self, rows: Sequence[Sequence[int]]) -> list[Prompt | None]:
        """The waiting prompt that each place takes which has rows."""
        return [self.waiting.pop() if own and self.waiting else None for own in rows]

    def prefill(
        self, taken: Sequence[Prompt | None], rows: Sequence[Sequence[int]], given: Array | None
    ) -> Any:
        """Puts the prompt of each place into all of its rows; returns the choice that follows."""
        filler = next(filter(None, taken)).tokens
        tokens = [prompt.tokens if prompt else filler for prompt in taken]
        into = [own if prompt else () for prompt, own in zip(taken, rows, strict=True)]
        length = (sum if self.batch.packs else max)(map(len, tokens))
        if self.decoder.backend.compiles_everything:
            length = self.decoder.plan.prefill_length(length)
        return self.batch.prefill(tokens, into, length, given)


class StreamingGenerator(Decoder):
    """Greedy decoding and sampling."""

    def run(self, prompts: Sequence[Prompt]) -> dict[int, list[int]]:
        decoding = _StreamingDecoding(self, prompts, self.plan.batch_size)
        with self.backend.autocast():
            decoding.run()
        return decoding.done

    @property
    def choose(self) -> Choose:
        return partial(next_tokens, self.vocabulary, self.decoding.top_k, self.scored)


def next_tokens(
    vocabulary: int,
    most: int | None,
    scored: Callable[[Tensor | None, Tensor], Tensor],
    logits: Tensor,
    before: Tensor | None,
    uniform: Tensor | None,
) -> Tensor:
    """The next token of each row of logits: the best one, or one by a uniform number."""
    scores = scored(before, logits[:, :vocabulary])
    return scores.argmax(-1) if uniform is None else sample_tokens(scores, uniform, most)


class _StreamingDecoding(ChunkDecoding):
    """A row a prompt."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Prompt], rows: int) -> None:
        super().__init__(decoder, prompts, rows)
        self.owners: list[Prompt | None] = [None] * rows
        self.draws = np.zeros((rows, self.decoding.limit), np.float32)

    def run(self) -> None:
        while self.waiting or any(self.owners):
            while self._should_fill():
                self._fill()
            kept = self.tighten(self.owners)
            self.owners, self.draws = [self.owners[row] for row in kept], self.draws[kept]
            if any(self.owners):
                self._decode()

    # -- taking prompts in ------------------------------------------------------------------------
    def _should_fill(self) -> bool:
        """All devices prefill together: worth it when half of them have room, or none has work."""
        if not self.waiting:
            return False
        free = sum(bool(rows) for rows in self.free_places(self.owners))
        return 2 * free >= self.batch.shape.devices or not any(self.owners)

    def _fill(self) -> None:
        """The next prompts, as many as are prefilled together."""
        places = self.next_places(self.owners)
        rows = [() if row is None else (row,) for row in places]
        taken = self.next_prompts(rows)
        for prompt, row in zip(taken, places, strict=True):
            if prompt and row is not None:
                self._occupy(row, prompt)
        draws = [0.0 if row is None else self.draws[row, 0] for row in places]
        chosen = self.prefill(taken, rows, self._given(np.array(draws, np.float32)))
        self.decoder.backend.finish()
        (tokens,) = self._read([chosen])
        for prompt, row, token in zip(taken, places, tokens, strict=True):
            if prompt and row is not None:
                self._take(row, token)

    def _occupy(self, row: int, prompt: Prompt) -> None:
        self.owners[row] = prompt
        self.done[prompt.row] = []
        if self.decoding.do_sample:
            # Philox, keyed: a row's draws do not depend on its neighbours.
            rng = np.random.Generator(np.random.Philox(key=[self.decoding.seed, prompt.row]))
            self.draws[row] = rng.random(self.decoding.limit, np.float32)

    # -- going on ---------------------------------------------------------------------------------
    def _decode(self) -> None:
        """Some steps on the device, then one read."""
        backend = self.decoder.backend
        # Laid out over the devices as a step's result is: both are fed to one program.
        (batch,) = backend.batches([{"tokens": torch.from_numpy(self.tokens.copy())}])
        tokens = batch["tokens"]
        steps = []
        for step in range(self.decoder.steps_a_read):
            tokens = self.batch.decode(tokens, self._given(self._draws_of_step(step)))
            backend.finish()
            steps.append(tokens)
        for chosen in self._read(steps):
            for row, token in enumerate(chosen):
                self._take(row, token)

    def _read(self, steps: Sequence[Tensor]) -> list[list[int]]:
        backend = self.decoder.backend
        host = backend.to_host({str(number): tokens for number, tokens in enumerate(steps)})
        return [tokens.tolist() for tokens in host.values()]

    def _draws_of_step(self, step: int) -> Array:
        counts = [len(self.done[p.row]) + step if p else 0 for p in self.owners]
        places = np.minimum(counts, self.decoding.limit - 1)
        return self.draws[np.arange(len(counts)), places]

    def _take(self, row: int, token: int) -> None:
        """Books a row's new token; an ended row leaves its row."""
        owner = self.owners[row]
        if owner is None:
            return
        self.tokens[row] = token
        tokens = self.done[owner.row]
        tokens.append(token)
        if token in self.decoder.ends or len(tokens) >= self.decoder.most_new_tokens(owner):
            self.owners[row] = None
            self.batch.release([row])

    def _given(self, draws: Array) -> Array | None:
        return draws if self.decoding.do_sample else None


def sample_tokens(scores: Tensor, uniform: Tensor, most: int | None) -> Tensor:
    """Samples a token for each row of scores (rows, vocabulary) from uniform numbers (rows,).

    The draw inverts the cumulative distribution over the `most` best tokens, or over all, the best
    first, so one uniform number decides one token.
    """
    values, tokens = torch.topk(scores, min(most or scores.shape[-1], scores.shape[-1]))
    probability = values.softmax(-1)
    cumulative = probability.cumsum(-1)
    place = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1)
    last = (probability > 0).sum(-1) - 1
    return tokens.gather(1, torch.minimum(place, last)[:, None])[:, 0]
