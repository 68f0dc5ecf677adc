"""Prompts to summaries: what `score`, `test` and `predict` share."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from tpukit.hardware.backend import Backend
from tpukit.hardware.collectives import uneven_passes
from tpukit.tasks.llm.data.prompt import PromptFormat
from tpukit.tasks.llm.data.rows import Row
from tpukit.tasks.llm.data.tokenizer import Tokenizer
from tpukit.tasks.llm.generation.decoding import (
    Decoding,
    GenerationPlan,
    Prompt,
    plan_generation,
)


class Summary(NamedTuple):
    """What the model wrote."""

    text: str
    is_cut_off: bool
    """Whether it has as many tokens as it may, and no end."""


def plan_prompts(
    prompts: Sequence[Prompt], backend: Backend, batch_size: int, beams: int
) -> GenerationPlan:
    """The chunks for the ranks, which share the work; batch_size: of one device."""
    devices = backend.devices // backend.world_size
    return plan_generation(prompts, batch_size * devices, devices, backend.world_size, beams)


def dialogue_prompts(
    rows: Iterable[Row], formats: PromptFormat, max_new_tokens: int
) -> list[Prompt]:
    """A prompt for each row that leaves room in the context for `max_new_tokens`."""
    room = min(max_new_tokens, formats.block_size // 2)
    return [
        Prompt(number, np.array(formats.prompt(row, room), np.int64))
        for number, row in enumerate(rows)
    ]


def generate_summaries(
    model: nn.Module,
    backend: Backend,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    formats: PromptFormat,
    batch_size: int,
) -> tuple[list[str], int]:
    """The summary of each prompt, and how many are cut off. The ranks share the work; every rank
    gets all."""
    plan = plan_prompts(prompts, backend, batch_size, decoding.num_beams)
    own = range(backend.rank, len(plan.chunks), backend.world_size)
    made = summaries_of_chunks(model, backend, plan, own, decoding, formats)
    own_summaries = {row: summary for _, chunk in made for row, summary in chunk.items()}
    parts = backend.all_gather_objects(own_summaries)
    summaries = {row: summary for part in parts for row, summary in part.items()}
    cut_off = sum(summary.is_cut_off for summary in summaries.values())
    return [summaries[prompt.row].text for prompt in prompts], cut_off


def summaries_of_chunks(
    model: nn.Module,
    backend: Backend,
    plan: GenerationPlan,
    numbers: Iterable[int],
    decoding: Decoding,
    formats: PromptFormat,
) -> Iterator[tuple[int, dict[int, Summary]]]:
    """The summaries by row of each of these chunks of the plan; `model` as `prepare` gave it, in
    eval mode.

    Every rank must exhaust it, whatever the number of its chunks.
    """
    from tpukit.tasks.llm.generation.beam import BeamGenerator
    from tpukit.tasks.llm.generation.continuous_batching import StreamingGenerator

    plain, nothing = backend.unwrap(model), torch.zeros((1, 1), dtype=torch.long)
    kind = BeamGenerator if decoding.num_beams > 1 else StreamingGenerator
    tokenizer: Tokenizer = formats.tokenizer
    sizes = (formats.block_size, tokenizer.vocabulary_size)
    generator = kind(plain, backend, plan, decoding, *sizes, tokenizer.ends)

    @torch.no_grad()
    def filler() -> None:
        (batch,) = backend.batches([{"tokens": nothing}])
        with backend.autocast():
            plain(batch["tokens"])

    with uneven_passes(backend, plain, filler):
        for number in numbers:
            tokens = generator.run(plan.chunks[number])
            yield (
                number,
                {
                    n: Summary(formats.written(t), tokenizer.ends.isdisjoint(t))
                    for n, t in tokens.items()
                },
            )
