"""Training throughput on a CPU: tpukit, transformers' Trainer grouping by length, padding to 1024.

GPT-2 124M, or a model of Qwen3's shape (--model qwen3), in fp32, the same samples (lengths like
SAMSum's), threads and effective batch. Each side
first tries several settings on a few micro-batches, then tpukit and the Trainer run whole optimizer
steps at their best, in turn, and the ratio is the median of these rounds. The unit is real tokens a
second: padding does not count. Each run is a process of its own.

    python benchmarks/summarize_training.py --out benchmarks/results/summarize_training.json
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

os.environ["USE_TORCH_XLA"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from recorded import table, write_result
from summarize_models import MODELS, VOCABULARY, make_transformers

CONTEXT = 1024
SAMPLES = 2048
SETTINGS = {
    "tpukit": [{"rows": rows} for rows in (4, 8)],
    "trainer": [{"rows": rows} for rows in (4, 8)],
    "padded": [{"rows": rows} for rows in (1, 2)],
}
IN_TURN, ROUNDS = ("tpukit", "trainer"), 3
WARM, TRIED = 2, 6
"""Micro-batches before the clock starts, and those of a try."""


def make_samples(seed: int = 0) -> list[tuple[np.ndarray, int]]:
    """Token ids and target counts: lengths with mean 150 and some up to 800, summaries of 27."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.83, 0.6, SAMPLES).astype(int), 25, 800)
    targets = np.clip((lengths * 0.12 + rng.normal(10, 5, SAMPLES)).astype(int), 4, 80)
    targets = np.minimum(targets, lengths // 2)
    return [(rng.integers(0, VOCABULARY, n), int(t)) for n, t in zip(lengths, targets, strict=True)]


def now() -> tuple[float, float]:
    """Seconds by the clock, and of this process."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float], end: tuple[float, float]) -> dict:
    return {"seconds": end[0] - start[0], "cpu_seconds": end[1] - start[1]}


# -- tpukit ---------------------------------------------------------------------------------------
def run_tpukit(name: str, batch: int, limit: int | None, rows: int) -> dict:
    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import open_backend
    from tpukit.tasks.llm.data.dataset import TokenSamples, sample_sizes
    from tpukit.tasks.llm.data.packing import SetSizes
    from tpukit.tasks.llm.data.prompt import Example
    from tpukit.tasks.llm.data.token_cache import TokenCache
    from tpukit.tasks.llm.model.load import shape_of
    from tpukit.tasks.llm.task import SummarizeTask
    from tpukit.train.config import TrainConfig
    from tpukit.train.learner import build_learner
    from tpukit.train.task import PlanSettings

    backend = open_backend(HardwareOptions(hw="cpu", precision="fp32"))
    cache = TokenCache.of([Example(list(t), n) for t, n in make_samples()])
    every = np.arange(len(cache))
    sizes = SetSizes.of(sample_sizes(cache, every, whole=False))
    data = TokenSamples(cache, every, sizes)
    task = SummarizeTask(init="scratch").for_probing()
    task.shape = shape_of(make_transformers(name).config, CONTEXT)
    learner = build_learner(task, backend, task.build_model(backend), TrainConfig(lr=1e-4))
    plan = task.plan(data, PlanSettings(batch, rows, 1, 0))

    def host_batches(step: int):
        micro_batches = plan.step(step)
        if limit:
            # Evenly out of the step: long and short alike.
            micro_batches = micro_batches[:: max(1, len(micro_batches) // limit)]
        tokens = sum(int(data.sizes.lengths[k.sample]) for m in micro_batches for k in m.keys)
        made = [task.collate([data[k.sample] for k in m.keys], m) for m in micro_batches]
        return made, tokens

    learner.train_step(host_batches(1)[0][:WARM], 1e-4)
    started = now()
    made, tokens = host_batches(0)
    learner.train_step(list(backend.batches(made)), 1e-4)
    return {"tokens": tokens, **since(started, now())}


# -- transformers --------------------------------------------------------------------------------
def run_trainer(
    name: str, batch: int, limit: int | None, rows: int, pad_to: int | None = None
) -> dict:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    samples = make_samples()
    accumulate = WARM + (limit or batch // rows)
    counted: list[int] = []

    def collate(items: list[dict]) -> dict:
        length = pad_to or max(len(item["input_ids"]) for item in items)
        ids = torch.zeros(len(items), length, dtype=torch.long)
        labels = torch.full((len(items), length), -100)
        mask = torch.zeros(len(items), length, dtype=torch.long)
        for row, item in enumerate(items):
            tokens, targets = torch.from_numpy(item["input_ids"]), item["targets"]
            ids[row, : len(tokens)] = tokens
            labels[row, len(tokens) - targets : len(tokens)] = tokens[len(tokens) - targets :]
            mask[row, : len(tokens)] = 1
        counted.append(int(mask.sum()))
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    class Clock(TrainerCallback):
        """Times one step but for its first micro-batches, which warm up, and its update, whose
        first run allocates; tpukit's time has an update in it."""

        def __init__(self):
            self.done = 0

        def on_substep_end(self, args, state, control, **kwargs):
            self.done += 1
            if self.done == WARM:
                self.started = now()

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.ended = now()

    clock = Clock()
    arguments = TrainingArguments(
        output_dir="/tmp/trainer-benchmark", use_cpu=True, per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulate, max_steps=1, learning_rate=1e-4,
        optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_strategy="no",
        remove_unused_columns=False, dataloader_num_workers=0, disable_tqdm=True,
        **({} if pad_to else {"train_sampling_strategy": "group_by_length"}),
    )  # fmt: skip
    data = [{"input_ids": t, "targets": n} for t, n in samples]
    Trainer(
        model=make_transformers(name), args=arguments, train_dataset=data, data_collator=collate,
        callbacks=[clock],
    ).train()  # fmt: skip
    return {"tokens": sum(counted[WARM:accumulate]), **since(clock.started, clock.ended)}


def run_side(side: str, name: str, batch: int, limit: int | None, settings: dict) -> dict:
    torch.manual_seed(0)
    if side == "tpukit":
        return run_tpukit(name, batch, limit, **settings)
    return run_trainer(name, batch, limit, **settings, pad_to=CONTEXT if side == "padded" else None)


# -- both ----------------------------------------------------------------------------------------
def in_process(side: str, name: str, batch: int, limit: int | None, settings: dict) -> dict:
    numbers = {"--model": name, "--batch": batch, "--limit": limit or 0}
    options = [text for name, value in numbers.items() for text in (name, str(value))]
    command = [sys.executable, __file__, "--side", side, *options]
    command += ["--settings", json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    rate = result["tokens"] / result["seconds"]
    by_cpu = result["tokens"] / result["cpu_seconds"]
    print(side, settings, f"{rate:.1f} real tokens/s in {result['seconds']:.0f} s", flush=True)
    return {**settings, **result, "tokens_per_second": rate, "tokens_per_cpu_second": by_cpu}


def compare(name: str, batch: int) -> dict:
    sides: dict[str, dict] = {}
    for side, candidates in SETTINGS.items():
        # A try of the padded side is as good as a whole step: all its micro-batches cost the same.
        tries = [
            in_process(side, name, batch, 3 if side == "padded" else TRIED, c) for c in candidates
        ]
        place = max(range(len(tries)), key=lambda i: tries[i]["tokens_per_cpu_second"])
        sides[side] = {"tries": tries, "best": candidates[place], "rounds": [tries[place]]}
    for side in IN_TURN:
        sides[side]["rounds"] = []
    # In turn: the machine's speed changes within minutes.
    for _ in range(ROUNDS):
        for side in IN_TURN:
            best = sides[side]["best"]
            sides[side]["rounds"].append(in_process(side, name, batch, None, best))
    return {
        "question": f"real tokens a second in training, {MODELS[name]}, fp32, CPU",
        "effective_batch": batch,
        "threads": torch.get_num_threads(),
        "ratio_to_padding": ratio(sides, "padded", "tokens_per_second"),
        "ratio_to_trainer": ratio(sides, "trainer", "tokens_per_second"),
        # Processor seconds do not depend on what else the machine is doing.
        "ratio_to_padding_cpu": ratio(sides, "padded", "tokens_per_cpu_second"),
        "ratio_to_trainer_cpu": ratio(sides, "trainer", "tokens_per_cpu_second"),
        "sides": sides,
    }


def ratio(sides: dict[str, dict], other: str, rate: str) -> float:
    """tpukit's rate to the other side's, the median of the rounds."""
    ours, theirs = sides["tpukit"]["rounds"], sides[other]["rounds"]
    pairs = zip(ours, itertools.cycle(theirs))
    return median(mine[rate] / its[rate] for mine, its in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--settings", type=json.loads)
    arguments = parser.parse_args()
    if arguments.side:
        settings = arguments.settings
        given = (arguments.model, arguments.batch, arguments.limit or None, settings)
        result = run_side(arguments.side, *given)
        print(json.dumps(result))
        return
    result = compare(arguments.model, arguments.batch)
    print(table([{name: value for name, value in result.items() if name.startswith("ratio")}]))
    if arguments.out:
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
