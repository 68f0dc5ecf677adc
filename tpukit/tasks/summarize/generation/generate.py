"""Batched generation: prompts by length, a finished row's slot takes the next prompt.

Prompts are sorted by length and cut into chunks; the plan is a function of the prompts alone, and a
row's draws of (seed, row). A chunk starts with empty slots, so its tokens are the same whenever it
is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Backend
from tpukit.tasks.summarize.data.buckets import choose_lengths
from tpukit.tasks.summarize.generation.slots import Slots, SlotShape
from tpukit.tasks.summarize.model.gpt2 import GPT2

Array = np.ndarray[Any, Any]
COLUMN_STEP = 32
PREFILL_LENGTHS = 8
"""Different lengths of a prefill: each is a graph of its own where graphs are compiled."""
WORTH_TIGHTENING = 0.75
"""The cache is copied into a smaller one once so much of it is enough."""
CHUNK_OF_SLOTS = 8
"""Prompts a chunk, in slots: more waste less at a chunk's end, fewer lose less when killed."""


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen; named as in transformers."""

    max_new_tokens: int = 100
    """Most tokens of a summary."""
    do_sample: bool = False
    """Draw tokens instead of taking the likeliest."""
    temperature: float = 1.0
    """Under 1 sharpens, over 1 flattens what is drawn from."""
    top_k: int = 50
    """Draw among so many likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability."""
    num_beams: int = 1
    """Beams of a beam search."""
    length_penalty: float = 1.0
    """Beam scores are divided by length to this power."""
    early_stopping: bool = False
    """End a beam search with its first complete set of beams."""
    seed: int = 0
    """Seeds the draws."""

    def check(self) -> None:
        """Raises `ConfigError` for values that make no sense."""
        problems = []
        if self.max_new_tokens < 1:
            problems.append(f"--max-new-tokens is {self.max_new_tokens}")
        if self.temperature <= 0:
            problems.append(f"--temperature is {self.temperature}")
        if not 0 < self.top_p <= 1:
            problems.append(f"--top-p is {self.top_p}")
        if self.top_k < 0 or self.num_beams < 1:
            problems.append(f"--top-k is {self.top_k}, --num-beams {self.num_beams}")
        if self.do_sample and self.num_beams > 1:
            problems.append("--do-sample and --num-beams are both given")
        if problems:
            raise ConfigError(
                f"{'; '.join(problems)}.",
                "Temperature and token counts are positive, top-p lies in (0, 1], and beams are"
                " not drawn.",
            )


@dataclass(frozen=True)
class Prompt:
    """A prompt and the row it belongs to, which keys its draws."""

    row: int
    tokens: Array


class Generator(Protocol):
    """Decodes one chunk of prompts."""

    def run(self, prompts: Sequence[Prompt]) -> dict[int, list[int]]:
        """New tokens of each prompt by row, the end token included where it was reached."""
        ...


@dataclass(frozen=True)
class GenerationPlan:
    """What is fixed before the first token: the chunks and every shape."""

    chunks: list[list[Prompt]]
    prefill_lengths: list[int]
    slots: int

    def prefill_length(self, longest: int) -> int:
        """The fixed length that prompts of up to `longest` tokens are prefilled at."""
        return next(length for length in self.prefill_lengths if length >= longest)

    def columns(self, prompts: Sequence[Prompt], new_tokens: int) -> int:
        """Columns of the cache for a chunk: as few different numbers as there are lengths."""
        longest = max(len(prompt.tokens) for prompt in prompts)
        needed = self.prefill_length(longest) + new_tokens
        return -(-needed // COLUMN_STEP) * COLUMN_STEP


def plan_generation(
    prompts: Sequence[Prompt], slots: int, devices: int, processes: int
) -> GenerationPlan:
    """Prompts from the longest to the shortest in chunks; slots are those of one process.

    devices: those of one process. There are enough chunks for every process to have one.
    """
    ordered = sorted(prompts, key=lambda prompt: (-len(prompt.tokens), prompt.row))
    lengths = np.array([len(prompt.tokens) for prompt in ordered])
    slots = -(-min(slots, -(-len(ordered) // processes)) // devices) * devices
    size = max(min(CHUNK_OF_SLOTS * slots, -(-len(ordered) // processes)), 1)
    chunks = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return GenerationPlan(
        chunks, choose_lengths(lengths, PREFILL_LENGTHS, int(lengths.max())), slots
    )


@dataclass(frozen=True)
class Decoder:
    """What decoding takes, whatever the way: greedy, drawn or by beams."""

    model: GPT2
    backend: Backend
    plan: GenerationPlan
    decoding: Decoding
    vocabulary: int
    """Tokens that may be chosen; a model may have more, to fill its matrices up."""
    end: int
    """The end token."""

    @property
    def devices(self) -> int:
        """Devices of this process."""
        return self.backend.devices // self.backend.world_size

    @property
    def steps_a_read(self) -> int:
        # Reading a token stops a traced device: there, several steps go out before a read.
        return 4 if self.backend.fixed_shapes else 1

    def most_new_tokens(self, prompt: Prompt) -> int:
        """New tokens until the limit or the end of the context."""
        room = self.model.config.block_size - len(prompt.tokens)
        return min(self.decoding.max_new_tokens, room)


class ChunkDecoding:
    """The state of one chunk: prompts that wait, the slots, and what is done."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Prompt], slots: int) -> None:
        self.decoder = decoder
        self.decoding = decoder.decoding
        most = decoder.decoding.max_new_tokens + decoder.steps_a_read
        shape = SlotShape(slots, decoder.plan.columns(prompts, most), decoder.devices)
        self.slots = Slots(decoder.model, decoder.backend, shape)
        self.waiting = list(reversed(prompts))
        self.tokens = np.zeros(slots, np.int64)
        """The token each slot is fed next."""
        self.done: dict[int, list[int]] = {}

    def take_in(self, free: Sequence[Sequence[int]]) -> tuple[list[Prompt | None], Tensor]:
        """Prefills a waiting prompt on each device that has room: into all of `free[device]`.

        Returns the prompt that each device took, and its logits, (devices, vocabulary).
        """
        filler = self.waiting[-1].tokens
        taken = [self.waiting.pop() if slots and self.waiting else None for slots in free]
        tokens = [prompt.tokens if prompt else filler for prompt in taken]
        places = [slots if prompt else () for prompt, slots in zip(taken, free, strict=True)]
        length = max(map(len, tokens))
        if self.decoder.backend.fixed_shapes:
            length = self.decoder.plan.prefill_length(length)
        return taken, self.slots.prefill(tokens, places, length)


class SlotGenerator(Decoder):
    """Greedy decoding and sampling."""

    def run(self, prompts: Sequence[Prompt]) -> dict[int, list[int]]:
        decoding = _SlotDecoding(self, prompts, self.plan.slots)
        decoding.run()
        return decoding.done


class _SlotDecoding(ChunkDecoding):
    """A slot a prompt."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Prompt], slots: int) -> None:
        super().__init__(decoder, prompts, slots)
        self.owners: list[Prompt | None] = [None] * slots
        self.draws = np.zeros((slots, self.decoding.max_new_tokens), np.float32)

    def run(self) -> None:
        while self.waiting or any(self.owners):
            while self._should_fill():
                self._fill()
            self._tighten()
            if any(self.owners):
                self._decode()

    # -- taking prompts in ----------------------------------------------------------------------
    def _free_slots(self) -> list[list[int]]:
        """The free slots of each device."""
        own = self.slots.shape.slots_per_device
        return [
            [slot for slot in range(d * own, (d + 1) * own) if self.owners[slot] is None]
            for d in range(self.slots.shape.devices)
        ]

    def _should_fill(self) -> bool:
        """All devices prefill together: worth it when half of them have room, or none has work."""
        if not self.waiting:
            return False
        free = sum(bool(slots) for slots in self._free_slots())
        return 2 * free >= self.slots.shape.devices or not any(self.owners)

    def _fill(self) -> None:
        """One prompt for each device that has a free slot."""
        first_free = [slots[:1] for slots in self._free_slots()]
        taken, logits = self.take_in(first_free)
        for prompt, slots in zip(taken, first_free, strict=True):
            if prompt:
                self._occupy(slots[0], prompt)
        draws = [self.draws[slots[0], 0] if slots else 0.0 for slots in first_free]
        chosen = self._choose(logits, np.array(draws, np.float32))
        self.decoder.backend.finish()
        for prompt, slots, token in zip(taken, first_free, chosen.cpu().tolist(), strict=True):
            if prompt:
                self._take(slots[0], token)

    def _occupy(self, slot: int, prompt: Prompt) -> None:
        self.owners[slot] = prompt
        self.done[prompt.row] = []
        if self.decoding.do_sample:
            # Philox, keyed: a row's draws do not depend on its neighbours.
            rng = np.random.Generator(np.random.Philox(key=[self.decoding.seed, prompt.row]))
            self.draws[slot] = rng.random(self.decoding.max_new_tokens, np.float32)

    def _tighten(self) -> None:
        """Slots and columns that nobody will need any more go, where shapes are free to change."""
        if self.decoder.backend.fixed_shapes:
            return
        owned = [(slot, owner) for slot, owner in enumerate(self.owners) if owner]
        if not owned:
            return
        kept = range(len(self.owners)) if self.waiting else [slot for slot, _ in owned]
        prompts = [*self.waiting, *(owner for _, owner in owned)]
        columns = self.decoder.plan.columns(prompts, self.decoding.max_new_tokens)
        now = self.slots.shape
        if len(kept) * columns <= WORTH_TIGHTENING * now.slots * now.columns:
            self.slots.keep(np.array(kept), columns)
            self.owners = [self.owners[slot] for slot in kept]
            self.tokens, self.draws = self.tokens[kept], self.draws[kept]

    # -- going on -------------------------------------------------------------------------------
    def _decode(self) -> None:
        """Some steps on the device, then one read."""
        backend = self.decoder.backend
        tokens = torch.from_numpy(self.tokens.copy()).to(backend.device)
        steps = []
        for step in range(self.decoder.steps_a_read):
            tokens = self._choose(self.slots.decode(tokens), self._draws_of_step(step))
            backend.finish()
            steps.append(tokens)
        for chosen in [step.cpu().tolist() for step in steps]:
            for slot, token in enumerate(chosen):
                self._take(slot, token)

    def _draws_of_step(self, step: int) -> Array:
        counts = [len(self.done[p.row]) + step if p else 0 for p in self.owners]
        places = np.minimum(counts, self.decoding.max_new_tokens - 1)
        return self.draws[np.arange(len(counts)), places]

    def _take(self, slot: int, token: int) -> None:
        """Books a slot's new token; an ended row leaves its slot."""
        owner = self.owners[slot]
        if owner is None:
            return
        self.tokens[slot] = token
        tokens = self.done[owner.row]
        tokens.append(token)
        if token == self.decoder.end or len(tokens) >= self.decoder.most_new_tokens(owner):
            self.owners[slot] = None

    def _choose(self, logits: Tensor, draws: Array) -> Tensor:
        """The next token of each row of `logits`."""
        logits = logits[:, : self.decoder.vocabulary]
        if not self.decoding.do_sample:
            return logits.argmax(-1)
        uniform = torch.from_numpy(draws).to(logits.device)
        return sample(logits, uniform, self.decoding)


def sample(logits: Tensor, uniform: Tensor, decoding: Decoding) -> Tensor:
    """Draws a token for each row of logits (rows, vocabulary) from uniform numbers (rows,).

    Temperature, then top-k, then top-p, as transformers applies them; the draw inverts the
    cumulative distribution, so one uniform number decides one token.
    """
    count = decoding.top_k or logits.shape[-1]
    values, tokens = torch.topk(logits / decoding.temperature, min(count, logits.shape[-1]))
    probability = values.softmax(-1)
    before = probability.cumsum(-1) - probability
    kept = torch.where(before < decoding.top_p, probability, torch.zeros_like(probability))
    cumulative = kept.cumsum(-1)
    place = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1)
    last = (kept > 0).sum(-1) - 1
    return tokens.gather(1, torch.minimum(place, last)[:, None])[:, 0]
