"""What a small GPT-2 learns from scratch on a CPU: generated dialogues, names it never saw.

The commands of a user, one after the other: data, training, test on the part whose people, towns,
topics and phrasings the training part has not.

    python benchmarks/summarize_quality.py --out benchmarks/results/summarize_quality.json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from deciding_code import write_result

TRAINING = [
    "--hw", "cpu", "--precision", "fp32", "--model", "3x4x128", "--tokenizer", "train",
    "--set", "vocabulary_size=2048", "--block-size", "256", "--global-batch-size", "32",
    "--lr", "3e-3", "--set", "warmup_steps=60", "--set", "beta2=0.98",
    "--set", "valid_fraction=0.005", "--set", "score_samples=0",
    "--num-workers", "0", "--ckpt-every", "1000",
]  # fmt: skip


def run(command: list[str], env: dict[str, str]) -> tuple[dict, float]:
    """The JSON answer of a command, and its seconds."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tpukit", *command, "--json"],
        env={**os.environ, **env}, stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout), time.perf_counter() - started


def logged_minutes(log: Path) -> float:
    """From a training's first line to its last; a run that was stopped has several such spans."""
    spans: list[list[datetime]] = []
    for line in log.read_text().splitlines():
        stamp = datetime.fromisoformat(line.split(" ", 1)[0])
        if "Command:" in line:  # what each start writes first
            spans.append([stamp, stamp])
        spans[-1][1] = stamp
    return sum((end - start).total_seconds() for start, end in spans) / 60


def measure(n: int, steps: int, threads: int, limit: int, folder: Path) -> dict:
    env = {"TPUKIT_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": str(threads)}
    data, results = ["--data-path", str(folder / "data")], str(folder / "run")
    run(["data", "dialogues", "--out", str(folder / "data"), "--n", str(n)], env)
    train = ["summarize-train", *data, "--results-dir", results, *TRAINING]
    run([*train, "--max-steps", str(steps)], env)
    tested, testing = run(["test", "--run", results, *data, "--limit", str(limit)], env)
    metrics = tested["metrics"]
    return {
        "question": "ROUGE-L above lead-1 and nearest training summary; unseen names copied",
        "rougeL": metrics["rougeL"],
        "rougeL_95": [metrics["rougeL_low"], metrics["rougeL_high"]],
        "rougeL_lead": metrics["rougeL_lead"],
        "rougeL_nearest": metrics["rougeL_nearest"],
        "rougeL_above_both": metrics["rougeL"] - metrics["rougeL_baseline"],
        "unseen_names_copied": metrics["unseen_names_copied"],
        "metrics": metrics,
        "test_samples": tested["samples"],
        "training_rows": n - min(n // 10, 5000),
        "steps": steps,
        "settings": TRAINING,
        "threads": threads,
        "training_minutes": logged_minutes(folder / "run" / "log.txt"),
        "testing_seconds": testing,
        "versions": {name: version(name) for name in ("torch", "tiktoken", "rouge-score")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument(
        "--work", type=Path, help="keep data and run here: a run that was stopped goes on"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.work or Path(tempfile.mkdtemp())
    try:
        numbers = (arguments.n, arguments.steps, arguments.threads, arguments.limit)
        result = measure(*numbers, folder)
    finally:
        if not arguments.work:
            shutil.rmtree(folder)
    print(json.dumps(result, indent=2))
    if arguments.out:
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
