"""GPT-2's weights from and to elsewhere: Hugging Face directories, nanoGPT checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tpukit.errors import CheckpointError, ConfigError, DataError
from tpukit.tasks.summarize.data.tokenizer import Tokenizer
from tpukit.tasks.summarize.model.gpt2 import GPT2Config
from tpukit.tasks.summarize.model.transformers_config import (
    WHAT_INIT_TAKES,
    checked_shape,
    fold_score_scales,
    read_shape,
)
from tpukit.train.storage.foreign import describe, read_foreign, state_dict_of

SIZES = {
    "gpt2": GPT2Config(12, 12, 768),
    "gpt2-medium": GPT2Config(24, 16, 1024),
    "gpt2-large": GPT2Config(36, 20, 1280),
    "gpt2-xl": GPT2Config(48, 25, 1600),
}
LARGEST_PADDING = 128
"""Rows a vocabulary may have beyond its tokens: nanoGPT rounds 50257 up to 50304."""

# Ours, Hugging Face's. Hugging Face's matrices in attn and mlp are stored transposed (Conv1D).
BLOCK_NAMES = {
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "norm_2": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
TOP_NAMES = {
    "token_embedding.weight": "wte.weight",
    "position_embedding.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}


@dataclass(frozen=True)
class Pretrained:
    """Weights under tpukit's names, with the shape they belong to."""

    config: GPT2Config
    tensors: dict[str, Tensor]
    source: str


def parse_model_size(text: str) -> GPT2Config:
    """`gpt2`, `gpt2-medium`, ... or LAYERSxHEADSxWIDTH."""
    if text in SIZES:
        return SIZES[text]
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if not match:
        raise ConfigError(
            f"--model {text!r}: invalid size.",
            f"Choose {', '.join(SIZES)}, or LAYERSxHEADSxWIDTH such as 6x6x384.",
        )
    layers, heads, width = (int(part) for part in match.groups())
    if min(layers, heads, width) < 1 or width % heads:
        raise ConfigError(
            f"--model {text}: the width must be a multiple of the heads, and nothing zero.",
            f"For {heads or 1} heads try {layers or 1}x{heads or 1}x{64 * (heads or 1)}.",
        )
    return GPT2Config(layers, heads, width)


def read_pretrained(source: str) -> Pretrained:
    """Weights of a local directory or file, else of the hub. Raises `DataError`."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_nanogpt(path)
    if path.suffix or source.startswith((".", "/", "~")):
        raise DataError(f"--init {source}: there is nothing there.", WHAT_INIT_TAKES)
    return _from_directory(_download(source))


def cropped(pretrained: Pretrained, block_size: int) -> Pretrained:
    """The same weights for a shorter context. Raises `ConfigError` for a longer one."""
    known = pretrained.config.block_size
    if block_size > known:
        raise ConfigError(
            f"--block-size {block_size} is more than the {known} positions of {pretrained.source}.",
            f"Choose at most {known}.",
        )
    tensors = dict(pretrained.tensors)
    tensors["position_embedding.weight"] = tensors["position_embedding.weight"][:block_size].clone()
    return replace(
        pretrained, config=replace(pretrained.config, block_size=block_size), tensors=tensors
    )


def require_vocabulary(pretrained: Pretrained, tokenizer: Tokenizer) -> None:
    """Raises `ConfigError` where the tokenizer's tokens are not those of the weights."""
    have, want = pretrained.config.vocabulary_size, tokenizer.vocabulary_size
    if not want <= have < want + LARGEST_PADDING:
        raise ConfigError(
            f"The tokenizer has {want} tokens, the weights of {pretrained.source} have {have}.",
            "Give the tokenizer the weights were trained with (--tokenizer gpt2, or its file).",
        )


# -- reading ------------------------------------------------------------------------------------
def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        config = hf_hub_download(name, "config.json")
        hf_hub_download(name, "model.safetensors")
    except Exception as error:
        raise DataError(
            f"--init {name}: not a local directory, and the hub did not give it"
            f" ({type(error).__name__}).",
            "Without a network, bring the directory along (config.json and model.safetensors) and"
            " give its path.",
        ) from error
    return Path(config).parent


def _from_directory(path: Path) -> Pretrained:
    fields = _read_json(path / "config.json")
    config = read_shape(fields, path)
    # Some files have `transformer.` before every name.
    plain = {n.removeprefix("transformer."): t for n, t in _read_safetensors(path).items()}
    tensors = _rename(plain, path, config.layers, transposed=True)
    fold_score_scales(tensors, fields, config)
    return Pretrained(config, tensors, str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}, expected an object")
        return content
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {path}: {error}.", WHAT_INIT_TAKES) from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(_read_json(index)["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(path / name)
        except Exception as error:
            raise DataError(
                f"Cannot read {path / name}: {error}.",
                "Only safetensors are read: save the model with safe_serialization=True.",
            ) from error
    return tensors


def _from_nanogpt(path: Path) -> Pretrained:
    try:
        content = read_foreign(path)
    except CheckpointError as error:
        raise DataError(f"--init: {error.message}", WHAT_INIT_TAKES) from error
    model, shape = state_dict_of(content, "model"), _nanogpt_shape(content)
    if model is None or shape is None:
        raise DataError(
            f"--init {path} is not a nanoGPT checkpoint: it holds {describe(content)}.",
            WHAT_INIT_TAKES,
        )
    config = checked_shape(shape, path)
    plain = {
        name.removeprefix("_orig_mod.").removeprefix("transformer."): tensor.float()
        for name, tensor in model.items()
    }
    return Pretrained(config, _rename(plain, path, config.layers, transposed=False), str(path))


def _nanogpt_shape(content: Any) -> dict[str, Any] | None:
    """The fields of `GPT2Config` in nanoGPT's `model_args`; None where one is missing."""
    arguments = content.get("model_args") if isinstance(content, dict) else None
    names = {"layers": "n_layer", "heads": "n_head", "width": "n_embd",
             "vocabulary_size": "vocab_size", "block_size": "block_size"}  # fmt: skip
    if not isinstance(arguments, dict) or not set(names.values()) <= arguments.keys():
        return None
    return {**{ours: arguments[theirs] for ours, theirs in names.items()}, "exact_gelu": True}


def _rename(
    plain: Mapping[str, Tensor], path: Path, layers: int, *, transposed: bool
) -> dict[str, Tensor]:
    """Hugging Face's names to ours; biases that a model does without become zero."""
    tensors = {ours: _take(plain, theirs, path) for ours, theirs in TOP_NAMES.items()}
    for layer in range(layers):
        for ours, theirs in BLOCK_NAMES.items():
            weight = _take(plain, f"h.{layer}.{theirs}.weight", path)
            if transposed and weight.ndim == 2:
                weight = weight.t()
            tensors[f"blocks.{layer}.{ours}.weight"] = weight.contiguous().float()
            bias = plain.get(f"h.{layer}.{theirs}.bias")
            tensors[f"blocks.{layer}.{ours}.bias"] = (
                torch.zeros(weight.shape[0]) if bias is None else bias.float()
            )
    head = plain.get("lm_head.weight")
    if head is not None and not torch.equal(head, plain["wte.weight"]):
        raise DataError(
            f"{path}: its output projection is not its token embedding.",
            "tpukit's GPT-2 ties the two, as OpenAI's does.",
        )
    return tensors


def _take(plain: Mapping[str, Tensor], name: str, path: Path) -> Tensor:
    if name in plain:
        return plain[name].float()
    if name.endswith("ln_f.bias"):
        return torch.zeros_like(plain["ln_f.weight"], dtype=torch.float32)
    raise DataError(f"{path} has no tensor {name!r}.", WHAT_INIT_TAKES)
