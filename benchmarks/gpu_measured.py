"""Memory of training steps measured on the GPU here, beside what `--target` would have predicted.

    python benchmarks/gpu_measured.py [--only gpt2] [--at-once 5]
    python benchmarks/gpu_measured.py --predict h200    # anew for what was measured, without a GPU

Each case is one trial of `tpukit probe-batch` at one batch: the engine's own step in a process of
its own, then the prediction of the memory that torch reserves (`predicted_first`; `--predict` makes
`predicted_bytes` anew). `then`, by hand, says of a step how it differed from today's. Memory is the
allocator's peak, so that several cases may share the GPU; their samples a second are no
measurements of speed then.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import Any

from recorded import RESULTS, table, write_result

RESULT = RESULTS / "gpu_measured.json"
MODELS = Path(__file__).with_name("gpu_memory_models.py")
PICTURE = ("--input", "x=3x224x224")
TEXT = ("--input", "input_ids=512:int64<30000", "--input", "labels=scalar:int64")
WITHIN = 0.05
"""How far the upper end of a prediction lies above it."""
LIMITED = ("fits", "measured_bytes", "samples_per_second", "error")
TOKENS = ("--input", "input_ids=1024:int64<32000", "--input", "labels=1024:int64<32000")


def bare(function: str, *settings: str) -> tuple[str, ...]:
    given = (part for setting in settings for part in ("--set", setting))
    return ("--model", f"{MODELS}:{function}", *given)


def language(model: str, *settings: str) -> tuple[str, ...]:
    given = (f"model={model}", "block_size=1024", *settings)
    return ("--task", "llm", *(part for setting in given for part in ("--set", setting)))


CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "eit published": (32, "bf16", ("--task", "eit")),
    "eit published fp32": (16, "fp32", ("--task", "eit")),
    "eit small fp16": (128, "fp16", ("--task", "eit", "--size", "small")),
    "images resnet50": (96, "bf16", ("--task", "images", "--set", "model=resnet50")),
    "images vit_base fp16": (48, "fp16", ("--task", "images",
                                          "--set", "model=vit_base_patch16_224")),
    "images convnext_tiny fp32": (32, "fp32", ("--task", "images", "--set", "model=convnext_tiny")),
    "images efficientnet_b0": (96, "bf16", ("--task", "images", "--set", "model=efficientnet_b0")),
    "gpt2": (8, "bf16", language("gpt2")),
    "gpt2 fp16": (8, "fp16", language("gpt2")),
    "qwen3-0.6b lora": (8, "bf16", language("Qwen3-0.6B", "lora_rank=16")),
    "qwen3-0.6b nf4": (8, "bf16", language("Qwen3-0.6B", "lora_rank=16", "weights=nf4")),
    "qwen3-0.6b recompute": (8, "bf16", language("Qwen3-0.6B", "recompute=true")),
    "gemma-3-270m": (8, "bf16", language("Gemma-3-270M")),
    "smollm2-360m fp32": (4, "fp32", language("SmolLM2-360M")),
    "bare resnet50 fp32": (64, "fp32", (*bare("vision", "name=resnet50"), *PICTURE)),
    "bare swin_tiny": (64, "bf16", (*bare("vision", "name=swin_tiny_patch4_window7_224"),
                                    *PICTURE)),
    "bare mobilenetv3": (128, "fp16", (*bare("vision", "name=mobilenetv3_large_100"), *PICTURE)),
    "bare bert-base": (32, "bf16", (*bare("classifier", "kind=bert"), *TEXT)),
    "bare distilbert fp32": (16, "fp32", (*bare("classifier", "kind=distilbert"), *TEXT)),
    "bare transformers gpt2": (8, "fp16", (*bare("language_model", "kind=gpt2"), *TOKENS)),
}  # fmt: skip


def measure(name: str, hw: str, *, compiled: bool) -> dict[str, Any]:
    """One case's peak and its prediction, or the error that it ended with.

    Where it took more than predicted, it is tried again with no more memory than that: cuDNN takes
    what is free for the fastest of its algorithms, and does with less.
    """
    row = trial(name, hw, compiled, {})
    row["off"] = off(row)
    if row["off"] is not None and row["off"] < -WITHIN:
        limit = int(row["predicted_bytes"] * (1 + WITHIN))
        again = trial(name, hw, compiled, {"--memory-limit": str(limit)})
        row["limited"] = {"limit_bytes": limit, **{k: again[k] for k in LIMITED if k in again}}
    return row


def trial(name: str, hw: str, compiled: bool, options: dict[str, str]) -> dict[str, Any]:
    batch, precision, arguments = CASES[name]
    command = [
        sys.executable, "-m", "tpukit", "probe-batch", "--hw", hw, "--devices", "1", "--json",
        "--start", str(batch), "--max", str(batch), "--precision", precision, *arguments,
        *(() if "--model" in arguments else ("--set", f"compile={str(compiled).lower()}")),
        *(part for option in options.items() for part in option),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    case = {"name": name, "batch": batch, "precision": precision}
    if not done.stdout.strip():
        return {**case, "error": done.stderr.strip()[-2000:]}
    found = json.loads(done.stdout)
    if not found.get("trials"):
        return {**case, "error": found.get("error") or found}
    tried, *_ = found["trials"]
    predicted = tried.get("predicted") or {}
    return {
        **case,
        "fits": tried["fits"],
        "measured_bytes": tried["used_bytes"],
        "predicted_first": predicted.get("used_bytes"),
        "predicted_bytes": predicted.get("used_bytes"),
        "samples_per_second": tried["samples_per_second"],
        "error": tried["error"],
    }


def predict_again(path: Path, target: str) -> None:
    """Today's prediction of each case, but of steps that are no longer computed so."""
    found = json.loads(path.read_text())
    for row in found["cases"]:
        if row.get("measured_bytes") and "then" not in row:
            row["predicted_bytes"] = predicted_bytes(row["name"], target)
            row["off"] = off(row)
            print(row["name"], row["off"], flush=True)
    write_result(path, {**found, "median_off": median_off(found["cases"])})


def predicted_bytes(name: str, target: str) -> int:
    """What torch would reserve on a target, without CUDA's context."""
    batch, precision, arguments = CASES[name]
    command = [
        sys.executable, "-m", "tpukit", "probe-batch", "--target", target, "--json",
        "--start", str(batch), "--max", str(batch), "--precision", precision, *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    return answer["trials"][0]["used_bytes"] - answer["memory"]["context"]


def median_off(rows: Sequence[dict[str, Any]]) -> float | None:
    """Of the steps that are still computed as they were measured."""
    offs = [abs(r["off"]) for r in rows if r.get("off") is not None and "then" not in r]
    return median(offs) if offs else None


def off(row: dict[str, Any]) -> float | None:
    """How far the prediction is above the measurement."""
    if not row.get("predicted_bytes") or not row.get("measured_bytes"):
        return None
    return row["predicted_bytes"] / row["measured_bytes"] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--hw", default="gpu", choices=["cpu", "gpu"])
    parser.add_argument("--compile", action="store_true", help="of the tasks' cases")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--predict", metavar="TARGET")
    options = parser.parse_args()
    if options.predict:
        predict_again(options.out, options.predict)
        return
    import torch

    names = [name for name in CASES if options.only in name]
    rows: list[dict[str, Any]] = []
    run = functools.partial(measure, hw=options.hw, compiled=options.compile)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    with ThreadPoolExecutor(options.at_once) as pool:
        for done in as_completed([pool.submit(run, name) for name in names]):
            rows.append(done.result())
            print(rows[-1], flush=True)
            found = {
                "device": device,
                "compiled": options.compile,
                "median_off": median_off(rows),
                "cases": sorted(rows, key=lambda row: names.index(row["name"])),
            }
            write_result(options.out, found)
    columns = ("name", "batch", "precision", "measured_bytes", "predicted_bytes", "off")
    print(table([{name: row.get(name, "") for name in columns} for row in found["cases"]]))


if __name__ == "__main__":
    main()
