"""Prompts to summaries: what `score`, `test` and `predict` share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import nn

from tpukit.hardware.backend import Backend
from tpukit.tasks.summarize.data.prompt import PromptFormat
from tpukit.tasks.summarize.data.tokenizer import Tokenizer
from tpukit.tasks.summarize.generation.beam import BeamGenerator
from tpukit.tasks.summarize.generation.continuous_batching import StreamingGenerator
from tpukit.tasks.summarize.generation.decoding import (
    Decoding,
    GenerationPlan,
    Generator,
    Prompt,
    plan_generation,
)
from tpukit.tasks.summarize.model.gpt2 import GPT2


def plan_prompts(
    prompts: Sequence[Prompt], backend: Backend, batch_size: int, ranks: int
) -> GenerationPlan:
    """The chunks for `ranks` ranks that share the work; batch_size: of one device."""
    devices = backend.devices // backend.world_size
    return plan_generation(prompts, batch_size * devices, devices, ranks)


def make_generator(
    model: nn.Module,
    backend: Backend,
    plan: GenerationPlan,
    decoding: Decoding,
    tokenizer: Tokenizer,
) -> Generator:
    """The generator these decoding options ask for; `model` as `prepare` gave it, in eval mode."""
    plain = backend.unwrap(model)
    assert isinstance(plain, GPT2)
    kind = BeamGenerator if decoding.num_beams > 1 else StreamingGenerator
    return kind(plain, backend, plan, decoding, tokenizer.vocabulary_size, tokenizer.end)


def dialogue_prompts(
    dialogues: Iterable[str], tokenizer: Tokenizer, block_size: int, max_new_tokens: int
) -> list[Prompt]:
    """A prompt for each dialogue that leaves room in the context for `max_new_tokens`."""
    formats = PromptFormat(tokenizer, block_size)
    room = min(max_new_tokens, block_size // 2)
    return [
        Prompt(number, np.array(formats.prompt(dialogue, room), np.int64))
        for number, dialogue in enumerate(dialogues)
    ]


def generate_summaries(
    model: nn.Module,
    backend: Backend,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    tokenizer: Tokenizer,
    batch_size: int,
    *,
    share: bool,
) -> list[str]:
    """The summary of each prompt; every rank gets all.

    share: the ranks share the work. Without it every rank does the same work and stays in step
    with the others, which FSDP needs.
    """
    ranks = backend.world_size if share else 1
    plan = plan_prompts(prompts, backend, batch_size, ranks)
    generator = make_generator(model, backend, plan, decoding, tokenizer)
    texts = {
        row: clean_summary(tokenizer.decode(tokens))
        for chunk in plan.chunks[backend.rank % ranks :: ranks]
        for row, tokens in generator.run(chunk).items()
    }
    if share:
        parts = backend.all_gather_objects(texts)
        texts = {row: text for part in parts for row, text in part.items()}
    return [texts[prompt.row] for prompt in prompts]


def clean_summary(text: str) -> str:
    """A summary on one line without spaces around it."""
    return " ".join(text.split())
