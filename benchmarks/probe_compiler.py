"""What the TPU compiler answers for the models of this package, beside what was known before.

    python benchmarks/probe_compiler.py gpt2|gpt2-lean|eit|eit-reference|slices

Each question is `tpukit probe-batch --target ...` as a user would call it, with an empty cache;
`gpt2` also asks for the memory at batches 4, 8 and 16 at the compiler's full effort.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
KNOWN_GPT2_GIB = {4: 5.34, 8: 8.91, 16: 14.77}
"""GPT-2 124M, context 1024, bf16, AdamW, clipped, one v5e chip, libtpu 0.0.21."""
NO_DATA = ["--data-path", "/nonexistent"]
GPT2 = ["--task", "summarize", *NO_DATA]
SMALL_GPT2 = [*GPT2, "--model", "6x6x384"]

QUESTIONS: dict[str, dict[str, list[str]]] = {
    "gpt2": {
        "v5e-1": [*GPT2, "--loss", "reference", "--target", "v5e-1"],
        **{
            f"batch {batch}": [*GPT2, "--loss", "reference", "--target", "v5e-1", "--start",
                               str(batch), "--max", str(batch)]
            for batch in KNOWN_GPT2_GIB
        },
    },
    "gpt2-lean": {"v5e-1": [*GPT2, "--loss", "lean", "--target", "v5e-1", "--start", "36"]},
    "eit": {"v5e-1": ["--size", "published", "--target", "v5e-1", "--start", "32", "--max", "64"]},
    "eit-reference": {
        "v5e-1": ["--size", "published-reference", "--target", "v5e-1", "--start", "5"]
    },
    "slices": {
        "v5e-8": [*SMALL_GPT2, "--target", "v5e-8", "--start", "8", "--max", "8"],
        "v5e-8 shard": [*SMALL_GPT2, "--target", "v5e-8", "--start", "8", "--max", "8", "--shard"],
        "v5e-256": [*SMALL_GPT2, "--target", "v5e-256", "--start", "4", "--max", "4"],
    },
}  # fmt: skip


def ask(arguments: list[str], cache: str) -> dict[str, Any]:
    """One probe's answer with the seconds it took from start to end."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tpukit", "probe-batch", *arguments, "--json"],
        env={**os.environ, "TPUKIT_CACHE_DIR": cache},
        stdout=subprocess.PIPE, text=True, timeout=3600, check=False,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    return {"arguments": arguments, "seconds": time.monotonic() - started, "answer": answer}


def full_effort_gib(answer: dict[str, Any], batch: int) -> float:
    full = [t for t in answer["trials"] if t["batch"] == batch and t["effort"] == "full"]
    return float(full[-1]["used_bytes"] / GIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=sorted(QUESTIONS))
    question = parser.parse_args().question
    with tempfile.TemporaryDirectory() as cache:
        answers = {name: ask(words, cache) for name, words in QUESTIONS[question].items()}
    result: dict[str, Any] = {"question": question, "cores": os.cpu_count(), "answers": answers}
    if question == "gpt2":
        read = {b: full_effort_gib(answers[f"batch {b}"]["answer"], b) for b in KNOWN_GPT2_GIB}
        result["memory_gib"] = {
            batch: {"known": known, "read": read[batch], "ratio": read[batch] / known}
            for batch, known in KNOWN_GPT2_GIB.items()
        }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"probe_compiler_{question}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    for name, found in answers.items():
        answer = found["answer"]
        print(
            f"{name}: largest {answer.get('largest_batch_per_device')}, "
            f"{answer.get('compiles')} compiles, {found['seconds']:.0f} s"
        )


if __name__ == "__main__":
    main()
