"""Generation on the device: a few tokens twice, and the second time compiles nothing."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from tpukit.hardware.backend import Backend

SUMMARIES = "tpukit.tasks.summarize"
VOCABULARY, LENGTH, TOKENS = 64, 8, 8


def generate_twice(backend: Backend) -> dict[str, Any]:
    """The answer of the self-test's part: two prompts a device, greedy."""
    decoding, streaming, decoder = (
        importlib.import_module(f"{SUMMARIES}.{name}")
        for name in ("generation.decoding", "generation.continuous_batching", "model.decoder")
    )
    torch.manual_seed(0)
    config = decoder.DecoderConfig(2, 2, 64, VOCABULARY, LENGTH + TOKENS)
    model = backend.prepare(decoder.LanguageModel(config, backend).eval(), train=False)
    devices = backend.devices // backend.world_size
    rng = np.random.default_rng(0)
    prompts = [decoding.Prompt(row, rng.integers(0, VOCABULARY, LENGTH))
               for row in range(2 * devices)]  # fmt: skip
    plan = decoding.plan_generation(prompts, 2 * devices, devices, 1)
    # No token ends a row.
    generator = streaming.StreamingGenerator(
        backend.unwrap(model), backend, plan, decoding.Decoding(TOKENS), VOCABULARY, VOCABULARY
    )
    counts, found = [backend.compilations()], []
    for _ in range(2):
        found.append({n: t for chunk in plan.chunks for n, t in generator.run(chunk).items()})
        counts.append(backend.compilations())
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    text = f"{TOKENS} tokens of {len(prompts)} prompts: {first} compilations, then {second}"
    answer: dict[str, Any] = {"message": text, "values": {"first": first, "second": second}}
    if second or found[0] != found[1]:
        other = "" if found[0] == found[1] else "; the tokens are others the second time"
        return {**answer, "error": text + other, "fix": ""}
    return answer
