"""Results whose deciding code has changed since they were measured, and how to measure them again.

    python benchmarks/stale.py                       lists them
    python benchmarks/stale.py --run [NAME ...]      measures what a busy machine does not change
    python benchmarks/stale.py --run --quiet [...]   times as well: nothing else may be running
    python benchmarks/stale.py --pages               writes the pages, with their marks

One measurement runs at a time; the pages are written after each. The TPU compiler's reports are
kept by program: where code changed and a program did not, it is traced and not compiled again.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import tpu_batches
import tpu_predictions
import write_results
from deciding_code import DECIDES, RESULTS, ROOT, mark, task_of

OUT = "--out benchmarks/results/{name}.json"


@dataclass(frozen=True)
class Measurement:
    """How a result is measured."""

    commands: tuple[str, ...]
    """Scripts of benchmarks/ with their options."""
    timed: bool = False
    """It needs a quiet machine."""
    needs: str = ""
    """What the commands name in capitals."""


def compiled(*commands: str) -> Measurement:
    return Measurement(commands)


def timed(command: str, needs: str = "") -> Measurement:
    return Measurement((command,), timed=True, needs=needs)


TORCH_TPU = "the environment of scripts/try_torch_tpu.sh"
QUESTIONS = ("eit", "eit-reference", "gpt2", "gpt2-lean", "gpt2-memory", "slices")
MEASUREMENTS = {
    **{f"probe_compiler_{q}": compiled(f"probe_compiler.py {q}") for q in QUESTIONS},
    "activation_memory": compiled("activation_memory.py"),
    "eit_tpu_v5e-1": compiled(f"eit_tpu.py {OUT}"),
    "eit_tpu_v5e-8": compiled(
        f"eit_tpu.py --target v5e-8 --forms lean --rows 32 --effort fast {OUT}"
    ),
    "step_traffic": compiled(
        "step_traffic.py eit --set size=published --rows 32 --keep",
        "step_traffic.py summarize --rows 56 --keep",
    ),
    "doctor_blind": Measurement((f"doctor_real_material.py --blind {OUT}",)),
    "doctor_real_material": Measurement(
        (f"doctor_real_material.py --files FILES {OUT}",), needs="the public files, as fetched"
    ),
    "torch_tpu_compiler": Measurement(
        ("torch_tpu_compiler.py --torch-xla PYTHON --effort fast full",), needs=TORCH_TPU
    ),
    "torch_tpu_compile": timed("torch_tpu_compile.py", TORCH_TPU),
    "eit_quality": timed(
        f"eit_quality.py --uef2017 DIR --work WORK {OUT}", "the measured frames of UEF2017"
    ),
    "image_accuracy": timed("image_accuracy.py --timm-train FILE", "timm's train.py"),
    "campaign": Measurement(
        ("python -m campaign --write benchmarks/results/campaign.json",), needs="hours"
    ),
    "doctor_scan": timed(f"doctor_scan.py {OUT}"),
    "doctor_start": timed(f"doctor_start.py {OUT}"),
    "gpualert_corpus": Measurement(
        (f"gpualert_corpus.py FOLDER {OUT}",), needs="a checkout of the corpus"
    ),
    "gpu_measured": Measurement(("gpu_measured.py",), needs="a GPU"),
    "gpu_memory_on_cpu": Measurement(("gpu_memory_on_cpu.py",)),
    "gpu_memory_public": Measurement(("gpu_memory_public.py",)),
    "gpu_search_seconds": timed("gpu_search_seconds.py"),
    "public_models": Measurement(
        (f"public_models.py FOLDER {OUT}",), needs="checkouts of the repositories"
    ),
    "run_overhead": timed(f"run_overhead.py {OUT}"),
    "eit_simulation": timed(f"eit_simulation.py {OUT}"),
    "eit_speed_cpu": timed(f"eit_speed.py {OUT}"),
    "engine_cost_cpu_tiny": timed("engine_cost.py --hw cpu"),
    "engine_cost_tpu_tiny": timed("engine_cost.py --hw tpu --blocks 10"),
    "first_step": timed(f"first_step.py {OUT}"),
    "host_time": timed("host_time.py"),
    "image_loading": timed("image_loading.py"),
    "probe_peers_eit": timed("probe_peers.py --task eit --limit 500MB"),
    "probe_peers_eit_xla": timed("probe_peers.py --task eit --limit 1GB --xla"),
    "probe_peers_llm": timed("probe_peers.py --task llm --limit 1GB"),
    "probe_peers_llm_xla": timed("probe_peers.py --task llm --limit 2GB --xla"),
    "summarize_generation": timed(f"summarize_generation.py {OUT}"),
    "summarize_generation_qwen3": timed(f"summarize_generation.py --model qwen3 {OUT}"),
    "summarize_quality": timed(f"summarize_quality.py {OUT}"),
    "summarize_rows": timed(f"summarize_rows.py {OUT}"),
    "summarize_training": timed(f"summarize_training.py {OUT}"),
    "summarize_training_qwen3": timed(f"summarize_training.py --model qwen3 --batch 32 {OUT}"),
}


def stale() -> Iterator[tuple[str, Measurement]]:
    """Each stale result, with what measures it; of the files of rows, the rows."""
    for name in DECIDES:
        path = RESULTS / f"{name}.json"
        if path.exists() and mark(json.loads(path.read_text(encoding="utf-8")), name):
            yield name, MEASUREMENTS[name]
    for key, row in tpu_batches.kept().items():
        if tpu_batches.mark_of(key, row):
            name, target = key.split(" | ")
            words = f"tpu_batches.py --only {shlex.quote(name)} --target {target}"
            yield f"tpu_batches: {key}", compiled(words)
    for key, row in tpu_predictions.kept().items():
        name, target = key.split(" | ")
        if mark(row, task_of(tpu_predictions.words(name))):
            words = f"tpu_predictions.py --only {shlex.quote(name)} --target {target}"
            yield f"tpu_predictions: {key}", compiled(words)


def write_pages() -> None:
    write_results.PAGE.write_text(write_results.page(), encoding="utf-8")
    tpu_batches.PAGE.write_text(tpu_batches.page(tpu_batches.kept()), encoding="utf-8")
    tpu_predictions.PAGE.write_text(tpu_predictions.page(tpu_predictions.kept()), encoding="utf-8")


def run(name: str, measurement: Measurement) -> None:
    for command in measurement.commands:
        script, *options = shlex.split(command.format(name=name))
        print(f"== {name}: {command.format(name=name)}", flush=True)
        subprocess.run([sys.executable, f"benchmarks/{script}", *options], cwd=ROOT, check=False)
    subprocess.run([sys.executable, __file__, "--pages"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of results' names")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="nothing else runs: measure times too")
    parser.add_argument("--pages", action="store_true")
    options = parser.parse_args()
    if options.pages:
        write_pages()
        return
    for name, measurement in stale():
        if options.names and not any(part in name for part in options.names):
            continue
        runs = not measurement.needs and (options.quiet or not measurement.timed)
        if options.run and runs:
            run(name, measurement)
            continue
        remarks = ["quiet machine"] * measurement.timed + [measurement.needs]
        commands = "; ".join(measurement.commands).format(name=name)
        print(f"{name}: {commands} ({', '.join(filter(None, remarks)) or 'any machine'})")


if __name__ == "__main__":
    main()
