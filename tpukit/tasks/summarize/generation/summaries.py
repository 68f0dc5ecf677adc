"""Prompts to summaries: what `score`, `test` and `predict` share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tpukit.hardware.backend import Backend
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


def generate_summaries(
    model: nn.Module,
    backend: Backend,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    tokenizer: Tokenizer,
    batch_size: int,
) -> dict[int, str]:
    """The summary of each prompt by row; every rank does the same work.

    That keeps ranks in step, which FSDP needs.
    """
    plan = plan_prompts(prompts, backend, batch_size, 1)
    generator = make_generator(model, backend, plan, decoding, tokenizer)
    made: dict[int, str] = {}
    for chunk in plan.chunks:
        for row, tokens in generator.run(chunk).items():
            made[row] = clean_summary(tokenizer.decode(tokens))
    return made


def clean_summary(text: str) -> str:
    """A summary on one line without spaces around it."""
    return " ".join(text.split())
