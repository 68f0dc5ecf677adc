"""Which batch of which model fits which TPU: the TPU compiler's answers, without a TPU.

    python benchmarks/tpu_batches.py [--only NAME ...] [--target v5e-1] [--minutes 30] [--page]

Each model is one `tpukit probe-batch --target`. Results are kept in results/tpu_batches.json as
they come: what is there and not stale is not asked again, so that a stopped run goes on. A
model that takes longer than --minutes is recorded as such. --page writes
docs/lab/tpu_batches.md from the file.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deciding_code import EXPLANATION, code_of, mark, task_of, write_result

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "tpu_batches.json"
PAGE = ROOT / "docs" / "lab" / "tpu_batches.md"
GIB = 2**30
IMAGE_START, TEXT_START = 32, 8


def image(model: str) -> list[str]:
    return ["--task", "images", "--set", f"model={model}", "--start", str(IMAGE_START)]


def text(name: str, tokens: int = 512, vocabulary: int = 30000) -> list[str]:
    factory = f"{ROOT / 'benchmarks' / 'tpu_models.py'}:make_text_model"
    return ["--model", factory, "--set", f"name={name}", "--start", str(TEXT_START),
            "--input", f"input_ids={tokens}:int64<{vocabulary}"]  # fmt: skip


def language(name: str, tokens: int, *more: str, start: int = 4) -> list[str]:
    """A language model from random weights; rows are `tokens` long, a tenth of them targets."""
    return ["--task", "llm", "--data-path", "/nonexistent", "--model", name, "--block-size",
            str(tokens), "--start", str(start), *more]  # fmt: skip


LORA = ("--lora-rank", "16", "--lora-targets", "qkv,attention_out,mlp_in,mlp_out")
LANGUAGE: Mapping[str, list[str]] = {
    f"{name}, {tokens} tokens{way}": language(name, tokens, *options)
    for name in ("Gemma-3-270M", "SmolLM2-360M", "Qwen3-0.6B", "Gemma-3-1B", "Llama-3.2-1B",
                 "Qwen3-1.7B")
    for tokens in (1024, 2048)
    for way, options in (("", ()), (", LoRA", LORA))
}  # fmt: skip
MODELS: Mapping[str, list[str]] = {
    "ResNet-50": image("resnet50"),
    "EfficientNet-B0": image("efficientnet_b0"),
    "ConvNeXt-T": image("convnext_tiny"),
    "ViT-B/16": image("vit_base_patch16_224"),
    "Swin-T": image("swin_tiny_patch4_window7_224"),
    "BERT base, 512 tokens": text("bert"),
    "GPT-2 124M, 1024 tokens": ["--task", "llm"],
    "DeBERTa-v3 base, 512 tokens": text("deberta-v3-base"),
    "ViT-S/16": image("vit_small_patch16_224"),
    "EfficientNetV2-S": image("tf_efficientnetv2_s"),
    "EfficientNet-B4": image("efficientnet_b4"),
    "ConvNeXt-B": image("convnext_base"),
    "DeiT3-S/16": image("deit3_small_patch16_224"),
    "MobileNetV4 conv medium": image("mobilenetv4_conv_medium"),
    "ViT-L/16": image("vit_large_patch16_224"),
    "Swin-B": image("swin_base_patch4_window7_224"),
    "RoBERTa base, 512 tokens": text("roberta"),
    "DeBERTa-v3 small, 512 tokens": text("deberta-v3-small"),
    "DeBERTa-v3 large, 512 tokens": text("deberta-v3-large"),
    "MaxViT-T": image("maxvit_tiny_tf_224"),
    "EVA-02 S/14, 336": image("eva02_small_patch14_336"),
    **LANGUAGE,
}
SHARDED: Mapping[str, list[str]] = {
    "Llama 1B, 1024 tokens, --shard": [*text("llama-1b", 1024, 128256), "--shard"],
    **{f"{name}, --shard": [*words, "--shard"] for name, words in LANGUAGE.items()},
}
"""For a v5e-8."""


def ask(words: list[str], target: str, minutes: float) -> dict[str, Any]:
    """The JSON object of `tpukit probe-batch`, or `{"error": TEXT}`."""
    command = [sys.executable, "-m", "tpukit", "probe-batch", *words, "--target", target,
               "--max", "4096", "--json"]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        try:
            output, told = process.communicate(timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            return {"error": f"no answer within {minutes:g} minutes"}
    try:
        answer = json.loads(output)
    except json.JSONDecodeError:
        return {"error": told.strip().splitlines()[-1] if told.strip() else "no output"}
    if "error" in answer:
        return {"error": answer["error"]["message"].replace(f"{ROOT}/", "")}
    return answer


def row(words: list[str], target: str, minutes: float) -> dict[str, Any]:
    """What is kept of a model's answer."""
    started = time.monotonic()
    answer = ask(words, target, minutes)
    code = {"code": code_of(task_of(words))}
    if "error" in answer:
        return {**answer, **code}
    return {
        **code,
        "largest": answer["largest_batch_per_device"],
        "smallest_failed": answer["smallest_failed_batch_per_device"],
        "recommended": answer["recommended_batch_per_device"],
        "parameters": answer["parameters"],
        "memory": answer["memory"],
        "limit_bytes": answer["limit_bytes"],
        "step": answer["step"],
        "trials": [
            {name: trial[name] for name in ("batch", "fits", "used_bytes", "effort", "compiles")}
            for trial in answer["trials"]
        ],
        "compiles": answer["compiles"],
        "seconds": round(time.monotonic() - started),
        "versions": answer["versions"],
        "asked": time.strftime("%Y-%m-%d"),
    }


def kept() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def page(found: Mapping[str, Any]) -> str:
    """docs/lab/tpu_batches.md."""
    lines = [
        "# Which batch fits a TPU",
        "",
        "What the TPU compiler answers, without a TPU: `benchmarks/tpu_batches.py` asks `tpukit"
        " probe-batch --target` for each model at its published size and writes this page"
        " ([JSON](../../benchmarks/results/tpu_batches.json)). Training in bf16 autocast with fp32"
        " weights and AdamW; images of the model's own size, 1,000 classes; rows of language models"
        " have a tenth of their tokens as targets, LoRA is of rank 16 on all matrices. The"
        " recommended batch"
        " leaves 5 % of the memory free; the largest is known within 10 % or fills 90 %. The step"
        " is a roofline estimate: it takes at least that long. Nothing here ran on a TPU."
        f" {EXPLANATION}",
    ]
    for target in sorted({key.split(" | ")[1] for key in found}):
        rows = {k.split(" | ")[0]: v for k, v in found.items() if k.split(" | ")[1] == target}
        versions = next((row["versions"] for row in rows.values() if "versions" in row), {})
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines += [
            "",
            f"## {target}",
            "",
            "| model | parameters | recommended | largest | memory at the recommended | TFLOP a"
            " sample | estimated step | samples/s | compilations | asked |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *(_row(name, row, mark_of(f"{name} | {target}", row)) for name, row in rows.items()),
            "",
            f"Batches are samples a chip. {named}." if named else "Batches are samples a chip.",
            *_not_asked(target, rows),
        ]
    return "\n".join(lines) + "\n"


def _not_asked(target: str, rows: Mapping[str, Any]) -> list[str]:
    """Models of which there is no answer yet: most take 15 to 55 minutes on two cores."""
    missing = [name for name in _models_of(target) if name not in rows]
    return ["", f"Not asked yet: {'; '.join(missing)}."] if missing else []


def _models_of(target: str) -> Mapping[str, list[str]]:
    return SHARDED if target.endswith("-8") else MODELS


def mark_of(key: str, row: Mapping[str, Any]) -> str:
    """What stands behind a stale row's name; the model's words say which code decides it."""
    return mark(row, task_of({**MODELS, **SHARDED}[key.partition(" | ")[0]]))


def _row(name: str, row: Mapping[str, Any], stale: str) -> str:
    if "error" in row:
        return f"| {name}{stale} | {row['error']} | | | | | | | | |"
    batch, step = row["recommended"], row["step"]
    memory, seconds = sum((row["memory"] or {}).values()), step["estimate_seconds"]
    cells = [
        f"{name}{stale}",
        f"{row['parameters'] / 1e6:.0f} M",
        batch,
        row["largest"],
        f"{memory / GIB:.1f} of {row['limit_bytes'] / GIB:.2f} GiB",
        f"{step['flops'] / batch / 1e12:.3f}",
        f"{1000 * seconds:.0f} ms",
        f"{batch / seconds:.0f}",
        row["compiles"] or "cached",
        row["asked"],
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="models by their names here")
    parser.add_argument("--target", default="v5e-1")
    parser.add_argument("--minutes", type=float, default=30.0, help="longest time for a model")
    parser.add_argument("--page", action="store_true", help="only write docs/lab/tpu_batches.md")
    options = parser.parse_args()
    for name, words in _models_of(options.target).items():
        key = f"{name} | {options.target}"
        known = key in kept() and not mark_of(key, kept()[key])
        if options.page or known or (options.only and name not in options.only):
            continue
        found = row(words, options.target, options.minutes)
        write_result(RESULT, {**kept(), key: found})
        print(key, {n: found.get(n) for n in ("recommended", "largest", "compiles", "seconds",
                                              "error")}, flush=True)  # fmt: skip
    PAGE.write_text(page(kept()))


if __name__ == "__main__":
    main()
