"""Models of transformers: from a configuration, a local directory, a name on the hub."""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.hub.models import download, is_on_hub, without_output
from tpukit.tasks.llm.data.tokenizer import Tokenizer
from tpukit.tasks.llm.model.lean import ATTENTION
from tpukit.tasks.llm.model.sizes import named_sizes, parse_model_size
from tpukit.train.weights import are_made_later, read_tensor, tensor_names

WHAT_INIT_TAKES = (
    "--init takes a Hugging Face directory (config.json, model.safetensors), or a name on the hub."
)
LARGEST_PADDING = 128
"""Rows a vocabulary may have beyond its tokens: 50257 is rounded up to 50304."""
SIZE_FIELDS = ("num_hidden_layers", "num_attention_heads", "hidden_size")
OTHER_HEADS = ("att", "classifier", "summary", "layer")
"""Parts of the names of rates of dropout that are not of embeddings and branches."""


@dataclass(frozen=True)
class Shape:
    """What a run records of its model: a transformers configuration, and the context's length."""

    fields: Mapping[str, Any]
    block_size: int

    @property
    def config(self) -> PretrainedConfig:
        """A configuration of its own: models change theirs."""
        return config_of(self.fields, "the run's model.json")

    @property
    def vocabulary_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class Pretrained:
    """Weights to start from: a directory that transformers reads."""

    shape: Shape
    folder: Path
    source: str
    """What it was asked for by."""


# -- configurations ------------------------------------------------------------------------------
def shape_of(config: PretrainedConfig, block_size: int) -> Shape:
    return Shape(json.loads(json.dumps(config.to_dict(), default=str)), block_size)


def config_of(fields: Mapping[str, Any], source: str) -> PretrainedConfig:
    """A configuration of its fields. Raises `DataError` where transformers has no such model."""
    given = dict(fields)
    try:
        kind = given.get("model_type", "gpt2")
        config: PretrainedConfig = type(AutoConfig.for_model(kind)).from_dict(given)
        return config
    except Exception as error:
        # transformers lists all of its models.
        said = str(error).partition("\n")[0].partition(" Should contain one of ")[0]
        raise DataError(f"{source}: {type(error).__name__}: {said}", WHAT_INIT_TAKES) from error


def from_scratch(size: str, vocabulary_size: int, block_size: int) -> Shape:
    """The shape of `--model` with random weights."""
    # Of a smaller vocabulary than the public one the token of padding may lie beyond.
    fields = parse_model_size(size) | {"vocab_size": vocabulary_size, "pad_token_id": None}
    if fields["model_type"] == "gpt2":
        fields["n_positions"] = block_size
        # transformers takes numbers of GPT-2's own tokenizer otherwise.
        fields |= {"bos_token_id": None, "eos_token_id": None}
    return shape_of(config_of(fields, f"--model {size}"), block_size)


def set_dropout(config: PretrainedConfig, rate: float) -> None:
    """Dropout on embeddings and branches; none on attention, whatever the file says.

    Raises `ConfigError` for a model that has none.
    """
    names = [name for name, value in vars(config).items()
             if ("drop" in name) and isinstance(value, (int, float))]  # fmt: skip
    own = [name for name in names if not any(part in name for part in OTHER_HEADS)]
    if rate and not own:
        raise ConfigError(
            f"dropout {rate}: a {config.model_type} of transformers has none.",
            "Leave it out; adapters have lora_dropout.",
        )
    for name in names:
        setattr(config, name, rate if name in own else 0.0)


def require_vocabulary(pretrained: Pretrained, tokenizer: Tokenizer) -> None:
    """Raises `ConfigError` where the tokenizer's tokens are not those of the weights."""
    have, want = pretrained.shape.vocabulary_size, tokenizer.text_size
    most = want + LARGEST_PADDING if tokenizer.of_no_model else sys.maxsize
    if not want <= have < most:
        raise ConfigError(
            f"The tokenizer has {want} tokens, the weights of {pretrained.source} have {have}.",
            "Give the tokenizer the weights were trained with (--tokenizer gpt2, or its file).",
        )


# -- directories and the hub ---------------------------------------------------------------------
def weights_folder(source: str) -> Path:
    """A local directory, else one of the hub. Raises `DataError` where there is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file() or not is_on_hub(source):
        found = "a file" if path.is_file() else "nothing"
        raise DataError(f"--init {source}: there is {found} there.", WHAT_INIT_TAKES)
    return download(named_sizes().get(source, {}).get("hub", source), f"--init {source}")


def read_pretrained(source: str, block_size: int, size: str | None = None) -> Pretrained:
    """The weights of a directory or of the hub; size: what `--model` says it is.

    Raises `DataError` for what cannot be read, `ConfigError` for another size.
    """
    path = weights_folder(source)
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise DataError(
            f"{path} holds an adapter of peft without the weights beside which it was trained.",
            f"Name these with --init, and the adapter with --set lora_init={quote(str(path))}.",
        )
    try:
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError(f"a {type(fields).__name__}, expected an object")
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {path / 'config.json'}: {error}.", WHAT_INIT_TAKES) from error
    config = config_of(fields, str(path / "config.json"))
    if size is not None:
        asked = config_of(parse_model_size(size), size)
        own, others = (
            [getattr(of.get_text_config(), name, None) for name in SIZE_FIELDS]
            for of in (config, asked)
        )
        if own != others:
            raise ConfigError(
                f"--model {size} is not the size of {source} ({'x'.join(map(str, own))}).",
                "Leave --model out: --init brings its size along.",
            )
    # The weights have all positions.
    known = getattr(config.get_text_config(), "max_position_embeddings", None) or block_size
    return Pretrained(shape_of(config, min(block_size, known)), path, source)


# -- models --------------------------------------------------------------------------------------
def load_lm(
    shape: Shape, dtype: torch.dtype, *, dropout: float = 0.0, folder: Path | None = None,
    drawn: bool = True, attention: str = ATTENTION,
) -> PreTrainedModel:  # fmt: skip
    """A model with the weights in a directory, or drawn, or that hold anything.

    Raises `DataError` for weights that are not all of this model's.
    """
    with without_output():
        config = shape.config
        set_dropout(config, dropout)
        if folder:
            later = _read_later(config, folder, dtype, attention) if are_made_later() else None
            lm = later or _read(config, folder, dtype, attention)
        else:
            try:
                lm = _drawn(config, dtype, attention, drawn=drawn)
            except (TypeError, ValueError, ZeroDivisionError) as error:
                said = str(error).partition("\n")[0]
                raise DataError(f"a {config.model_type} model is refused: {said}") from error
    for module in lm.modules():
        if isinstance(getattr(module, "rope_type", None), str | dict):
            fix_frequencies(module, config, shape.block_size)
    return lm


def _drawn(
    config: PretrainedConfig, dtype: torch.dtype, attention: str, *, drawn: bool
) -> PreTrainedModel:
    how = {"attn_implementation": attention, "trust_remote_code": False}
    if not drawn:
        with no_init_weights():
            lm = AutoModelForCausalLM.from_config(config, dtype=dtype, **how)
        lm.tie_weights()
        return lm
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
    if config.model_type == "gpt2":
        start_gpt2(lm, config)
    for parameter in lm.parameters():  # buffers stay exact
        parameter.data = parameter.data.to(dtype)
    return lm


def _read_later(
    config: PretrainedConfig, folder: Path, dtype: torch.dtype, attention: str
) -> PreTrainedModel | None:
    """A model whose tensors are read one at a time, as they are needed.

    None where transformers has more to do than to read them: names of the files that are not the
    model's, parts that stay in fp32, quantization.
    """
    kept = _files_of_tensors(folder)
    lm = _drawn(config, dtype, attention, drawn=False)
    own = lm.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(own.items())}
    is_plain = kept.keys() == set(first.values()) and not (
        any(not isinstance(tensor, nn.Parameter) for tensor in own.values())
        or getattr(config, "quantization_config", None)
        or lm._keep_in_fp32_modules
        or lm._keep_in_fp32_modules_strict
    )
    if not is_plain:
        return None
    for name, file in kept.items():
        value = read_tensor(file, name, own[name].dtype)
        if value.shape != own[name].shape:
            return None
        own[name].data = value
    lm.name_or_path = lm.config._name_or_path = str(folder)
    return lm.eval()  # as transformers returns it


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Where transformers reads each tensor; empty where it has another way."""
    whole, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file():
        return dict.fromkeys(tensor_names(whole), whole)
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in places.items()}
    return {}


def _read(
    config: PretrainedConfig, folder: Path, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    try:
        lm, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=attention,
            use_safetensors=True, local_files_only=True, trust_remote_code=False,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as error:
        raise DataError(
            f"Cannot read the weights in {folder}: {str(error).splitlines()[0]}",
            "Only safetensors are read: save the model with safe_serialization=True.",
        ) from error
    for kind, said in (
        ("missing_keys", "has no tensor"), ("unexpected_keys", "has a tensor too many:"),
        ("mismatched_keys", "has a tensor of another shape than config.json says:"),
    ):  # fmt: skip
        if wrong := sorted(map(str, found[kind])):
            raise DataError(f"{folder}: {said} {wrong[0]} ({len(wrong)} in all).", WHAT_INIT_TAKES)
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    ties = config.get_text_config().tie_word_embeddings and lm._tied_weights_keys
    if ties and head.weight is not embedding.weight:
        raise DataError(
            f"{folder}: its output projection is not its token embedding.",
            "Its config.json must say tie_word_embeddings = false.",
        )
    return lm


def fix_frequencies(rotary: Any, config: PretrainedConfig, block_size: int) -> None:
    """Rotary frequencies that depend on a text's length become those of the context's."""
    kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}
    for layers, kind in kinds.items():
        if kind == "longrope":
            more = {} if layers is None else {"layer_type": layers}
            rates, scale = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=block_size, **more)
            name = "" if layers is None else f"{layers}_"
            rotary.register_buffer(f"{name}inv_freq", rates, persistent=False)
            setattr(rotary, f"{name}attention_scaling", scale)
    # Within the positions that a model knows, dynamic scaling is none.
    fixed = {n: "fixed" if "dynamic" in k or k == "longrope" else k for n, k in kinds.items()}
    rotary.rope_type = fixed.get(None, fixed)


@torch.no_grad()
def start_gpt2(lm: PreTrainedModel, config: PretrainedConfig) -> None:
    """Queries start as the keys, and a head gives back what it took in (Trockman and Kolter, 2023).

    A token then looks at tokens like it from the first step on: copying names is learned in
    hundreds of steps, where it took thousands. Neighbouring positions start alike: a small set then
    learns sooner to copy by place.
    """
    width, depth = config.n_embd, math.sqrt(2 * config.n_layer)
    for block in lm.transformer.h:
        alike, value = torch.randn(2, width, width) / math.sqrt(width)
        block.attn.c_attn.weight.copy_(torch.cat([alike, alike, value]).T)
        block.attn.c_proj.weight.copy_(value / depth)
    lm.transformer.wpe.weight.copy_(sinusoids(config.n_positions, width))


def sinusoids(positions: int, width: int) -> Tensor:
    """(positions, width): sines and cosines (Vaswani et al., 2017) of standard deviation 0.02."""
    rates = torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    angles = torch.arange(positions)[:, None] * rates
    waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return 0.02 * math.sqrt(2) * waves[:, :width]
