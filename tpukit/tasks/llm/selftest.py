"""The part of `doctor --selftest` that is about generation."""

from typing import Any

import numpy as np
import torch

from tpukit.hardware.backend import Backend
from tpukit.tasks.llm.generation.decoding import Decoding, Prompt, plan_generation

VOCABULARY, LENGTH, TOKENS = 64, 8, 8


class GenerationPart:
    """Eight tokens, and no program for each."""

    seconds = 120

    def run(self, backend: Backend) -> dict[str, Any]:
        """Tokens of a small GPT-2 twice, greedy: the second time compiles nothing."""
        from tpukit.tasks.llm.generation.continuous_batching import StreamingGenerator
        from tpukit.tasks.llm.model.lean import LanguageModel
        from tpukit.tasks.llm.model.load import from_scratch, load_lm

        torch.manual_seed(0)
        lm = load_lm(from_scratch("2x2x64", VOCABULARY, LENGTH + TOKENS), torch.float32)
        model = backend.unwrap(backend.prepare(LanguageModel(lm, backend).eval(), train=False))
        assert isinstance(model, LanguageModel)
        devices = backend.devices // backend.world_size
        rng = np.random.default_rng(0)
        prompts = [Prompt(row, rng.integers(0, VOCABULARY, LENGTH)) for row in range(2 * devices)]
        plan = plan_generation(prompts, 2 * devices, devices, 1)
        # No token ends a row.
        generator = StreamingGenerator(
            model, backend, plan, Decoding(TOKENS), LENGTH + TOKENS, VOCABULARY, frozenset()
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
