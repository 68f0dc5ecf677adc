"""Generation on a CPU: tpukit's slots against transformers' `generate`, the same tokens.

GPT-2 124M, or a model of Qwen3's shape (--model qwen3), in fp32, random weights made lively,
prompts with lengths like SAMSum's; answers end at lengths between 1 and 80, as summaries there do.
Greedy, and with a beam search. transformers gets its prompts sorted by length and the best of
several batch sizes and of its caches, tpukit the best of several numbers of slots. Both sides run
in the same process; at their best settings they run in turn, and the ratio is the median of these
rounds.

    python benchmarks/summarize_generation.py --out benchmarks/results/summarize_generation.json
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ["USE_TORCH_XLA"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from recorded import table, write_result
from summarize_models import END, MODELS, VOCABULARY, make_transformers

from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend
from tpukit.tasks.llm.generation.beam import BeamGenerator
from tpukit.tasks.llm.generation.continuous_batching import StreamingGenerator
from tpukit.tasks.llm.generation.decoding import Decoding, Prompt, plan_generation
from tpukit.tasks.llm.model.lean import LanguageModel
from tpukit.tasks.llm.model.load import load_lm, shape_of

MAX_NEW_TOKENS, LONGEST = 80, 1024
LIVELY, ENDING = 4.0, {"gpt2": 3.2, "qwen3": 3.2}
"""How much larger than transformers draws them: the matrices, and the end token's embedding."""


@dataclass(frozen=True)
class Search:
    """A way of decoding, and what each side is tried with."""

    beams: int
    prompts: int
    slots: Sequence[int]
    """tpukit's rows; a prompt takes one for each beam."""
    batches: Sequence[tuple[int, str]]
    """transformers' prompts at a time, and its cache."""
    rounds: int
    """How often both run at their best."""


SEARCHES = {
    "greedy": Search(
        1, 64, [16, 32, 64], [(16, "static"), (32, "static"), (64, "static"), (16, "dynamic")], 3
    ),
    "4 beams": Search(4, 32, [32, 64], [(4, "static"), (4, "dynamic"), (8, "dynamic")], 3),
}


def make_prompts(count: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.65, 0.6, count).astype(int), 20, 700)
    return [Prompt(row, rng.integers(0, END, length)) for row, length in enumerate(lengths)]


def make_model(name: str):
    """Random weights whose greedy answers do not repeat themselves and end now and then."""
    torch.manual_seed(0)
    model = make_transformers(name).eval()
    with torch.no_grad():
        for of, parameter in model.named_parameters():
            if parameter.ndim == 2 and (".h." in of or ".layers." in of):
                parameter.mul_(LIVELY)
        model.get_input_embeddings().weight[END].mul_(ENDING[name])
    return model


def run_tpukit(
    model: LanguageModel, prompts: list[Prompt], slots: int, beams: int
) -> dict[int, list[int]]:
    backend = open_backend(HardwareOptions(hw="cpu", precision="fp32"))
    plan = plan_generation(prompts, slots, 1, 1, beams)
    decoding = Decoding(MAX_NEW_TOKENS, num_beams=beams)
    kind = BeamGenerator if beams > 1 else StreamingGenerator
    generator = kind(model, backend, plan, decoding, LONGEST, VOCABULARY, frozenset([END]))
    return {row: tokens for chunk in plan.chunks for row, tokens in generator.run(chunk).items()}


@torch.no_grad()
def run_transformers(
    model, prompts: list[Prompt], setting: tuple[int, str], beams: int
) -> dict[int, list[int]]:
    batch, cache = setting
    ordered = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    made: dict[int, list[int]] = {}
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        longest = max(len(prompt.tokens) for prompt in part)
        tokens = torch.full((len(part), longest), END)
        mask = torch.zeros((len(part), longest), dtype=torch.long)
        for row, prompt in enumerate(part):
            tokens[row, longest - len(prompt.tokens) :] = torch.from_numpy(prompt.tokens)
            mask[row, longest - len(prompt.tokens) :] = 1
        answers = model.generate(
            tokens, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False,
            num_beams=beams, pad_token_id=END,
            cache_implementation="static" if cache == "static" else None,
        )  # fmt: skip
        for prompt, answer in zip(part, answers[:, longest:].tolist(), strict=True):
            end = answer.index(END) + 1 if END in answer else len(answer)
            made[prompt.row] = answer[:end]
    return made


Answers = dict[int, list[int]]
"""New tokens by row."""


def measure(run: Callable[..., Answers], setting: int | tuple[int, str]) -> tuple[dict, Answers]:
    started, cpu_started = time.perf_counter(), time.process_time()
    made = run(setting)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    tokens = sum(map(len, made.values()))
    result = {"setting": setting, "seconds": seconds, "cpu_seconds": cpu, "tokens": tokens,
              "tokens_per_second": tokens / seconds,
              "tokens_per_cpu_second": tokens / cpu}  # fmt: skip
    print(result, flush=True)
    return result, made


def compare(ours: LanguageModel, theirs, search: Search) -> dict:
    prompts, beams = make_prompts(search.prompts), search.beams
    run_tpukit(ours, prompts[-4:], 4 * beams, beams)
    run_transformers(theirs, prompts[-4:], (4, "static"), beams)
    runs = {
        "tpukit": lambda n: run_tpukit(ours, prompts, n, beams),
        "transformers": lambda n: run_transformers(theirs, prompts, n, beams),
    }
    settings = {"tpukit": search.slots, "transformers": search.batches}
    sides: dict[str, dict] = {}
    for side, run in runs.items():
        tries = [measure(run, setting)[0] for setting in settings[side]]
        best = max(tries, key=lambda r: r["tokens_per_cpu_second"])["setting"]
        sides[side] = {"tries": tries, "best": best, "rounds": []}
    answers = {}
    # In turn: the machine's speed changes within minutes.
    for _ in range(search.rounds):
        for side, run in runs.items():
            result, answers[side] = measure(run, sides[side]["best"])
            sides[side]["rounds"].append(result)
    rounds = list(zip(*(sides[side]["rounds"] for side in runs), strict=True))
    made, expected = answers.values()
    lengths = sorted(map(len, expected.values()))
    return {
        **{
            name: median(own[rate] / other[rate] for own, other in rounds)
            for name, rate in (("ratio", "tokens_per_cpu_second"),
                               ("ratio_of_wall_time", "tokens_per_second"))
        },
        "rows_with_identical_tokens": sum(made[row] == expected[row] for row in expected),
        "rows": len(prompts),
        "prompt_lengths": sorted(len(prompt.tokens) for prompt in prompts),
        "answer_lengths": lengths,
        "mean_answer_length": sum(lengths) / len(lengths),
        **sides,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--only", choices=SEARCHES)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    theirs = make_model(arguments.model)
    backend = open_backend(HardwareOptions(hw="cpu", precision="fp32"))
    lm = load_lm(shape_of(theirs.config, LONGEST), torch.float32, drawn=False)
    lm.load_state_dict(theirs.state_dict())
    ours = LanguageModel(lm, backend).eval()
    names = [arguments.only] if arguments.only else list(SEARCHES)
    result = {
        "question": f"new tokens a second, {MODELS[arguments.model]}, fp32, CPU",
        "threads": torch.get_num_threads(),
        "searches": {name: compare(ours, theirs, SEARCHES[name]) for name in names},
    }
    told = ("ratio", "ratio_of_wall_time", "rows_with_identical_tokens", "rows")
    print(table([{"search": name, **{key: found[key] for key in told}}
                 for name, found in result["searches"].items()]))  # fmt: skip
    if arguments.out:
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
