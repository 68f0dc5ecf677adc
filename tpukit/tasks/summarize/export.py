"""A run's weights as a Hugging Face directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from tpukit.io.files import write_file, writing_errors
from tpukit.tasks.summarize.data.hub_tokenizer import HubTokenizer
from tpukit.tasks.summarize.data.prompt import SUMMARIES, PromptStyle
from tpukit.tasks.summarize.data.tokenizer import Tokenizer
from tpukit.tasks.summarize.data.tokenizer_json import tokenizer_json
from tpukit.tasks.summarize.model.decoder import DecoderConfig
from tpukit.tasks.summarize.model.families import FAMILIES
from tpukit.tasks.summarize.model.weights import their_tensors
from tpukit.train.weights import README_FILE, write_export

_README = """# A fine-tuned language model

{family} with its tokenizer, as a directory that transformers loads:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(".").eval()
tokenizer = AutoTokenizer.from_pretrained(".")
```

It continues a prompt with the {completion}, up to the end token:

```python
prompt = {prompt}
inputs = tokenizer(prompt, return_tensors="pt"{specials})
tokens = model.generate(**inputs, max_new_tokens=100)
```
"""


def export_hugging_face(
    folder: Path,
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | HubTokenizer,
    style: PromptStyle = SUMMARIES,
    adapter: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None = None,
) -> list[Path]:
    """Writes a directory that transformers loads: the model and, with it, the tokenizer.

    Each file is written atomically. Raises `DataError` where the folder cannot be written.
    """
    dtype = str(tensors["token_embedding.weight"].dtype).removeprefix("torch.")
    contents = {
        "config.json": json.dumps(_export_config(config, tokenizer, dtype), indent=2),
        **_tokenizer_files(tokenizer, config),
        README_FILE: _README.format(
            family=FAMILIES[config.family].architecture,
            completion=style.columns.completion,
            prompt=_python_of(style),
            # The chat template writes them.
            specials=", add_special_tokens=False" if style.chat else "",
        ),
    }
    files = {name: text.encode() for name, text in contents.items()}
    written = write_export(folder, their_tensors(tensors, config), files)
    if adapter is not None:
        fields = {**adapter[1], "base_model_name_or_path": ""}
        with writing_errors(folder):
            (folder / "adapter").mkdir(exist_ok=True)
            write_file(folder / "adapter" / "adapter_config.json", json.dumps(fields).encode())
            content = save(dict(adapter[0]))
            write_file(folder / "adapter" / "adapter_model.safetensors", content)
        written += sorted((folder / "adapter").iterdir())
    return written


def _python_of(style: PromptStyle) -> str:
    """The prompt as Python writes it."""
    before, after = (style.places.split(part) for part in style.around)
    parts = enumerate([*before, style.columns.prompt, *after])
    text = " + ".join(part if n % 2 else repr(part) for n, part in parts if part)
    if not style.chat:
        return text
    messages = f'[{{"role": "user", "content": {text}}}]'
    if style.columns.has_messages:
        messages = style.columns.prompt
    return f"tokenizer.apply_chat_template({messages}, tokenize=False, add_generation_prompt=True)"


def _tokenizer_files(tokenizer: Tokenizer | HubTokenizer, config: DecoderConfig) -> dict[str, str]:
    if isinstance(tokenizer, HubTokenizer):
        files = {name: text for name, text in tokenizer.files.items() if name != "config.json"}
        generation = json.loads(files.get("generation_config.json", "{}"))
        generation["eos_token_id"] = sorted(tokenizer.ends)
        return files | {"generation_config.json": json.dumps(generation)}
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.block_size,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    return {
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": json.dumps(fields),
    }


def _export_config(
    config: DecoderConfig, tokenizer: Tokenizer | HubTokenizer, dtype: str
) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if isinstance(tokenizer, Tokenizer):
        # Without them, transformers takes the numbers of the family's first tokenizer.
        own = {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end, "pad_token_id": None}
    if config.source is not None:
        return {
            **config.source,
            **_factors_of_training(config.source, config),
            **own,
            "architectures": [FAMILIES[config.family].architecture],
            "vocab_size": config.vocabulary_size,
            "dtype": dtype,
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
        "dtype": dtype,
        **own,
    }


def _factors_of_training(source: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """LongRoPE's long factors for short texts too, where they were trained with them: transformers
    chooses by a text's length."""
    rope = config.rope
    if rope is None or rope["rope_type"] != "longrope":
        return {}
    if config.block_size <= rope["original_max_position_embeddings"]:
        return {}
    name = "rope_parameters" if source.get("rope_parameters") else "rope_scaling"
    return {name: {**source[name], "short_factor": source[name]["long_factor"]}}
