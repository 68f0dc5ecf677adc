"""Essays with a score: `tpukit train --task text --folds` beside a fold loop over the HF Trainer.

    python benchmarks/text_peers.py --hw gpu --out benchmarks/results/text_peers.json

Both sides train the same encoder from the same random weights on the same generated essays, with
the same folds, epochs, batch, rate and precision, in turn, once a seed. The Trainer pads each batch
to its longest text (dynamic padding), as the best notebooks do. Scores are out of fold; tokens are
those of the texts, without padding, per second of training (`tokens_per_second`) and of the whole
command (`seconds`).
"""

import argparse
import csv
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recorded import write_result

SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4},
    "small": {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 6,
              "num_attention_heads": 4},
    "base": {"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
             "num_attention_heads": 12},
}  # fmt: skip
"""Of ModernBERT; base is ModernBERT-base's."""
LONGEST, BATCH, LR, DECAY, WARMUP = 1024, 16, 3e-4, 0.01, 20
WORDS = 2000


def write_essays(folder: Path, count: int, folds: int) -> None:
    """train.csv (id, text, score, fold): a score of 0 to 5 is how often forty words occur."""
    rng = random.Random(0)
    with (folder / "train.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("id", "text", "score", "fold"))
        for index in range(count):
            score = rng.uniform(0, 5)
            length = min(LONGEST - 2, max(30, round(rng.lognormvariate(math.log(300), 0.6))))
            words = [f"w{rng.randrange(40)}" if rng.random() < score / 10
                     else f"w{rng.randrange(40, WORDS)}" for _ in range(length)]  # fmt: skip
            rows.writerow((f"e{index}", " ".join(words), f"{score:.3f}", index % folds))


def write_encoder(folder: Path, size: str, seed: int) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]",
               "unk_token": "[UNK]", "mask_token": "[MASK]"}  # fmt: skip
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=LONGEST, **special
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.ModernBertConfig(
        vocab_size=len(names), max_position_embeddings=LONGEST, pad_token_id=0, cls_token_id=1,
        sep_token_id=2, bos_token_id=1, eos_token_id=2, num_labels=1, problem_type="regression",
        classifier_pooling="mean", **SIZES[size],
    )  # fmt: skip
    transformers.ModernBertForSequenceClassification(config).save_pretrained(folder)


def train_folds(folder: Path, size: str, epochs: int, folds: int, seed: int, hw: str) -> None:
    """The Trainer's side, in a process of its own; prints what it measured as JSON."""
    import numpy as np
    import torch
    import transformers

    model, data = folder / "encoder", list(csv.DictReader((folder / "train.csv").open()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    scores = np.array([float(row["score"]) for row in data])
    tokens = tokenizer([row["text"] for row in data], truncation=True, max_length=LONGEST)
    samples = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": float(score)}
        for ids, score in zip(tokens["input_ids"], scores, strict=True)
    ]
    found, read, seconds = np.zeros(len(data)), 0, 0.0
    for fold in range(folds):
        out = np.array([int(row["fold"]) == fold for row in data])
        part = [sample for sample, left in zip(samples, out, strict=True) if not left]
        held = [sample for sample, left in zip(samples, out, strict=True) if left]
        arguments = transformers.TrainingArguments(
            output_dir=folder / f"trainer-{fold}", num_train_epochs=epochs, learning_rate=LR,
            per_device_train_batch_size=BATCH, per_device_eval_batch_size=2 * BATCH, seed=seed,
            weight_decay=DECAY, warmup_steps=WARMUP, lr_scheduler_type="cosine", report_to=[],
            bf16=hw == "gpu", use_cpu=hw == "cpu", save_strategy="no", disable_tqdm=True,
            dataloader_num_workers=2, logging_strategy="no", adam_beta2=0.999,
        )  # fmt: skip
        trainer = transformers.Trainer(
            transformers.AutoModelForSequenceClassification.from_pretrained(model),
            args=arguments, train_dataset=part,
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
        )  # fmt: skip
        seconds += trainer.train().metrics["train_runtime"]
        read += epochs * sum(len(sample["input_ids"]) for sample in part)
        found[out] = trainer.predict(held).predictions[:, 0]
        del trainer
        if hw == "gpu":
            torch.cuda.empty_cache()
    kept = np.array([int(row["fold"]) < folds for row in data])
    rmse = float(np.sqrt(np.mean((found[kept] - scores[kept]) ** 2)))
    print(json.dumps({"rmse": rmse, "training_seconds": seconds, "tokens": read}))


def timed(words: list[str], folder: Path) -> tuple[str, float]:
    env = {**os.environ, "USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1",
           "TPUKIT_CACHE_DIR": str(folder / "cache")}  # fmt: skip
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words[:6])} failed:\n{done.stderr[-2500:]}")
    return done.stdout, time.perf_counter() - started


def ours(folder: Path, epochs: int, folds: int, seed: int, hw: str) -> dict[str, Any]:
    precision = "bf16" if hw == "gpu" else "fp32"
    words = [
        "-m", "tpukit", "train", "--task", "text", "--data-path", str(folder), "--hw", hw,
        "--folds", "fold", "--set", f"model={folder / 'encoder'}", "--set", "columns=score",
        "--set", "target=number", "--set", f"max_length={LONGEST}", "--epochs", str(epochs),
        "--global-batch-size", str(BATCH), "--devices", "1", "--log-every", "10",
        "--lr", str(LR), "--precision", precision, "--set", f"weight_decay={DECAY}",
        "--set", "schedule=cosine", "--set", f"warmup_steps={WARMUP}", "--set",
        "final_lr_fraction=0", "--set", "clip_norm=1", "--global-seed", str(seed),
        "--num-workers", "2", "--results-dir", "ours", "--json",
    ]  # fmt: skip
    _, seconds = timed(words, folder)
    told = json.loads((folder / "ours" / "folds.json").read_text())
    steady = 0.0
    for fold in range(folds):
        before = 0
        for line in (folder / "ours" / f"fold-{fold}" / "metrics.jsonl").open():
            row = json.loads(line)
            if row["kind"] == "train" and row["samples_per_second"]:
                steady += (row["step"] - before) * BATCH / row["samples_per_second"]
                before = row["step"]
    return {"rmse": told["metrics"]["rmse"]["together"], "training_seconds": steady,
            "seconds": seconds}  # fmt: skip


def theirs(folder: Path, size: str, epochs: int, folds: int, seed: int, hw: str) -> dict[str, Any]:
    words = [str(Path(__file__).resolve()), "--trainer", str(folder), "--size", size, "--epochs",
             str(epochs), "--folds", str(folds), "--seed", str(seed), "--hw", hw]  # fmt: skip
    said, seconds = timed(words, folder)
    return {**json.loads(said.splitlines()[-1]), "seconds": seconds}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sides: dict[str, list[dict[str, Any]]] = {"tpukit": [], "trainer": []}
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_essays(folder, options.essays, options.folds)
            (folder / "encoder").mkdir()
            write_encoder(folder / "encoder", options.size, seed)
            given = (options.epochs, options.folds, seed, options.hw)
            sides["tpukit"].append(ours(folder, *given))
            sides["trainer"].append(theirs(folder, options.size, *given))
        tokens = sides["trainer"][-1].pop("tokens")
        for of in sides.values():
            of[-1]["tokens_per_second"] = tokens / of[-1]["training_seconds"]
            print(seed, json.dumps(of[-1]), file=sys.stderr, flush=True)
    ratios = [a["tokens_per_second"] / b["tokens_per_second"]
              for a, b in zip(sides["tpukit"], sides["trainer"], strict=True)]  # fmt: skip
    return {
        "question": "tokens a second and out-of-fold RMSE beside the Trainer with dynamic padding",
        **{name: {key: statistics.fmean(each[key] for each in of) for key in of[0]}
           for name, of in sides.items()},
        "rmse_by_seed": {name: [each["rmse"] for each in of] for name, of in sides.items()},
        "tokens_per_second_ratio": statistics.median(ratios),
        "settings": {name: value for name, value in vars(options).items()
                     if name in ("size", "essays", "epochs", "folds", "seeds", "hw")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--essays", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        given = (options.epochs, options.folds, options.seed, options.hw)
        train_folds(options.trainer, options.size, *given)
        return
    result = measure(options)
    print(json.dumps(result, indent=2))
    if options.out:
        write_result(options.out, result)


if __name__ == "__main__":
    main()
