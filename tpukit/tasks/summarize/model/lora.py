"""LoRA (Hu et al., 2021): low-rank updates beside frozen matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpukit.errors import ConfigError
from tpukit.tasks.summarize.model.decoder import LanguageModel

TARGETS = {
    "qkv": "qkv",
    "attention_out": "attention_out",
    "mlp_in": "mlp_in",
    "mlp_out": "mlp_out",
    # Hugging Face's names for the same.
    "c_attn": "qkv",
    "c_fc": "mlp_in",
}


@dataclass(frozen=True)
class LoraConfig:
    """Which matrices are adapted, and how."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("qkv",)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def parse_targets(text: str) -> tuple[str, ...]:
    """`qkv,mlp_in` to names of a block's matrices."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TARGETS]
    if unknown or not names:
        raise ConfigError(
            f"lora_targets: {', '.join(unknown) or 'nothing'} is not a matrix of a block.",
            f"Choose among {', '.join(TARGETS)}.",
        )
    return tuple(dict.fromkeys(TARGETS[name] for name in names))


class LoraLinear(nn.Module):
    """A frozen linear layer plus scale * up(down(x)); it starts as the layer alone."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(x, self.down), self.up)
        return F.linear(x, self.weight, self.bias) + self.scale * update


def add_lora(model: LanguageModel, config: LoraConfig) -> None:
    """Freezes the model and puts adapters beside the targets of every block."""
    model.requires_grad_(False)
    for block in model.blocks:
        for target in config.targets:
            base = getattr(block, target)
            setattr(block, target, LoraLinear(base, config.rank, config.scale))


def merge_lora(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """A checkpoint's tensors with the adapters added to their matrices; the same without any."""
    merged = {n: t for n, t in tensors.items() if not n.endswith((".down", ".up"))}
    for name, up in tensors.items():
        if name.endswith(".up"):
            base = name.removesuffix(".up")
            update = up.double() @ tensors[f"{base}.down"].double()
            weight = merged[f"{base}.weight"]
            merged[f"{base}.weight"] = (weight.double() + scale * update).to(weight.dtype)
    return merged
