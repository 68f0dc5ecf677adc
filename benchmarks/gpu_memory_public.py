"""Predicted against publicly measured peaks of training steps on GPUs.

    python benchmarks/gpu_memory_public.py [--only bert] [--kept]

`gpu_memory_measurements.toml` names each measurement: its settings, its source and what was
measured there. `--kept` keeps the results of measurements that are not asked for. A loop that keeps
its gradients through the forward pass (`zero_grad` after it, or zeros instead of None) holds what a
second micro-batch of an accumulation holds: `gradients_stay`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deciding_code import write_result

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS = ROOT / "benchmarks" / "gpu_memory_measurements.toml"
RESULT = ROOT / "benchmarks" / "results" / "gpu_memory_public.json"
UNITS = {"GB": 1e9, "GiB": 2**30, "MB": 1e6, "MiB": 2**20}


@dataclass(frozen=True)
class Measurement:
    """One measured peak and the settings of its run."""

    name: str
    source: str
    """Address."""
    versions: str
    target: str
    model: str
    """A function of this module."""
    inputs: list[str]
    rows: int
    counts: str
    """allocated, reserved (torch.cuda's peaks) or driver (nvidia-smi)."""
    measured: float
    unit: str
    predicted_first: bool
    """Whether the prediction was written down before the figure was looked at."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model's function."""
    train: dict[str, Any] = field(default_factory=dict)
    """Settings of training that differ from the defaults below."""
    accumulate: int = 1
    gradients_stay: bool = False
    context: float | None = None
    """What the source found before training, in `unit`; else the target's."""
    note: str = ""


# -- the models ----------------------------------------------------------------------------------
def torchvision_vit(name: str, dtype: str = "float32", **settings: Any) -> Any:
    """torchvision's vision transformer with ten classes and its loss."""
    import torch
    import torchvision
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torchvision.models.get_model(name, num_classes=10, **settings)

        def forward(self, x: Any, y: Any) -> Any:
            return {"loss": nn.functional.cross_entropy(self.body(x), y)}

    return Classifier().to(getattr(torch, dtype))


def transformers_model(
    model: str, auto: str, dtype: str = "float32", checkpointing: bool = False, **config: Any
) -> Any:
    """transformers' model of an architecture with random weights."""
    import torch
    import transformers

    attention = config.pop("attention", None)
    found = transformers.AutoConfig.for_model(model, **config)
    if attention:
        found._attn_implementation = attention
    built = getattr(transformers, auto).from_config(found)
    if checkpointing:
        built.gradient_checkpointing_enable()
    return built.to(getattr(torch, dtype))


def gpt(
    native: bool = True, fused: bool = True, dtype: str = "float32", vocabulary: int = 50257,
    length: int = 1024, width: int = 768, heads: int = 12, layers: int = 12, dropout: float = 0.1,
    mask: bool = False,
) -> Any:  # fmt: skip
    """A GPT of separate embeddings and head; without `native`, LayerNorm and GELU by formulas."""
    import math

    import torch
    from torch import nn

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(width))
            self.shift = nn.Parameter(torch.zeros(width))

        def forward(self, x: Any) -> Any:
            mean = x.mean(-1, keepdim=True)
            variance = x.var(-1, keepdim=True, unbiased=False)
            return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift

    class Gelu(nn.Module):
        def forward(self, x: Any) -> Any:
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
            return 0.5 * x * (1 + torch.tanh(inner))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if fused:
                self.qkv = nn.Linear(width, 3 * width, bias=False)
            else:
                self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
            if mask:
                self.register_buffer("mask", torch.triu(torch.ones(length, length), 1))
            self.out = nn.Linear(width, width)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: Any) -> Any:
            rows, count, _ = x.shape
            if fused:
                q, k, v = self.qkv(x).view(rows, count, 3, heads, -1).permute(2, 0, 3, 1, 4)
                y = nn.functional.scaled_dot_product_attention(
                    q, k, v, dropout_p=dropout if self.training else 0.0, is_causal=True
                )
            else:
                q, k, v = (
                    p(x).view(rows, count, heads, -1).transpose(1, 2)
                    for p in (self.q, self.k, self.v)
                )
                scores = q @ k.transpose(2, 3)
                later = self.mask if mask else torch.triu(torch.ones(count, count), 1)
                scores.masked_fill_(later.bool()[:count, :count], -math.inf)
                shares = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, -1))
                y = shares @ v
            return self.out(y.transpose(1, 2).contiguous().view(rows, count, width))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = functools.partial(nn.LayerNorm, width) if native else Norm
            self.first, self.second = norm(), norm()
            self.attention = Attention()
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width),
                nn.GELU(approximate="tanh") if native else Gelu(),
                nn.Linear(4 * width, width),
            )
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: Any) -> Any:
            x = x + self.dropout(self.attention(self.first(x)))
            return x + self.dropout(self.mlp(self.second(x)))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.places = nn.Embedding(length, width)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
            self.norm = nn.LayerNorm(width) if native else Norm()
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
            logits = self.head(self.norm(self.blocks(self.dropout(x))))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    return Gpt().to(getattr(torch, dtype))


# -- the comparison ------------------------------------------------------------------------------
def predict(measurement: Measurement) -> dict[str, Any]:
    """The prediction of `probe-batch --model` for the settings of a measurement."""
    from tpukit.probe.batch.model_task import ModelTask
    from tpukit.probe.gpu_memory.traced_trial import TracedTrials
    from tpukit.probe.targets import find_gpu
    from tpukit.probe.trial import TrialRequest
    from tpukit.train.config import TrainConfig

    made: Callable[..., Any] = functools.partial(globals()[measurement.model], **measurement.settings)
    task = ModelTask(made, measurement.inputs, {})
    config = TrainConfig(**{"precision": "fp32", "clip_norm": 0.0, **measurement.train})
    accumulate = max(measurement.accumulate, 2 if measurement.gradients_stay else 1)
    target = find_gpu(measurement.target)
    assert target is not None
    started = time.monotonic()
    trial = TracedTrials(task, config, target).run(TrialRequest(measurement.rows, accumulate))
    beside = trial.memory["context"] + trial.memory["nccl"]
    reserved = trial.used_bytes - beside
    low, high = trial.used_range
    return {
        "allocated": trial.allocated_bytes, "reserved": reserved, "driver": trial.used_bytes,
        "beside": beside, "range": [low, high], "fits": trial.fits,
        "parameters": trial.parameters, "memory": dict(trial.memory),
        "seconds": time.monotonic() - started,
    }  # fmt: skip


def compare(measurement: Measurement) -> dict[str, Any]:
    """A measurement's row."""
    found = predict(measurement)
    unit = UNITS[measurement.unit]
    predicted = found[measurement.counts]
    if measurement.counts == "driver" and measurement.context is not None:
        predicted = found["reserved"] + measurement.context * unit
    row = {
        "name": measurement.name, "source": measurement.source, "versions": measurement.versions,
        "target": measurement.target, "counts": measurement.counts,
        "predicted_first": measurement.predicted_first, "predicted_bytes": int(predicted),
        "note": measurement.note, **found,
    }  # fmt: skip
    if measurement.measured:
        row["measured_bytes"] = int(measurement.measured * unit)
        row["error"] = predicted / row["measured_bytes"] - 1
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--kept", action="store_true")
    options = parser.parse_args()
    os.environ.update(USE_TORCH_XLA="0", PJRT_DEVICE="CPU")
    import timm
    import torch
    import torchvision
    import transformers

    asked = [Measurement(**row) for row in tomllib.loads(MEASUREMENTS.read_text())["measurement"]]
    rows = []
    known = {}
    if options.kept and RESULT.is_file():
        known = {row["name"]: row for row in json.loads(RESULT.read_text())["measurements"]}
    for measurement in asked:
        if options.only in measurement.name:
            row = compare(measurement)
            error = f"{row['error']:+.1%}" if "error" in row else "not looked at"
            print(f"{row['name']:40} {row['predicted_bytes'] / 2**30:7.2f} GiB"
                  f" (alloc {row['allocated']/2**30:.2f}) {error} {row['seconds']:.0f} s", flush=True)  # fmt: skip
            known[measurement.name] = row
        if measurement.name in known:
            rows.append(known[measurement.name])
    errors = sorted(abs(row["error"]) for row in rows if "error" in row) or [0.0]
    found = {
        "median_error": statistics.median(errors), "largest_error": errors[-1],
        "measurements": rows,
        "versions": {m.__name__: m.__version__ for m in (torch, torchvision, transformers, timm)},
    }  # fmt: skip
    write_result(RESULT, found)
    print(f"{len(errors)}: median {found['median_error']:.1%}, largest {found['largest_error']:.1%}")


if __name__ == "__main__":
    main()
