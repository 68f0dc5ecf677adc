"""Weights from and to elsewhere: Hugging Face directories, nanoGPT checkpoints."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tpukit.errors import CheckpointError, ConfigError, DataError
from tpukit.hardware.backend import ModelOps, TorchOps
from tpukit.tasks.summarize.data.hub_tokenizer import HubTokenizer
from tpukit.tasks.summarize.data.tokenizer import Tokenizer
from tpukit.tasks.summarize.model.decoder import DecoderConfig, LanguageModel
from tpukit.tasks.summarize.model.families import FAMILIES, named_sizes, their_name
from tpukit.tasks.summarize.model.transformers_config import (
    WHAT_INIT_TAKES,
    checked_shape,
    fold_score_scales,
    read_shape,
)
from tpukit.train.weights import describe, read_foreign, state_dict_of

GPT2_SIZES = {
    "gpt2": DecoderConfig(12, 12, 768),
    "gpt2-medium": DecoderConfig(24, 16, 1024),
    "gpt2-large": DecoderConfig(36, 20, 1280),
    "gpt2-xl": DecoderConfig(48, 25, 1600),
}
SIZES = (*GPT2_SIZES, *named_sizes())
"""Names of public models."""
FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".json", ".gguf")
LARGEST_PADDING = 128
"""Rows a vocabulary may have beyond its tokens: nanoGPT rounds 50257 up to 50304."""
BRING_A_FOLDER = (
    "Without a network, bring the directory along (config.json and model.safetensors) and give its"
    " path."
)
HUB_HINTS = {
    "GatedRepoError": "Accept its licence on its page there, and set HF_TOKEN.",
    "RepositoryNotFoundError": "Check the name (OWNER/NAME); a private one needs HF_TOKEN.",
}
"""What to do, by huggingface_hub's exception."""
TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
"""Matrices of GPT-2 that Hugging Face stores transposed (Conv1D)."""
WITHOUT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|^h\.\d+\.attn\.(masked_)?bias$")
"""Buffers that some files hold."""


@dataclass(frozen=True)
class Pretrained:
    """Weights under tpukit's names, with the shape they belong to."""

    config: DecoderConfig
    tensors: dict[str, Tensor]
    source: str


def parse_model_size(text: str) -> DecoderConfig:
    """A public model's name, or LAYERSxHEADSxWIDTH of a GPT-2."""
    if text in GPT2_SIZES:
        return GPT2_SIZES[text]
    if text in named_sizes():
        fields = {name: v for name, v in named_sizes()[text].items() if name != "hub"}
        return read_shape(fields, Path(text))
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
    return DecoderConfig(layers, heads, width)


def read_pretrained(source: str) -> Pretrained:
    """Weights of a local directory or file, else of the hub. Raises `DataError`."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_nanogpt(path)
    if not is_on_hub(source):
        raise DataError(f"--init {source}: there is nothing there.", WHAT_INIT_TAKES)
    return _from_directory(download(source))


def is_on_hub(source: str) -> bool:
    """Whether it can only be a model's name on the hub; many of these have a point in them."""
    is_path = source.startswith((".", "/", "~")) or source.endswith(FILE_SUFFIXES)
    return not is_path and not Path(source).exists()


def cropped(pretrained: Pretrained, block_size: int) -> Pretrained:
    """The same weights for a shorter context. Raises `ConfigError` for a longer one."""
    known = pretrained.config.block_size
    if block_size > known:
        raise ConfigError(
            f"--block-size {block_size} is more than the {known} positions of {pretrained.source}.",
            f"Choose at most {known}.",
        )
    tensors, learned = dict(pretrained.tensors), "position_embedding.weight"
    if learned in tensors:
        tensors[learned] = tensors[learned][:block_size].clone()
    return replace(
        pretrained, config=replace(pretrained.config, block_size=block_size), tensors=tensors
    )


def require_vocabulary(pretrained: Pretrained, tokenizer: Tokenizer | HubTokenizer) -> None:
    """Raises `ConfigError` where the tokenizer's tokens are not those of the weights."""
    have, want = pretrained.config.vocabulary_size, tokenizer.vocabulary_size
    most = want + LARGEST_PADDING
    if isinstance(tokenizer, HubTokenizer):
        want, most = tokenizer.text_size, sys.maxsize
    if not want <= have < most:
        raise ConfigError(
            f"The tokenizer has {want} tokens, the weights of {pretrained.source} have {have}.",
            "Give the tokenizer the weights were trained with (--tokenizer gpt2, or its file).",
        )


# -- reading -------------------------------------------------------------------------------------
def download(name: str) -> Path:
    """The folder of a public model's files, from the hub or its cache. Raises `DataError`."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                named_sizes().get(name, {}).get("hub", name),
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                ignore_patterns=["consolidated*"],  # the same weights again
            )
        )
    except Exception as error:
        raise DataError(
            f"--init {name}: not a local directory, and the hub did not give it"
            f" ({type(error).__name__}).",
            HUB_HINTS.get(type(error).__name__, BRING_A_FOLDER),
        ) from error


def _from_directory(path: Path) -> Pretrained:
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise DataError(
            f"{path} holds an adapter of peft without the weights beside which it was trained.",
            f"Name these with --init, and the adapter with --set lora_init={quote(str(path))}.",
        )
    fields = _read_json(path / "config.json")
    config = read_shape(fields, path)
    tensors = _rename(_read_safetensors(path), path, config, transposed=config.family == "gpt2")
    if config.family == "gpt2":
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
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
    plain = {name.removeprefix("_orig_mod."): tensor for name, tensor in model.items()}
    return Pretrained(config, _rename(plain, path, config, transposed=False), str(path))


def _nanogpt_shape(content: Any) -> dict[str, Any] | None:
    """The fields of `DecoderConfig` in nanoGPT's `model_args`; None where one is missing."""
    arguments = content.get("model_args") if isinstance(content, dict) else None
    names = {"layers": "n_layer", "heads": "n_head", "width": "n_embd",
             "vocabulary_size": "vocab_size", "block_size": "block_size"}  # fmt: skip
    if not isinstance(arguments, dict) or not set(names.values()) <= arguments.keys():
        return None
    return {**{ours: arguments[theirs] for ours, theirs in names.items()}, "activation": "gelu"}


def without_memory(config: DecoderConfig, ops: ModelOps) -> LanguageModel:
    """A model whose parameters have shapes alone: a host of two GPUs has no memory for what is
    drawn only to be overwritten."""
    with torch.device("meta"):
        model = LanguageModel(config, ops)
    model.add_frequencies()
    return model


def unfilled(config: DecoderConfig, ops: ModelOps, dtype: torch.dtype) -> LanguageModel:
    """A model for weights that are loaded next: its parameters hold anything."""
    model = without_memory(config, ops)
    state = model.state_dict()
    empty = {name: torch.empty(tensor.shape, dtype=dtype) for name, tensor in state.items()}
    model.load_state_dict(empty, assign=True)
    return model


def _rename(
    found: Mapping[str, Tensor], path: Path, config: DecoderConfig, *, transposed: bool
) -> dict[str, Tensor]:
    """Their names to ours; biases that a GPT-2 does without become zero."""
    # Some files of GPT-2 have `transformer.` before every name.
    plain = {name.removeprefix("transformer."): tensor for name, tensor in found.items()}
    family, tensors = FAMILIES[config.family], {}
    for ours, expected in without_memory(config, TorchOps()).state_dict().items():
        shape = expected.shape
        theirs = their_name(family, ours).removeprefix("transformer.")
        if theirs not in plain and config.family == "gpt2" and ours.endswith(".bias"):
            tensors[ours] = torch.zeros(shape)
            continue
        if theirs not in plain:
            raise DataError(f"{path} has no tensor {theirs!r}.", WHAT_INIT_TAKES)
        tensor = plain[theirs] if theirs == "lm_head.weight" else plain.pop(theirs)
        if transposed and TRANSPOSED.search(theirs):
            tensor = tensor.t()
        if tensor.shape != shape:
            raise DataError(
                f"{path}: tensor {theirs!r} is {tuple(tensor.shape)}, config.json says"
                f" {tuple(shape)}.",
                WHAT_INIT_TAKES,
            )
        tensors[ours] = tensor.contiguous()
    head = plain.pop("lm_head.weight", None)
    if config.tied and head is not None and not torch.equal(
        head.float(), tensors["token_embedding.weight"].float()
    ):  # fmt: skip
        raise DataError(
            f"{path}: its output projection is not its token embedding.",
            "Its config.json must say tie_word_embeddings = false; a GPT-2 ties the two.",
        )
    left = sorted(name for name in plain if not WITHOUT_WEIGHTS.search(name))
    if left:
        raise DataError(f"{path}: a {config.family} has no tensor {left[0]!r}.", WHAT_INIT_TAKES)
    return tensors


def their_tensors(tensors: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The tensors of a model under Hugging Face's names, for `_rename` to read back."""
    family = FAMILIES[config.family]
    renamed = {their_name(family, name): tensor for name, tensor in tensors.items()}
    if config.family == "gpt2":
        return {n: t.t() if TRANSPOSED.search(n) else t for n, t in renamed.items()}
    return renamed
