"""A run's weights as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tpukit.tasks.summarize.data.prompt import BEFORE_DIALOGUE, BEFORE_SUMMARY
from tpukit.tasks.summarize.data.tokenizer import Tokenizer
from tpukit.tasks.summarize.data.tokenizer_json import tokenizer_json
from tpukit.tasks.summarize.model.gpt2 import GPT2Config
from tpukit.tasks.summarize.model.weights import BLOCK_NAMES, TOP_NAMES
from tpukit.train.storage.exported_weights import README_FILE, write_export

_README = f"""# A model of dialogue summaries

GPT-2 with its tokenizer, as a directory that transformers loads:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(".").eval()
tokenizer = AutoTokenizer.from_pretrained(".")
```

It continues a prompt with the summary, up to the end token:

```python
prompt = {BEFORE_DIALOGUE!r} + dialogue + {BEFORE_SUMMARY!r}
tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=100)
```
"""


def export_hugging_face(
    folder: Path, config: GPT2Config, tensors: Mapping[str, Tensor], tokenizer: Tokenizer
) -> list[Path]:
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
        README_FILE: _README.encode(),
    }
    return write_export(folder, _hugging_face_names(tensors, config), contents)


def _hugging_face_names(tensors: Mapping[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    renamed = {f"transformer.{theirs}": tensors[ours] for ours, theirs in TOP_NAMES.items()}
    for layer in range(config.layers):
        for ours, theirs in BLOCK_NAMES.items():
            weight = tensors[f"blocks.{layer}.{ours}.weight"]
            name = f"transformer.h.{layer}.{theirs}"
            renamed[f"{name}.weight"] = weight.t() if weight.ndim == 2 else weight
            renamed[f"{name}.bias"] = tensors[f"blocks.{layer}.{ours}.bias"]
    return renamed


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
