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
from tpukit.tasks.summarize.model.decoder import DecoderConfig
from tpukit.tasks.summarize.model.families import FAMILIES
from tpukit.tasks.summarize.model.weights import their_tensors
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
    folder: Path, config: DecoderConfig, tensors: Mapping[str, Tensor], tokenizer: Tokenizer
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
    return write_export(folder, their_tensors(tensors, config), contents)


def _export_config(config: DecoderConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    if config.source is not None:
        return {
            **config.source,
            "architectures": [FAMILIES[config.family].architecture],
            "vocab_size": config.vocabulary_size,
            "dtype": "float32",
        }
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "vocab_size": config.vocabulary_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "activation_function": config.activation,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.end,
        "eos_token_id": tokenizer.end,
    }
