"""Seconds of a whole `probe-batch --target t4` for ten models, start-up included.

    python benchmarks/gpu_search_seconds.py

Wall-clock seconds count what else the machine does: processor seconds and the load stand beside.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from deciding_code import write_result

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gpu_search_seconds.json"
PICTURE = ["x=3x224x224"]
TEXT = ["input_ids=512:int64<30000", "labels=scalar:int64"]
TOKENS = ["input_ids=1024:int64<32000", "labels=1024:int64<32000"]
MODELS = {
    "gpt2": ("language_model", {"kind": "gpt2"}, TOKENS),
    "resnet50": ("vision", {"name": "resnet50"}, PICTURE),
    "vit_base_patch16_224": ("vision", {"name": "vit_base_patch16_224"}, PICTURE),
    "convnext_tiny": ("vision", {"name": "convnext_tiny"}, PICTURE),
    "efficientnet_b0": ("vision", {"name": "efficientnet_b0"}, PICTURE),
    "swin_tiny": ("vision", {"name": "swin_tiny_patch4_window7_224"}, PICTURE),
    "mobilenetv3_large_100": ("vision", {"name": "mobilenetv3_large_100"}, PICTURE),
    "bert-base": ("classifier", {"kind": "bert"}, TEXT),
    "distilbert": ("classifier", {"kind": "distilbert"}, TEXT),
    "qwen2-0.5b": ("language_model", {"kind": "qwen2"}, TOKENS),
}
QWEN2 = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def vision(name: str) -> Any:
    """timm's model."""
    import timm

    return timm.create_model(name)


def language_model(kind: str) -> Any:
    """transformers' causal language model."""
    import transformers

    settings = QWEN2 if kind == "qwen2" else {}
    config = transformers.AutoConfig.for_model(kind, **settings)
    return transformers.AutoModelForCausalLM.from_config(config)


def classifier(kind: str) -> Any:
    """transformers' encoder with a classifier."""
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def search(function: str, settings: dict[str, str], inputs: list[str]) -> dict[str, Any]:
    """One search from the command line."""
    tpukit = Path(sys.executable).with_name("tpukit")
    command = [str(tpukit), "probe-batch", "--model", f"{Path(__file__)}:{function}", "--json",
               "--target", "t4"]  # fmt: skip
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    for spec in inputs:
        command += ["--input", spec]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout)
    return {
        "seconds": seconds,
        "processor_seconds": sum(
            getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime")
        ),
        "load": os.getloadavg()[0],
        "trials": len(found["trials"]),
        "largest": found["largest_batch_per_device"],
        "recommended": found["recommended_batch_per_device"],
    }


def main() -> None:
    import timm
    import torch
    import transformers

    rows = []
    for name, (function, settings, inputs) in MODELS.items():
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            rows.append({"model": name, **search(function, settings, inputs)})
            print(rows[-1], flush=True)
    libraries = (torch, transformers, timm)
    found = {
        "median_seconds": statistics.median(row["seconds"] for row in rows),
        "median_processor_seconds": statistics.median(row["processor_seconds"] for row in rows),
        "cores": os.cpu_count(),
        "models": rows,
        "versions": {library.__name__: library.__version__ for library in libraries},
    }
    write_result(RESULT, found)


if __name__ == "__main__":
    main()
