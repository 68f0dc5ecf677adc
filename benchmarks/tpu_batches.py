"""Which batch of which model fits which TPU: the TPU compiler's answers, without a TPU.

    python benchmarks/tpu_batches.py [--only NAME ...] [--target v5e-1] [--minutes 30] [--again]

Each model is one `tpukit probe-batch --target`. Results are kept in results/tpu_batches.json as
they come: what is there is not asked again without --again, so that a stopped run goes on. A model
that takes longer than --minutes is recorded as such. Prints the tables of docs/lab/tpu_batches.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recorded import RESULTS, ROOT, measured, table, write_result
from tpu_models import write_encoder

RESULT = RESULTS / "tpu_batches.json"
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
ENCODERS: Mapping[str, str] = {
    "DeBERTa-v3-base, --task text, 512 tokens": "deberta-v3-base",
    "ModernBERT-base, --task text, 512 tokens": "modernbert-base",
}
"""The text task's, for a v5e-8 too."""


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
    if "error" in answer:
        return answer
    return {
        "commit": measured()["commit"],
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
    return json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}


def shown(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the printed table."""
    if "error" in row:
        return {"model": name, "parameters": row["error"]}
    batch, step = row["recommended"], row["step"]
    memory, seconds = sum((row["memory"] or {}).values()), step["estimate_seconds"]
    return {
        "model": name,
        "parameters": f"{row['parameters'] / 1e6:.0f} M",
        "recommended": batch,
        "largest": row["largest"],
        "memory at the recommended": f"{memory / GIB:.1f} of {row['limit_bytes'] / GIB:.2f} GiB",
        "TFLOP a sample": f"{step['flops'] / batch / 1e12:.3f}",
        "estimated step": f"{1000 * seconds:.0f} ms",
        "samples/s": f"{batch / seconds:.0f}",
        "compilations": row["compiles"] or "cached",
        "asked": row["asked"],
    }


def asked_models(target: str) -> Iterator[tuple[str, list[str]]]:
    """Names, and arguments of `probe-batch`; a folder of a model is there while it is asked."""
    yield from (SHARDED if target.endswith("-8") else MODELS).items()
    for name, encoder in ENCODERS.items():
        with tempfile.TemporaryDirectory(prefix=f"{encoder}-") as folder:
            write_encoder(Path(folder), encoder)
            given = ["--set", f"model={folder}", "--max-length", "512"]
            start = ["--start", str(TEXT_START)]
            yield name, ["--task", "text", "--data-path", "/nonexistent", *given, *start]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="models by their names here")
    parser.add_argument("--target", default="v5e-1")
    parser.add_argument("--minutes", type=float, default=30.0, help="longest time for a model")
    parser.add_argument("--again", action="store_true", help="also models that were asked")
    options = parser.parse_args()
    for name, words in asked_models(options.target):
        key = f"{name} | {options.target}"
        left_out = options.only is not None and name not in options.only
        if left_out or (key in kept() and not options.again):
            continue
        found = row(words, options.target, options.minutes)
        write_result(RESULT, {"rows": {**kept(), key: found}})
    for target in sorted({key.split(" | ")[1] for key in kept()}):
        rows = [shown(key.split(" | ")[0], row) for key, row in kept().items()
                if key.endswith(f" | {target}")]  # fmt: skip
        print(f"\n## {target}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
