"""Training throughput on a CPU: tpukit, transformers' Trainer grouping by length, padding to 1024.

GPT-2 124M in fp32, the same samples (lengths like SAMSum's), threads and effective batch. Each side
first tries several settings on a few micro-batches, then runs whole optimizer steps at its best;
the unit is real tokens a second: padding does not count. Each run is a process of its own.

    python benchmarks/summarize_training.py --out benchmarks/results/summarize_training.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ["USE_TORCH_XLA"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

VOCABULARY, CONTEXT = 50257, 1024
SAMPLES = 2048
SETTINGS = {
    "tpukit": [{"rows": 4, "buckets": 24}, {"rows": 8, "buckets": 24}, {"rows": 16, "buckets": 24}],
    "trainer": [{"rows": 4}, {"rows": 8}, {"rows": 16}],
    "padded": [{"rows": 1}, {"rows": 2}, {"rows": 4}],
}


def make_samples(seed: int = 0) -> list[tuple[np.ndarray, int]]:
    """Token ids and target counts: lengths with mean 150 and some up to 800, summaries of 27."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.83, 0.6, SAMPLES).astype(int), 25, 800)
    targets = np.clip((lengths * 0.12 + rng.normal(10, 5, SAMPLES)).astype(int), 4, 80)
    targets = np.minimum(targets, lengths // 2)
    return [(rng.integers(0, VOCABULARY, n), int(t)) for n, t in zip(lengths, targets, strict=True)]


# -- tpukit ---------------------------------------------------------------------------------------
def run_tpukit(batch: int, steps: int, limit: int | None, rows: int, buckets: int) -> dict:
    from tpukit.hardware.choice import open_backend
    from tpukit.hardware.options import HardwareOptions
    from tpukit.tasks.summarize.buckets import BucketPlan, choose_lengths, make_buckets
    from tpukit.tasks.summarize.evaluation import ListedSamples
    from tpukit.tasks.summarize.gpt2 import GPT2Config
    from tpukit.tasks.summarize.prompt import Example
    from tpukit.tasks.summarize.samples import collate
    from tpukit.tasks.summarize.task import SummarizeTask
    from tpukit.train.config import TrainConfig
    from tpukit.train.step import build_learner
    from tpukit.train.task import PlanSettings

    backend = open_backend(HardwareOptions(hw="cpu", precision="fp32"))
    data = ListedSamples([Example(list(t), n) for t, n in make_samples()])
    task = SummarizeTask(init="scratch")
    task._model_config = GPT2Config()
    learner = build_learner(task, backend, task.build_model(backend), TrainConfig(lr=1e-4))
    shapes = make_buckets(
        choose_lengths(data.sizes.lengths, buckets, int(data.sizes.lengths.max())),
        data.sizes,
        rows,
        0,
    )
    plan = BucketPlan(data.sizes, shapes, PlanSettings(batch, batch, 1, 0))

    def host_batches(step: int):
        micro_batches = plan.step(step)
        if limit:
            # Evenly out of the step: long and short alike.
            micro_batches = micro_batches[:: max(1, len(micro_batches) // limit)]
        tokens = sum(int(data.sizes.lengths[k.sample]) for m in micro_batches for k in m.keys)
        made = [
            collate([data[k.sample] for k in m.keys], m, shapes[m.bucket]) for m in micro_batches
        ]
        return made, tokens

    learner.train_step(host_batches(steps)[0][:2], 1e-4)
    tokens, started = 0, time.perf_counter()
    for step in range(steps):
        made, count = host_batches(step)
        learner.train_step(list(backend.batches(made)), 1e-4)
        tokens += count
    return {"tokens": tokens, "seconds": time.perf_counter() - started}


# -- transformers --------------------------------------------------------------------------------
def gpt2_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    # The fused tanh GELU: the default `gelu_new` is several slow operations, the same function.
    config = GPT2Config(
        activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return GPT2LMHeadModel(config)


def run_trainer(
    batch: int, steps: int, limit: int | None, rows: int, pad_to: int | None = None
) -> dict:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    samples = make_samples()
    accumulate = limit or batch // rows
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
        """Times all steps but the first, which warms up."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                self.started, self.before = time.perf_counter(), sum(counted)
            self.ended = time.perf_counter()

    clock = Clock()
    arguments = TrainingArguments(
        output_dir="/tmp/trainer-benchmark", use_cpu=True, per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulate, max_steps=steps + 1, learning_rate=1e-4,
        optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_strategy="no",
        remove_unused_columns=False, dataloader_num_workers=0, disable_tqdm=True,
        **({} if pad_to else {"train_sampling_strategy": "group_by_length"}),
    )  # fmt: skip
    data = [{"input_ids": t, "targets": n} for t, n in samples]
    Trainer(
        model=gpt2_of_transformers(), args=arguments, train_dataset=data, data_collator=collate,
        callbacks=[clock],
    ).train()  # fmt: skip
    return {"tokens": sum(counted) - clock.before, "seconds": clock.ended - clock.started}


def run_side(side: str, batch: int, steps: int, limit: int | None, settings: dict) -> dict:
    torch.manual_seed(0)
    if side == "tpukit":
        return run_tpukit(batch, steps, limit, **settings)
    return run_trainer(
        batch, steps, limit, **settings, pad_to=CONTEXT if side == "padded" else None
    )


# -- both ----------------------------------------------------------------------------------------
def in_process(side: str, batch: int, steps: int, limit: int | None, settings: dict) -> dict:
    numbers = {"--batch": batch, "--steps": steps, "--limit": limit or 0}
    options = [text for name, value in numbers.items() for text in (name, str(value))]
    command = [sys.executable, __file__, "--side", side, *options]
    command += ["--settings", json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    rate = result["tokens"] / result["seconds"]
    print(side, settings, f"{rate:.1f} real tokens/s in {result['seconds']:.0f} s", flush=True)
    return {**settings, **result, "tokens_per_second": rate}


def compare(batch: int, steps: int) -> dict:
    sides = {}
    for side, candidates in SETTINGS.items():
        # A try of the padded side is as good as a whole step: all its micro-batches cost the same.
        tries = [in_process(side, batch, 1, 3 if side == "padded" else 8, c) for c in candidates]
        best = max(range(len(tries)), key=lambda i: tries[i]["tokens_per_second"])
        if side == "padded":
            sides[side] = {"tries": tries, "best": tries[best]}
        else:
            sides[side] = {
                "tries": tries,
                "best": in_process(side, batch, steps, None, candidates[best]),
            }
    rate = {side: result["best"]["tokens_per_second"] for side, result in sides.items()}
    return {
        "question": "real tokens a second in training, GPT-2 124M, fp32, CPU",
        "effective_batch": batch,
        "threads": torch.get_num_threads(),
        "ratio_to_padding": rate["tpukit"] / rate["padded"],
        "ratio_to_trainer": rate["tpukit"] / rate["trainer"],
        "sides": sides,
        "versions": {n: version(n) for n in ("torch", "transformers", "accelerate", "numpy")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--settings", type=json.loads)
    arguments = parser.parse_args()
    if arguments.side:
        result = run_side(
            arguments.side,
            arguments.batch,
            arguments.steps,
            arguments.limit or None,
            arguments.settings,
        )
        print(json.dumps(result))
        return
    result = compare(arguments.batch, arguments.steps)
    print(json.dumps({n: v for n, v in result.items() if n != "sides"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
