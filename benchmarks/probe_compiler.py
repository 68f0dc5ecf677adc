"""What the TPU compiler answers for the models of this package, beside what was known before.

    python benchmarks/probe_compiler.py QUESTION [--quiet]     (the keys of QUESTIONS below)

Each question is `tpukit probe-batch --target ...` as a user would call it. What the compiler says
does not depend on how busy the machine is; how long it takes does: seconds are kept only where
--quiet states that nothing else is running, and then the cache is empty.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deciding_code import write_result

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
KNOWN_GPT2_GIB = {4: 5.34, 8: 8.91, 16: 14.77}
"""GPT-2 124M, context 1024, bf16, AdamW, clipped, one v5e chip, libtpu 0.0.21."""
GPT2 = ["--task", "llm"]
REFERENCE = [*GPT2, "--target", "v5e-1"]


def at(batch: int) -> list[str]:
    """This batch and no other."""
    return ["--start", str(batch), "--max", str(batch)]


QUESTIONS: dict[str, dict[str, list[str]]] = {
    "gpt2": {"v5e-1": REFERENCE},
    "gpt2-memory": {f"batch {batch}": [*REFERENCE, *at(batch)] for batch in KNOWN_GPT2_GIB},
    # Near the limit (99 fit at the fast setting) the compiler takes five minutes a batch.
    "gpt2-lean": {"v5e-1": [*GPT2, "--target", "v5e-1", *at(64)]},
    # 32 a chip are the 256 of a v5e-8.
    "eit": {"v5e-1": ["--size", "published", "--target", "v5e-1", *at(32)]},
    "eit-reference": {
        "v5e-1": ["--size", "published-reference", "--target", "v5e-1", "--start", "5",
                  "--max", "6"]
    },
    "slices": {
        "v5e-8": [*GPT2, "--target", "v5e-8", *at(8)],
        "v5e-8 shard": [*GPT2, "--target", "v5e-8", *at(8), "--shard"],
        "v5e-256": [*GPT2, "--model", "6x6x384", "--target", "v5e-256", *at(4)],
    },
}  # fmt: skip


def ask(arguments: list[str], folder: str, *, quiet: bool) -> dict[str, Any]:
    """One probe's answer with the seconds it took from start to end."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tpukit", "probe-batch", *arguments, "--json"],
        cwd=folder, env={**os.environ, **({"TPUKIT_CACHE_DIR": folder} if quiet else {})},
        stdout=subprocess.PIPE, text=True, timeout=3600, check=False,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    return {"arguments": arguments, "seconds": time.monotonic() - started, "answer": answer}


def without_seconds(value: Any) -> Any:
    """Without the times that a busy machine makes longer; the estimates stay."""
    if isinstance(value, dict):
        return {n: without_seconds(v) for n, v in value.items() if n != "seconds"}
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def full_effort_gib(answer: dict[str, Any], batch: int) -> float:
    full = [t for t in answer["trials"] if t["batch"] == batch and t["effort"] == "full"]
    return float(full[-1]["used_bytes"] / GIB)


def memory_beside_known(answers: dict[str, Any]) -> dict[int, dict[str, float]]:
    read = {b: full_effort_gib(answers[f"batch {b}"]["answer"], b) for b in KNOWN_GPT2_GIB}
    return {
        batch: {"known": known, "read": read[batch], "ratio": read[batch] / known}
        for batch, known in KNOWN_GPT2_GIB.items()
    }


def tell(name: str, found: dict[str, Any]) -> None:
    answer = found["answer"]
    if "error" in answer:
        print(f"{name}: {answer['error']['message']}")
        return
    print(
        f"{name}: largest {answer['largest_batch_per_device']}, {answer['compiles']} compiles, "
        f"{found['seconds']:.0f} s"
    )
    for trial in answer["trials"]:
        used = trial["used_bytes"] / GIB if trial["used_bytes"] else float("nan")
        print(
            f"  {trial['batch']} {trial['effort']}: {'fits' if trial['fits'] else 'does not fit'}, "
            f"{used:.2f} GiB, {trial['compiles']} compiles, {trial['seconds']:.0f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=sorted(QUESTIONS))
    parser.add_argument("--quiet", action="store_true", help="nothing else runs: keep the seconds")
    options = parser.parse_args()
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, words in QUESTIONS[options.question].items():
            answers[name] = ask(words, folder, quiet=options.quiet)
            tell(name, answers[name])
    kept = answers if options.quiet else without_seconds(answers)
    result: dict[str, Any] = {
        "question": options.question, "cores": os.cpu_count(), "quiet": options.quiet,
        "answers": kept,
    }  # fmt: skip
    if options.question == "gpt2-memory":
        result["memory_gib"] = memory_beside_known(answers)
    write_result(RESULTS / f"probe_compiler_{options.question}.json", result)


if __name__ == "__main__":
    main()
