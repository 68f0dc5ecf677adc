"""What a v5e-8 and a v6e-8 will do with each task and preset: the TPU compiler's answers.

    python benchmarks/tpu_predictions.py [--only TEXT] [--target v5e-8 ...] [--minutes 25] [--again]
    python benchmarks/tpu_predictions.py --page

Each row is one `tpukit probe-batch --target`, the most used first. Results are kept in
results/tpu_predictions.json as they come: what is there and not stale is not asked again, so that a
stopped run goes on. A search that takes longer than --minutes is recorded as such, and asked once
more with --again: what was compiled is in the cache. docs/lab/tpu.md is written from the file.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deciding_code import EXPLANATION, code_of, mark, task_of, write_result
from tpu_batches import GIB, ROOT, ask

RESULT = ROOT / "benchmarks" / "results" / "tpu_predictions.json"
PAGE = ROOT / "docs" / "lab" / "tpu.md"
TARGETS = ("v5e-8", "v6e-8")
CHIPS = 8
EPOCH = 10_000
"""Samples of the epoch whose time is estimated."""


@dataclass(frozen=True)
class Program:
    """Settings whose training step is one program for each batch."""

    name: str
    words: tuple[str, ...]
    """Of `probe-batch`."""
    presets: Mapping[str, int]
    """The presets that train it, with their global batch sizes."""


def program(name: str, task: str, presets: Mapping[str, int], *words: str) -> Program:
    return Program(name, ("--task", task, *words), presets)


MOST = "1024"
"""Samples a chip of the small networks: more is no use, and takes this machine's memory."""
COMMON = {"safe": 8, "balanced": 16, "fast": 32}
PROGRAMS = (
    program("EIT, quick (`tiny`)", "eit", {"quick": 32}, "--preset", "quick",
            "--start", MOST, "--max", MOST),
    program("summaries, quick (3 layers of 128, 256 tokens)", "llm", {"quick": 32},
            "--preset", "quick", "--start", MOST, "--max", MOST),
    program("images, quick (ResNet-10t, 64 pixels)", "images", {"quick": 64},
            "--preset", "quick", "--start", MOST, "--max", MOST),
    program("EIT (`published`, 110 M)", "eit", {**COMMON, "none": 64}),
    program("summaries (GPT-2 124M, 1024 tokens)", "llm",
            {"safe": 64, "balanced": 128, "fast": 256, "none": 256}),
    program("images (ConvNeXt-T, 224 pixels)", "images", {**COMMON, "none": 64}, "--start", "64"),
)  # fmt: skip
"""The most used first."""


def kept() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}


def row(one: Program, target: str, minutes: float) -> dict[str, Any]:
    """What is kept of an answer: the largest and the recommended batch, both at full effort."""
    started = time.monotonic()
    answer = ask([*one.words], target, minutes)
    code = {"code": code_of(task_of(one.words))}
    if "error" in answer:
        return {**answer, **code}
    names = ("largest_batch_per_device", "smallest_failed_batch_per_device",
             "recommended_batch_per_device", "limit_bytes", "memory", "collectives", "step",
             "parameters", "compiles", "versions")  # fmt: skip
    trials = [
        {name: trial[name] for name in ("batch", "fits", "used_bytes", "effort")}
        for trial in answer["trials"]
    ]
    seconds = round(time.monotonic() - started)
    return {**{name: answer[name] for name in names}, "trials": trials, "seconds": seconds, **code}


# -- the page ------------------------------------------------------------------------------------
INTRODUCTION = f"""\
# What a TPU will do: estimates

Written by `benchmarks/tpu_predictions.py` from
[JSON](../../benchmarks/results/tpu_predictions.json). Nothing here ran on a TPU: the TPU compiler
compiled each training step for the eight chips of a slice (`tpukit probe-batch --target`), in bf16
autocast with fp32 weights, AdamW and the EMA weights where the task has them. Memory and operations
are the compiler's report. A step takes at least as long as the slowest of arithmetic, memory and
links at their peak rates (a roofline): a lower bound, not a promise. The largest batch is known
within 10 % and compiled at full effort, as is the recommended one, which leaves 5 % of the memory
free. An epoch is {EPOCH:,} samples at the recommended batch. A measurement on a real TPU beside
these is most welcome: [first_tpu.md](first_tpu.md). {EXPLANATION}"""


def page(found: Mapping[str, Any]) -> str:
    """docs/lab/tpu.md."""
    parts = [INTRODUCTION]
    for target in TARGETS:
        keys = {one.name: f"{one.name} | {target}" for one in PROGRAMS}
        rows = {name: found[key] for name, key in keys.items() if key in found}
        if not rows:
            continue
        versions = next((r["versions"] for r in rows.values() if "versions" in r), {})
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        parts += [f"## {target}", *_tables(rows), f"Compiled by {named}." if named else ""]
    if not found:
        parts.append("No row has been computed yet; each search takes minutes of two cores.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _tables(rows: Mapping[str, Any]) -> Iterator[str]:
    good = {name: row for name, row in rows.items() if "error" not in row}
    if good:
        yield _table(
            ["", "largest batch a chip", "recommended a chip (global)", "memory a chip", "TFLOP",
             "GiB moved", "collectives", "step", "epoch"],
            [_cells(name, row) for name, row in good.items()],
        )  # fmt: skip
        yield "Operations, bytes and collectives are those of one step on one chip."
        yield _table(
            ["", "preset", "global batch", "a chip and micro-batch"],
            [cells for one in PROGRAMS if one.name in good
             for cells in _presets(one, good[one.name])],
        )  # fmt: skip
    for name, row in rows.items():
        if "error" in row:
            yield f"{name}{mark(row, task_of(words(name)))}: {row['error']}."


def words(name: str) -> tuple[str, ...]:
    return next(one.words for one in PROGRAMS if one.name == name)


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    batch, step = row["recommended_batch_per_device"], row["step"]
    seconds, failed = step["estimate_seconds"], row["smallest_failed_batch_per_device"]
    epoch = math.ceil(EPOCH / (batch * CHIPS)) * seconds
    collectives = ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items())
    return [
        f"{name}{mark(row, task_of(words(name)))}",
        f"{row['largest_batch_per_device']}{' or more' * (failed is None)}",
        f"{batch} ({batch * CHIPS})",
        f"{sum(row['memory'].values()) / GIB:.2f} of {row['limit_bytes'] / GIB:.2f} GiB",
        f"{step['flops'] / 1e12:.3g}",
        f"{step['bytes'] / GIB:.3g}",
        collectives or "none",
        f"at least {1000 * seconds:.3g} ms",
        f"{epoch:.2g} s" if epoch < 100 else f"{epoch / 60:.2g} min",
    ]


def _presets(one: Program, row: Mapping[str, Any]) -> Iterator[list[str]]:
    """How a preset's global batch is split over the chips: the fewest accumulation steps."""
    most = row["recommended_batch_per_device"]
    for preset, size in one.presets.items():
        each = size // CHIPS
        steps = next(n for n in range(1, each + 1) if each % n == 0 and each // n <= most)
        split = f"{each // steps}" + (f" x {steps} accumulation steps" if steps > 1 else "")
        yield [one.name, preset, str(size), split]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a row's name")
    parser.add_argument("--target", nargs="*", default=TARGETS)
    parser.add_argument("--minutes", type=float, default=25.0, help="longest time for a row")
    parser.add_argument("--again", action="store_true", help="ask for rows with an error once more")
    parser.add_argument("--page", action="store_true", help="only write docs/lab/tpu.md")
    options = parser.parse_args()
    for target in () if options.page else options.target:
        for one in (p for p in PROGRAMS if options.only in p.name):
            key = f"{one.name} | {target}"
            known = kept().get(key)
            again = options.again and known and "error" in known
            if known and not again and not mark(known, task_of(one.words)):
                continue
            found = row(one, target, options.minutes)
            write_result(RESULT, {**kept(), key: found})
            print(key, found.get("error") or found["recommended_batch_per_device"], flush=True)
            PAGE.write_text(page(kept()), encoding="utf-8")
    PAGE.write_text(page(kept()), encoding="utf-8")


if __name__ == "__main__":
    main()
