"""Continuous batching: a row whose summary is finished takes the next prompt."""

import itertools
from collections.abc import Callable, Sequence
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


class Decoder:
    """What greedy decoding, sampling and beam search share: one chunk of prompts after the other.

    A prompt takes a place: a row of the cache, or the rows of its beams.
    """

    batch: BatchDecoder
    """The cache; the next chunk's too, where that has its shape: its programs are the same."""
    waiting: list[Prompt]
    owners: list[Prompt | None]
    """The prompt of each place; None where it is free."""
    tokens: Array
    """The token each row is fed next."""
    done: dict[int, list[int]]

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        plan: GenerationPlan,
        decoding: Decoding,
        block_size: int,
        vocabulary: int,
        ends: frozenset[int],
    ) -> None:
        """block_size: positions that the model knows. vocabulary: tokens that may be chosen; a
        model may have more, to fill its matrices up. ends: the tokens that end an answer."""
        self.model = model
        self.backend = backend
        self.plan = plan
        self.decoding = decoding
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.ends = ends
        self.scored: Callable[[Tensor | None, Tensor], Tensor] = decoding.processors()
        self.devices = backend.devices // backend.world_size

    # -- a way of decoding ------------------------------------------------------------------------
    steps_a_read = 1
    """Steps that are queued before their tokens are read."""

    @property
    def choose(self) -> Choose:
        """How the next tokens are chosen."""
        raise NotImplementedError

    def start(self, prompt: Prompt) -> None:
        """A prompt has a place now."""
        raise NotImplementedError

    def given(self, places: Sequence[int | None], step: int) -> Array | None:
        """What the choice takes beside the logits for each of these places, `step` steps on."""
        raise NotImplementedError

    def take(self, chosen: Sequence[Array], places: Sequence[int | None]) -> None:
        """Books what was chosen for each of these places; an answer that ended leaves its own."""
        raise NotImplementedError

    # -- a chunk ----------------------------------------------------------------------------------
    def run(self, prompts: Sequence[Prompt]) -> dict[int, list[int]]:
        """The new tokens of each prompt, by its row."""
        self._begin(prompts)
        with self.backend.autocast():
            while self.waiting or any(self.owners):
                while self._should_fill():
                    self._fill()
                self._tighten()
                if any(self.owners):
                    self._decode()
        return self.done

    def _begin(self, prompts: Sequence[Prompt]) -> None:
        """Free places, in a cache without prompts."""
        # Each device holds the rows of whole places.
        per_device = max(1, self.plan.batch_size // (self.decoding.num_beams * self.devices))
        self.owners = [None] * (per_device * self.devices)
        rows = len(self.owners) * self.decoding.num_beams
        self.waiting, self.done = list(reversed(prompts)), {}
        self.tokens = np.zeros(rows, np.int64)
        shape = CacheShape(rows, self._cache_positions(prompts), self.devices)
        if "batch" not in vars(self) or self.batch.shape != shape:
            vars(self).pop("batch", None)
            self.batch = BatchDecoder(
                self.model, self.backend, shape, self._stored, self.choose,
                block_size=self.block_size, keeps_tokens=self.decoding.repetition_penalty != 1,
            )  # fmt: skip
        self.batch.restart()

    @cached_property
    def _stored(self) -> list[Stored]:
        """What a cache of this model holds."""
        return stored(self.model, self.backend, self.devices)

    def _cache_positions(self, prompts: Sequence[Prompt]) -> int:
        """Positions of a KV cache that holds these prompts and what follows them."""
        return self.plan.cache_positions(prompts, self.decoding.limit + self.steps_a_read)

    def most_new_tokens(self, prompt: Prompt) -> int:
        """New tokens until the limit or the end of the context."""
        return min(self.decoding.limit, self.block_size - len(prompt.tokens))

    def rows_of(self, place: int) -> range:
        count = self.decoding.num_beams
        return range(place * count, (place + 1) * count)

    def release(self, place: int) -> None:
        """A place is free again."""
        self.owners[place] = None
        self.batch.release(self.rows_of(place))

    # -- taking prompts in ------------------------------------------------------------------------
    def _free_places(self) -> list[list[int]]:
        """Those of each device."""
        own = len(self.owners) // self.devices
        return [
            [place for place in range(start, start + own) if self.owners[place] is None]
            for start in range(0, len(self.owners), own)
        ]

    def _should_fill(self) -> bool:
        """All devices prefill together: worth it when half of them have room, or none has work."""
        free = sum(bool(places) for places in self._free_places())
        return bool(self.waiting) and (2 * free >= self.devices or not any(self.owners))

    def _next_places(self) -> list[int | None]:
        """The places that the next prompts take; None for a device that has none."""
        free = self._free_places()
        if self.batch.packs:
            tokens = itertools.accumulate(len(prompt.tokens) for prompt in reversed(self.waiting))
            return list(free[0][: max(1, sum(count <= PREFILL_TOKENS for count in tokens))])
        places: list[int | None] = [next(iter(own), None) for own in free]
        taking = [place for place in places if place is not None][: len(self.waiting)]
        return [place if place in taking else None for place in places]

    def _fill(self) -> None:
        """Puts the next prompts, as many as are prefilled together, into all rows of places."""
        places = self._next_places()
        for place in places:
            if place is not None:
                self.owners[place] = prompt = self.waiting.pop()
                self.start(prompt)
        owners = [None if place is None else self.owners[place] for place in places]
        filler = next(filter(None, owners)).tokens
        tokens = [owner.tokens if owner else filler for owner in owners]
        length = (sum if self.batch.packs else max)(map(len, tokens))
        if self.backend.compiles_everything:
            length = self.plan.prefill_length(length)
        rows = [() if place is None else self.rows_of(place) for place in places]
        made = self.batch.prefill(tokens, rows, length, self.given(places, 0))
        self.backend.finish()
        [chosen] = self._read([made])
        self.take(chosen, places)

    # -- going on ---------------------------------------------------------------------------------
    def _tighten(self) -> None:
        """Drops places and positions that no prompt needs any more, where shapes may change."""
        owned = [place for place, owner in enumerate(self.owners) if owner]
        kept = list(range(len(self.owners))) if self.waiting or not owned else owned
        prompts = [*self.waiting, *filter(None, self.owners)]
        if not self.batch.packs or not prompts:
            return
        rows = np.array([row for place in kept for row in self.rows_of(place)])
        now, positions = self.batch.shape, self._cache_positions(prompts)
        if len(rows) * positions <= WORTH_TIGHTENING * now.rows * now.positions:
            self.batch.keep(rows, positions)
            self.tokens = self.tokens[rows]
            self.owners = [self.owners[place] for place in kept]

    def _decode(self) -> None:
        """Some steps on the device, then one read."""
        places = range(len(self.owners))
        # Laid out over the devices as a step's result is: both are fed to one program.
        (batch,) = self.backend.batches([{"tokens": torch.from_numpy(self.tokens.copy())}])
        steps: list[Any] = [batch["tokens"]]
        for step in range(self.steps_a_read):
            steps.append(self.batch.decode(steps[-1], self.given(places, step)))
            self.backend.finish()
        for chosen in self._read(steps[1:]):
            self.take(chosen, places)

    def _read(self, steps: Sequence[Any]) -> list[list[Array]]:
        """What was chosen in each of some steps: a tensor or several."""
        parts = [step if isinstance(step, tuple) else (step,) for step in steps]
        named = {str(n): part for n, part in enumerate(itertools.chain(*parts))}
        host = iter(self.backend.to_host(named).values())
        return [[next(host).numpy() for _ in part] for part in parts]


class StreamingGenerator(Decoder):
    """Greedy decoding and sampling: a row a prompt."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Reading a token executes the lazy graph there.
        self.steps_a_read = 4 if self.backend.compiles_everything else 1
        self._draws: dict[int, Array] = {}

    @property
    def choose(self) -> Choose:
        return partial(next_tokens, self.vocabulary, self.decoding.top_k, self.scored)

    def start(self, prompt: Prompt) -> None:
        self.done[prompt.row] = []
        if self.decoding.do_sample:
            # Philox, keyed: a row's draws do not depend on its neighbours.
            rng = np.random.Generator(np.random.Philox(key=[self.decoding.seed, prompt.row]))
            self._draws[prompt.row] = rng.random(self.decoding.limit, np.float32)

    def given(self, places: Sequence[int | None], step: int) -> Array | None:
        """Uniform numbers."""
        if not self.decoding.do_sample:
            return None
        draws = np.zeros(len(places), np.float32)
        for index, place in enumerate(places):
            if place is not None and (owner := self.owners[place]):
                at = min(len(self.done[owner.row]) + step, self.decoding.limit - 1)
                draws[index] = self._draws[owner.row][at]
        return draws

    def take(self, chosen: Sequence[Array], places: Sequence[int | None]) -> None:
        for token, place in zip(chosen[0].tolist(), places, strict=True):
            if place is None or (owner := self.owners[place]) is None:
                continue
            self.tokens[place] = token
            tokens = self.done[owner.row]
            tokens.append(token)
            if token in self.ends or len(tokens) >= self.most_new_tokens(owner):
                self.release(place)


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
