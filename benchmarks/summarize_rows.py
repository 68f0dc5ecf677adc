"""A million rows: generated, tokenised and trained on in constant memory.

python benchmarks/summarize_rows.py --n 1000000 --out benchmarks/results/summarize_rows.json
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from deciding_code import write_result


def run(command: list[str], env: dict[str, str]) -> tuple[dict, float, int]:
    """The JSON answer of a command, its seconds, and the largest memory of any process in it."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tpukit", *command, "--json"],
        env={**os.environ, **env}, stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return json.loads(done.stdout), time.perf_counter() - started, peak


def measure(n: int, folder: Path) -> dict:
    env = {"TPUKIT_CACHE_DIR": str(folder / "cache")}
    _, generating, _ = run(["data", "dialogues", "--out", str(folder / "data"), "--n", str(n)], env)
    train = [
        "summarize-train", "--data-path", str(folder / "data"),
        "--results-dir", str(folder / "run"),
        "--hw", "cpu", "--model", "1x1x32", "--tokenizer", "train", "--block-size", "256",
        "--global-batch-size", "64", "--set", "valid_fraction=0.0001", "--set", "score_samples=0",
        "--num-workers", "1",
    ]  # fmt: skip
    _, first, _ = run([*train, "--max-steps", "20"], env)
    # The tokens are there now: what is left is opening them and training.
    answer, second, peak = run([*train, "--max-steps", "20", "--no-resume"], env)
    return {
        "question": "rows tokenised a second, and the largest process, whatever the rows",
        "rows": n,
        "generating_seconds": generating,
        "tokenising_seconds": first - second,
        "rows_tokenised_per_second": n / (first - second),
        "training_steps": answer["steps"],
        "largest_process_bytes": peak,
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "tiktoken", "tokenizers")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        result = measure(arguments.n, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=2))
    if arguments.out:
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
