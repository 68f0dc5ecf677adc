"""Decoding options, and the plan of a generation: its chunks of prompts and their shapes.

Prompts are sorted by length and cut into chunks. The plan is a function of the prompts alone, and
random numbers are one of (seed, prompt): a chunk's tokens are the same whenever it is computed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tpukit.errors import ConfigError
from tpukit.io.ranges import SEED, Range, range_problems, setting

Array = np.ndarray[Any, Any]
MAX_NEW_TOKENS = 100
POSITION_STEP, LENGTH_STEP = 32, 8
PREFILL_LENGTHS = 8
"""Different lengths of a prefill: each is a graph of its own where graphs are compiled."""
BATCHES_PER_CHUNK = 8
"""Prompts of a chunk: more waste less at its end, fewer lose less when a run is killed."""

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""Options of sampling, in the order they take effect in, and what leaves the scores alone."""
BEAMS = ("length_penalty", "early_stopping")
"""Options of beam search alone."""
SAMPLING = NEUTRAL | {"top_k": 50}
"""Their values where one of them, or `do_sample`, is given."""

CHOOSING = (
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "guidance_scale", "min_length", "min_new_tokens",
    "no_repeat_ngram_size", "penalty_alpha", "sequence_bias", "stop_strings", "suppress_tokens",
)  # fmt: skip
"""Fields of a generation_config.json by which transformers chooses tokens, beside those here."""


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen; named as in transformers."""

    max_new_tokens: int | None = setting(None, Range(1, 2**20))
    """Maximum new tokens (default: the run's setting, 100 unless it was set)."""
    do_sample: bool | None = None
    """Sample instead of greedy decoding (default: where an option of sampling is given)."""
    temperature: float | None = setting(None, Range(0, 1000, whole=False, includes_low=False))
    """Sampling temperature (default: 1)."""
    top_k: int | None = setting(None, Range(0, 2**31 - 1))
    """Sample from the top K tokens (default: 50); 0: from all."""
    top_p: float | None = setting(None, Range(0, 1, whole=False, includes_low=False))
    """Nucleus probability (default: 1)."""
    min_p: float | None = setting(None, Range(0, 1, whole=False))
    """Sample from tokens with at least this part of the best one's probability (default: 0)."""
    typical_p: float | None = setting(None, Range(0, 1, whole=False, includes_low=False))
    """Locally typical probability (default: 1)."""
    repetition_penalty: float = setting(1.0, Range(0, 1000, whole=False, includes_low=False))
    """Divides positive scores of tokens that were there before, and multiplies others; not only in
    sampling."""
    num_beams: int = setting(1, Range(1, 1024))
    """Beams of beam search."""
    length_penalty: float = setting(1.0, Range(-100, 100, whole=False))
    """Beam scores are divided by length to this power."""
    early_stopping: bool = False
    """Stop at `num_beams` candidates."""
    seed: int = setting(0, SEED)
    """Seed of the sampling."""

    def __post_init__(self) -> None:
        given = any(getattr(self, name) is not None for name in SAMPLING)
        for name, default in {"do_sample": given, **SAMPLING}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        problems = range_problems(self)
        if self.do_sample and self.num_beams > 1:
            problems.append("--do-sample and --num-beams are both given.")
        if problems:
            raise ConfigError(" ".join(problems), "`tpukit predict --help` lists the options.")

    @property
    def limit(self) -> int:
        """Most new tokens of an answer."""
        return self.max_new_tokens or MAX_NEW_TOKENS

    def unlike(self, generation_config: str) -> str | None:
        """What a generation_config.json says otherwise, in a line; None where it is nothing."""
        said = {n: v for n, v in json.loads(generation_config).items() if v is not None}
        left_out = {"max_new_tokens", "seed", *(() if said.get("do_sample") else NEUTRAL),
                    *(() if said.get("num_beams", 1) > 1 else BEAMS)}  # fmt: skip
        own = {f.name for f in fields(self)} - left_out
        others = [n for n in said if n in own and said[n] != getattr(self, n)]
        lost = [n for n in said if n in CHOOSING and said[n] not in (0, 1, [], {})]
        if not others + lost:
            return None
        named = ", ".join(f"{name}={said[name]}" for name in others + lost)
        options = [f"--{n.replace('_', '-')} {said[n]}".removesuffix(" True") for n in others]
        hint = f" Options of `predict`: {' '.join(options)}." if options else ""
        return f"generation_config.json of the weights is not followed: {named}.{hint}"

    def processors(self) -> Any:
        """transformers' processors of scores, in the order of its `generate`: a list to call with
        the tokens before (rows, length) and their scores (rows, vocabulary)."""
        from transformers.generation import logits_process as theirs

        made: Any = theirs.LogitsProcessorList()
        if self.repetition_penalty != 1:
            made.append(theirs.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        kinds = (
            theirs.TemperatureLogitsWarper, theirs.TopKLogitsWarper, theirs.TopPLogitsWarper,
            theirs.MinPLogitsWarper, theirs.TypicalLogitsWarper,
        )  # fmt: skip
        for (name, neutral), kind in zip(NEUTRAL.items(), kinds, strict=True):
            if self.do_sample and (value := getattr(self, name)) != neutral:
                made.append(kind(value))
        return made


@dataclass(frozen=True)
class Prompt:
    """A prompt and the row it belongs to, which keys its draws."""

    row: int
    tokens: Array


@dataclass(frozen=True)
class GenerationPlan:
    """What is fixed before the first token: the chunks and every shape."""

    chunks: list[list[Prompt]]
    prefill_lengths: list[int]
    batch_size: int
    """Rows that a rank decodes side by side."""

    def prefill_length(self, longest: int) -> int:
        """The fixed length that prompts of up to `longest` tokens are prefilled at."""
        return next(length for length in self.prefill_lengths if length >= longest)

    def cache_positions(self, prompts: Sequence[Prompt], new_tokens: int) -> int:
        """Positions of the KV cache for a chunk: as few different numbers as there are lengths."""
        longest = max(len(prompt.tokens) for prompt in prompts)
        needed = self.prefill_length(longest) + new_tokens
        return -(-needed // POSITION_STEP) * POSITION_STEP


def plan_generation(
    prompts: Sequence[Prompt], batch_size: int, devices: int, ranks: int, beams: int = 1
) -> GenerationPlan:
    """Prompts from the longest to the shortest, in chunks of which every rank has one at least.

    batch_size (rows; a prompt takes one for each beam), devices: of one rank.
    """
    ordered = sorted(prompts, key=lambda prompt: (-len(prompt.tokens), prompt.row))
    lengths = np.array([len(prompt.tokens) for prompt in ordered])
    batch_size = -(-min(batch_size, -(-len(ordered) // ranks) * beams) // devices) * devices
    size = max(min(BATCHES_PER_CHUNK * batch_size, -(-len(ordered) // ranks)), 1)
    chunks = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    # As many prompts for each of the lengths of a prefill.
    parts = np.arange(1, PREFILL_LENGTHS + 1) / PREFILL_LENGTHS
    longest = -(-np.quantile(lengths, parts, method="higher") // LENGTH_STEP) * LENGTH_STEP
    prefill_lengths = np.unique(np.minimum(longest, lengths.max())).astype(int).tolist()
    return GenerationPlan(chunks, prefill_lengths, batch_size)
