"""A run's weights as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tpukit.errors import DataError
from tpukit.io.files import replacing, write_file
from tpukit.tasks.summarize.data.tokenizer import Tokenizer
from tpukit.tasks.summarize.data.tokenizer_json import tokenizer_json
from tpukit.tasks.summarize.model.gpt2 import GPT2Config
from tpukit.tasks.summarize.model.weights import BLOCK_NAMES, TOP_NAMES
from tpukit.tasks.summarize.task import SummarizeTask
from tpukit.tasks.trained import open_trained


def export_run(path: Path, folder: Path, log: Callable[[str], None]) -> None:
    """Writes a run's best weights, adapters merged, as a Hugging Face directory."""
    trained = open_trained(path, log)
    task = trained.task
    assert isinstance(task, SummarizeTask) and trained.run is not None
    weights = task.merged(trained.run.weights())
    export_hugging_face(folder, task.model_config, weights, task.tokenizer)


def export_hugging_face(
    folder: Path, config: GPT2Config, tensors: Mapping[str, Tensor], tokenizer: Tokenizer
) -> None:
    """Writes a directory that transformers loads: the model and, with it, the tokenizer.

    Each file is written atomically. Raises `DataError` where the folder cannot be written.
    """
    contents = {
        "config.json": json.dumps(_export_config(config, tokenizer), indent=2).encode(),
        "tokenizer.json": tokenizer_json(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config.block_size,
                "eos_token": "<|endoftext|>",
                "pad_token": "<|endoftext|>",
            }
        ).encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "model.safetensors") as partial:
            save_file(_hugging_face_names(tensors, config), partial, {"format": "pt"})
        for name, content in contents.items():
            write_file(folder / name, content)
    except OSError as error:
        raise DataError(
            f"Cannot export to {folder}: {error.strerror or error}.", "Name another folder."
        ) from error


def _hugging_face_names(tensors: Mapping[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    renamed = {f"transformer.{theirs}": tensors[ours] for ours, theirs in TOP_NAMES.items()}
    for layer in range(config.layers):
        for ours, theirs in BLOCK_NAMES.items():
            weight = tensors[f"blocks.{layer}.{ours}.weight"]
            name = f"transformer.h.{layer}.{theirs}"
            renamed[f"{name}.weight"] = weight.t() if weight.ndim == 2 else weight
            renamed[f"{name}.bias"] = tensors[f"blocks.{layer}.{ours}.bias"]
    return {name: tensor.detach().contiguous().clone() for name, tensor in renamed.items()}


def _export_config(config: GPT2Config, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "vocab_size": config.vocabulary_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "activation_function": "gelu" if config.exact_gelu else "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.end,
        "eos_token_id": tokenizer.end,
    }
