"""Accuracy of `tpukit train --task images` beside timm's own training script.

    python benchmarks/image_accuracy.py --timm-train FILE [--seeds 3] [--epochs 3]

FILE is `train.py` of huggingface/pytorch-image-models (its revision is recorded with --revision).
Both train the same model on the same generated shapes with the same settings, one after the other,
once a seed; validation accuracy after the last epoch. After ten epochs both know all shapes: three
are few enough to differ.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recorded import RESULTS, table, write_result

from tpukit.io.process import allowed_cores

MODEL, SIDE, BATCH, LR, DECAY, SMOOTHING, CROP = "resnet10t", 64, 64, 2e-3, 0.05, 0.1, 0.5
IMAGES = 4000


def run(words: list[str], folder: Path) -> float:
    """Seconds of a command."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": str(allowed_cores()), "USE_TORCH_XLA": "0"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{words[:4]} failed:\n{done.stderr[-2000:]}")
    return time.monotonic() - started


def ours(data: Path, folder: Path, seed: int, epochs: int) -> dict[str, float]:
    seconds = run(
        ["-m", "tpukit", "train", "--task", "images", "--hw", "cpu", "--data-path", str(data),
         "--set", f"model={MODEL}", "--set", f"image_size={SIDE}", "--set", f"smallest_crop={CROP}",
         "--set", f"smoothing={SMOOTHING}", "--set", f"weight_decay={DECAY}",
         "--set", "schedule=cosine", "--set", f"warmup_steps={warmup_steps()}",
         "--set", "final_lr_fraction=0", "--set", "clip_norm=0",
         "--global-batch-size", str(BATCH), "--lr", str(LR), "--epochs", str(epochs),
         "--global-seed", str(seed), "--num-workers", "2", "--results-dir", "ours"],
        folder,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").open()]
    last = [row for row in rows if row["kind"] == "valid"][-1]
    return {"accuracy": last["valid_accuracy"], "seconds": seconds}


def warmup_steps() -> int:
    """One epoch."""
    return IMAGES * 8 // 10 // BATCH


def timms(script: Path, data: Path, folder: Path, seed: int, epochs: int) -> dict[str, float]:
    seconds = run(
        [str(script), "--data-dir", str(data), "--train-split", "train", "--val-split", "valid",
         "--model", MODEL, "--num-classes", "8", "--img-size", str(SIDE), "-b", str(BATCH),
         "--opt", "adamw", "--lr", str(LR), "--weight-decay", str(DECAY), "--sched", "cosine",
         "--sched-on-updates", "--epochs", str(epochs), "--warmup-epochs", "1",
         "--smoothing", str(SMOOTHING), "--scale", str(CROP), "1.0",
         "--no-prefetcher", "--device", "cpu", "-j", "2", "--seed", str(seed),
         "--output", "timm", "--experiment", "run", "--checkpoint-hist", "1"],
        folder,
    )  # fmt: skip
    rows = list(csv.DictReader((folder / "timm" / "run" / "summary.csv").open()))
    return {"accuracy": float(rows[-1]["eval_top1"]) / 100, "seconds": seconds}


def summary(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timm-train", type=Path, required=True)
    parser.add_argument("--revision", default="unknown")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"tpukit": [], "timm": []}
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "shapes"
        run(["-m", "tpukit", "data", "images", "--out", str(data), "--n", str(IMAGES)], Path(place))
        for seed in range(options.seeds):
            folder = Path(place) / str(seed)
            folder.mkdir()
            found["tpukit"].append(ours(data, folder, seed, options.epochs))
            script = options.timm_train.resolve()
            found["timm"].append(timms(script, data, folder, seed, options.epochs))
            print(seed, {name: runs[-1] for name, runs in found.items()}, flush=True)
    accuracy = {n: summary([run["accuracy"] for run in runs]) for n, runs in found.items()}
    result: dict[str, Any] = {
        "question": "validation accuracy beside timm's training script",
        "settings": {"model": MODEL, "side": SIDE, "batch": BATCH, "lr": LR, "weight_decay": DECAY,
                     "smoothing": SMOOTHING, "smallest_crop": CROP, "images": IMAGES,
                     "epochs": options.epochs, "seeds": options.seeds},
        "timm_revision": options.revision,
        "accuracy": accuracy,
        "difference": accuracy["tpukit"]["mean"] - accuracy["timm"]["mean"],
        "runs": found,
    }  # fmt: skip
    write_result(RESULTS / "image_accuracy.json", result)
    print(table([{"side": name, **values} for name, values in accuracy.items()]))


if __name__ == "__main__":
    main()
