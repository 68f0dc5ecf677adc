"""LoRA (Hu et al., 2021): low-rank updates beside frozen matrices."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.summarize.model.decoder import DecoderConfig, LanguageModel
from tpukit.tasks.summarize.model.families import FAMILIES, their_name

TARGETS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("qkv", "query", "key", "value"),
    **{name: (name,) for name in ("query", "key", "value", "attention_out", "mlp_gate", "mlp_out")},
    "mlp_in": ("mlp_in", "mlp_gate"),
    # Hugging Face's names for the same.
    "c_attn": ("qkv",), "c_fc": ("mlp_in",), "qkv_proj": ("qkv",), "q_proj": ("query",),
    "k_proj": ("key",), "v_proj": ("value",), "o_proj": ("attention_out",),
    "gate_proj": ("mlp_gate",), "up_proj": ("mlp_in",), "down_proj": ("mlp_out",),
    "gate_up_proj": ("mlp_in",),
}  # fmt: skip
"""What a name stands for: matrices of a block, those that its family has."""
PEFT_NAMES = {"down": "lora_A", "up": "lora_B"}
"""Our adapters' matrices as `peft` calls them."""
OTHER_KINDS = (
    "use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "use_qalora",
    "use_bdlora", "kasa_config", "lora_ga_config", "alora_invocation_tokens", "layer_replication",
)  # fmt: skip
"""Fields of peft that make other updates of the same tensors."""


@dataclass(frozen=True)
class LoraConfig:
    """Which matrices are adapted, and how."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("qkv",)
    dropout: float = 0.0
    layers: tuple[int, ...] | None = None
    """Numbers of the blocks that are adapted, from 0; None: all."""

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
    return tuple(dict.fromkeys(module for name in names for module in TARGETS[name]))


def parse_layers(text: str) -> tuple[int, ...]:
    """`0,8-15` to the numbers of blocks."""
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ConfigError(
                f"lora_layers: {part!r} is neither a layer nor a range of them.",
                "Give numbers from 0 and ranges, such as 0,8-15.",
            )
        layers |= {*range(int(found[1]), int(found[2] or found[1]) + 1)}
    return tuple(sorted(layers))


class LoraLinear(nn.Module):
    """A frozen linear layer plus scale * up(down(x)); it starts as the layer alone."""

    weights_in_half = ("weight", "bias", "down", "up")

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.weight = base.weight
        self.bias = base.bias
        # As peft begins: its rates are ours.
        limit = base.in_features**-0.5
        self.down = nn.Parameter(torch.empty(rank, base.in_features).uniform_(-limit, limit))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        seen = F.dropout(x, self.dropout, self.training) if self.dropout else x
        update = F.linear(F.linear(seen.to(self.down.dtype), self.down), self.up)
        result = F.linear(x, self.weight, self.bias)
        return result + (self.scale * update).to(result.dtype)


def add_lora(model: LanguageModel, config: LoraConfig) -> None:
    """Freezes the model and puts fp32 adapters beside the targets of its blocks."""
    model.requires_grad_(False)
    layers = range(len(model.blocks)) if config.layers is None else config.layers
    if layers and layers[-1] >= len(model.blocks):
        raise ConfigError(
            f"lora_layers: there is no layer {layers[-1]}.",
            f"The model has layers 0 to {len(model.blocks) - 1}.",
        )
    for block in (model.blocks[number] for number in layers):
        for target in config.targets:
            base = getattr(block, target, None)
            if base is not None:
                adapted = LoraLinear(base, config.rank, config.scale, config.dropout)
                setattr(block, target, adapted)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"lora_targets: a {model.config.family} has no {', '.join(config.targets)}.",
            "Choose qkv, attention_out, mlp_in or mlp_out.",
        )


def merge_lora(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """A checkpoint's tensors with the adapters added to their matrices, in fp32: in bf16 most of an
    update would be rounded away. The same without any."""
    merged = {n: t for n, t in tensors.items() if not n.endswith((".down", ".up"))}
    for name, up in tensors.items():
        if name.endswith(".up"):
            base = name.removesuffix(".up")
            update = up.double() @ tensors[f"{base}.down"].double()
            weight = merged[f"{base}.weight"].double()
            merged[f"{base}.weight"] = (weight + scale * update).float()
    return merged


def peft_adapter(
    tensors: Mapping[str, Tensor], lora: LoraConfig, config: DecoderConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The adapters among a checkpoint's tensors as `peft` has them: weights and configuration."""
    family, weights, modules = FAMILIES[config.family], {}, set()
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind in PEFT_NAMES:
            theirs = their_name(family, base)
            modules.add(theirs.rpartition(".")[2])
            weights[f"base_model.model.{theirs}.{PEFT_NAMES[kind]}.weight"] = tensor.contiguous()
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout, "target_modules": sorted(modules), "bias": "none",
        "fan_in_fan_out": config.family == "gpt2", "inference_mode": True,
        "layers_to_transform": lora.layers and list(lora.layers),
    }  # fmt: skip
    return weights, fields


def load_adapter(model: LanguageModel, folder: Path, lora: LoraConfig) -> None:
    """Puts the adapters of a PEFT directory into a model with LoRA of the same kind.

    Raises `DataError` where it cannot be read, `ConfigError` where it is of another kind.
    """
    try:
        fields = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors, found = read_adapter(
            load_file(folder / "adapter_model.safetensors"), fields, model.config
        )
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise DataError(
            f"Cannot read the adapter {folder}: {error}.",
            "lora_init takes a directory that peft saved (adapter_config.json and weights).",
        ) from error
    state = model.state_dict().items()
    own = {name: tensor.shape for name, tensor in state if name.rpartition(".")[2] in PEFT_NAMES}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if (found.rank, found.alpha, shapes) != (lora.rank, lora.alpha, own):
        raise ConfigError(
            f"The adapter {folder} has rank {found.rank}, alpha {found.alpha}, targets"
            f" {','.join(found.targets)} and layers {','.join(map(str, found.layers or ()))}.",
            "Give lora_rank, lora_alpha, lora_targets and lora_layers the same values, and the"
            " weights that it was trained beside.",
        )
    model.load_state_dict(tensors, strict=False)


def read_adapter(
    weights: Mapping[str, Tensor], fields: Mapping[str, Any], config: DecoderConfig
) -> tuple[dict[str, Tensor], LoraConfig]:
    """What `peft` wrote, under our names. Raises `DataError` for what tpukit's LoRA has not."""
    # Other starts (PiSSA) take a part out of the weights.
    start = fields.get("init_lora_weights", True)
    others = [name for name in OTHER_KINDS if fields.get(name)]
    if others or start not in (True, False, "gaussian", "eva", "orthogonal"):
        name = others[0] if others else f"init_lora_weights {start!r}"
        raise DataError(f"adapter_config.json: {name} is not known.", "Merge it with peft.")
    family, kinds = FAMILIES[config.family], {theirs: ours for ours, theirs in PEFT_NAMES.items()}
    known = {theirs: ours for ours, theirs in family.block.items()}
    tensors, modules, layers = {}, [], set()
    for name, tensor in weights.items():
        plain = name.removeprefix("base_model.model.")
        path, kind = plain.removesuffix(".weight").rsplit(".", 1)
        layer = re.match(re.escape(family.layer).replace(r"\{\}", r"(\d+)"), path)
        module = known.get(path[layer.end() :]) if layer else None
        if layer is None or module is None or kind not in kinds:
            raise DataError(f"The adapter has an unknown tensor {name!r}.", "Give one of LoRA.")
        tensors[f"blocks.{layer[1]}.{module}.{kinds[kind]}"] = tensor.float()
        modules.append(module)
        layers.add(int(layer[1]))
    found = tuple(dict.fromkeys(modules))
    dropout = fields.get("lora_dropout", 0.0)
    return tensors, LoraConfig(
        fields["r"], fields["lora_alpha"], found, dropout, tuple(sorted(layers))
    )
