"""A run's weights as a Hugging Face directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpukit.io.files import write_file, writing_errors
from tpukit.tasks.hub.models import without_output
from tpukit.tasks.llm.data.prompt import SUMMARIES, PromptStyle
from tpukit.tasks.llm.data.tokenizer import END_OF_TEXT, Tokenizer
from tpukit.tasks.llm.model.load import Shape
from tpukit.train.weights import README_FILE

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
    shape: Shape,
    lm: Any,
    tokenizer: Tokenizer,
    style: PromptStyle = SUMMARIES,
    adapter: Mapping[str, bytes] | None = None,
) -> list[Path]:
    """Writes a directory that transformers loads: the model `lm` and, with it, the tokenizer.

    adapter: files of a PEFT directory beside them. Each file is written atomically. Raises
    `DataError` where the folder cannot be written.
    """
    lm.config = _export_config(shape, tokenizer)
    readme = _README.format(
        family=type(lm).__name__,
        completion=style.columns.completion,
        prompt=_python_of(style),
        # The chat template writes them.
        specials=", add_special_tokens=False" if style.chat else "",
    )
    contents = {**_tokenizer_files(tokenizer, shape.block_size), README_FILE: readme}
    files = {name: text.encode() for name, text in contents.items()}
    files |= {f"adapter/{name}": content for name, content in (adapter or {}).items()}
    with writing_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as partial, without_output():
            lm.save_pretrained(partial)
            written = [folder / made.name for made in sorted(Path(partial).iterdir())]
            for path in written:
                (Path(partial) / path.name).replace(path)
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_file(folder / name, content)
    return [*written, *(folder / name for name in files if folder / name not in written)]


def _python_of(style: PromptStyle) -> str:
    """The prompt as Python writes it."""
    before, after = (style.places.split(part) for part in style.around)
    parts = enumerate([*before, style.columns.prompt, *after])
    text = " + ".join(part if n % 2 else repr(part) for n, part in parts if part)
    if not style.chat:
        return text
    messages = f'[{{"role": "user", "content": {text}}}]'
    column = style.columns.prompt
    if style.columns.has_messages:
        messages = column
    elif text == column:
        # Rows may have a list of messages there.
        messages = f"{column} if isinstance({column}, list) else {messages}"
    return f"tokenizer.apply_chat_template({messages}, tokenize=False, add_generation_prompt=True)"


def _tokenizer_files(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    files = {name: text for name, text in tokenizer.files.items() if name != "config.json"}
    if tokenizer.of_no_model:
        ends = dict.fromkeys(("eos_token", "pad_token"), END_OF_TEXT)
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size}
        files["tokenizer_config.json"] = json.dumps(fields | ends)
    generation = json.loads(files.get("generation_config.json", "{}"))
    generation["eos_token_id"] = sorted(tokenizer.ends)
    return files | {"generation_config.json": json.dumps(generation)}


def _export_config(shape: Shape, tokenizer: Tokenizer) -> Any:
    config: Any = shape.config
    if tokenizer.of_no_model:
        # Without them, transformers takes the numbers of the family's first tokenizer.
        config.bos_token_id = config.eos_token_id = tokenizer.end
        config.pad_token_id = None
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        longest = rope.get("original_max_position_embeddings") or shape.block_size
        if rope.get("rope_type") == "longrope" and shape.block_size > longest:
            # transformers chooses by a text's length; these were trained with the long ones.
            setattr(config, name, {**rope, "short_factor": rope["long_factor"]})
    return config
