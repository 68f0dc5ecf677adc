"""A model of transformers with a head for what is predicted, its tokenizer, its rates by layer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import SequenceClassifierOutput

from tpukit.errors import ConfigError, DataError
from tpukit.hardware.backend import ModelOps, ParameterGroup
from tpukit.tasks.hub import adapters
from tpukit.tasks.hub.models import download, is_on_hub, recompute_layer, without_output
from tpukit.tasks.text.settings import SCRATCH, TextConfig

CONFIG_FILE = "config.json"
SPECIAL = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
VOCABULARY = 8192
"""Most tokens of a tokenizer that is trained on the data."""
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 512}  # fmt: skip
"""The model that knows nothing."""
LAYER = re.compile(r"\.(?:layers?|h|blocks?)\.(\d+)\.")
"""The number of a layer in the name of a parameter."""
HEADS = ("pooler", "classifier", "score", "head", "dense", "out_proj")
"""Parts of a classifier that weights of language models lack."""


def folder_of(config: TextConfig) -> Path | None:
    """The folder of the model's files; None for one from scratch. Raises `DataError`."""
    if config.model == SCRATCH:
        return None
    if is_on_hub(config.model):
        return download(config.model, f"model {config.model}")
    path = Path(config.model).expanduser()
    if not (path / CONFIG_FILE).is_file():
        raise DataError(
            f"model {config.model}: there is no {CONFIG_FILE} in this folder.",
            "Name a folder that transformers saved, or a model on the hub (OWNER/NAME).",
        )
    return path


# -- tokenizers ----------------------------------------------------------------------------------
def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, with a token for filling up. Raises `DataError`."""
    try:
        with without_output():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        raise DataError(
            f"{folder}: its tokenizer cannot be read: {str(error).splitlines()[0]}",
            "Name a folder with tokenizer.json, or install what transformers asks for"
            " (sentencepiece).",
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_of_texts(texts: Sequence[str]) -> Any:
    """A tokenizer of the pieces of words that these texts have."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    whole = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk"]))
    whole.normalizer = normalizers.BertNormalizer()
    whole.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [*SPECIAL.values()]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False
    )
    whole.train_from_iterator(texts, trainer)
    # The first tokens are the special ones, in their order.
    ends = {name: (SPECIAL[name], special.index(SPECIAL[name])) for name in ("sep", "cls")}
    whole.post_processor = processors.BertProcessing(ends["sep"], ends["cls"])
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": text for name, text in SPECIAL.items()},
    )  # fmt: skip


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """What a run keeps of a tokenizer, by the names of its files."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.name: path.read_bytes() for path in paths}


def tokenizer_from(files: Mapping[str, bytes]) -> Any:
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return read_tokenizer(Path(folder))


# -- models --------------------------------------------------------------------------------------
def read_form(folder: Path | None, tokenizer: Any, config: TextConfig) -> Any:
    """The configuration of the model to start from. Raises `DataError` for one that transformers
    does not know, `ConfigError` for texts beyond its positions."""
    if folder is None:
        found: Any = BertConfig(
            vocab_size=len(tokenizer), max_position_embeddings=max(config.max_length, 512), **SMALL
        )
    else:
        try:
            found = AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise DataError(f"{folder}: {str(error).splitlines()[0]}") from error
    text = found.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    # RoBERTa's first position is that after the one for filling up.
    first = (text.pad_token_id or 0) + 1 if "roberta" in found.model_type else 0
    relative = getattr(text, "relative_attention", False)
    if positions and not relative and config.max_length > positions - first:
        raise ConfigError(
            f"max_length {config.max_length}: a {found.model_type} has {positions - first}"
            " positions.",
            f"Use --set max_length={positions - first}, or long_texts=windows with it.",
        )
    return found


def config_from(fields: Mapping[str, Any]) -> Any:
    """A run's configuration."""
    return type(AutoConfig.for_model(fields["model_type"])).from_dict(dict(fields))


def build_reader(
    config: TextConfig, found: Any, ops: ModelOps, *, outputs: int, folder: Path | None,
    pad: int | None = None, names: Sequence[str] = (), recompute: bool = False, drawn: bool = True,
) -> nn.Module:  # fmt: skip
    """A model that returns `.logits` (rows, outputs).

    found: its configuration; folder: of its weights; None draws them, or, without `drawn`, leaves
    anything in them, to be loaded next; names: of the outputs.
    """
    found = type(found).from_dict(found.to_dict())
    found.num_labels, found.use_cache = outputs, False
    if len(names) == outputs:
        found.id2label = dict(enumerate(names))
        found.label2id = {name: place for place, name in enumerate(names)}
    if pad is not None:
        found.get_text_config().pad_token_id = pad
    if config.dropout is not None:
        _set_dropout(found, config.dropout)
    with without_output():
        own = config.pooling == "model"
        kind: Any = AutoModelForSequenceClassification if own else AutoModel
        lm = _lm(kind, found, folder, drawn=drawn)
    if recompute:
        lm._set_gradient_checkpointing(True, partial(recompute_layer, ops))
    model = lm if own else Pooled(lm, config.pooling, outputs, config.dropout or 0.0)
    if config.lora_rank:
        _adapt(lm.base_model if own else lm, config, fresh=drawn)
    return model


def _lm(kind: Any, config: Any, folder: Path | None, *, drawn: bool) -> Any:
    try:
        if folder is None:
            if drawn:
                return kind.from_config(config, dtype=torch.float32)
            with no_init_weights():
                lm = kind.from_config(config, dtype=torch.float32)
            lm.tie_weights()
            return lm
        lm, said = kind.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, local_files_only=True,
            trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as error:
        raise DataError(
            f"{folder or 'model'}: a {config.model_type} cannot be built or read:"
            f" {str(error).splitlines()[0]}",
            "Name a model of transformers that classifies sequences, saved as safetensors, or"
            " another pooling than model.",
        ) from error
    lost = sorted(map(str, said["missing_keys"]))
    if missing := [n for n in lost if LAYER.search(f".{n}") or not any(h in n for h in HEADS)]:
        raise DataError(
            f"{folder}: it has no tensor {missing[0]} ({len(missing)} in all).",
            "Its weights are of another model than its config.json says.",
        )
    return lm


def _set_dropout(config: Any, rate: float) -> None:
    for name, value in vars(config).items():
        if "dropout" in name and (value is None or isinstance(value, int | float)):
            setattr(config, name, rate)


def _adapt(lm: Any, config: TextConfig, *, fresh: bool) -> None:
    targets = [name.strip() for name in config.lora_targets.split(",") if name.strip()]
    fields = {"peft_type": "LORA", "r": config.lora_rank, "lora_alpha": config.lora_alpha,
              "lora_dropout": config.lora_dropout, "target_modules": targets}  # fmt: skip
    adapters.add_adapter(lm, fields, fresh=fresh)


class Pooled(nn.Module):
    """A linear layer on what is read of the tokens of a model."""

    def __init__(self, lm: Any, pooling: str, outputs: int, dropout: float) -> None:
        super().__init__()
        self.lm, self.pooling = lm, pooling
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(lm.config.get_text_config().hidden_size, outputs)

    def forward(self, **inputs: Tensor) -> Any:
        states = self.lm(**inputs).last_hidden_state
        mask = inputs["attention_mask"]
        read = pooled(states, mask, self.pooling)
        return SequenceClassifierOutput(logits=self.head(self.dropout(read)))


def pooled(states: Tensor, mask: Tensor, how: str) -> Tensor:
    """(rows, width) of states (rows, tokens, width), where `mask` (rows, tokens) is 1."""
    if how == "first":
        return states[:, 0]
    there = mask[:, :, None].to(states.dtype)
    if how == "last":
        places = torch.arange(mask.shape[1], device=mask.device)
        is_last = places == mask.sum(1, keepdim=True) - 1
        return (states * is_last[:, :, None].to(states.dtype)).sum(1)
    if how == "max":
        return (states * there - 1e4 * (1 - there)).amax(1)
    return (states * there).sum(1) / there.sum(1).clamp(min=1)


def reader_groups(
    model: nn.Module, weight_decay: float, layer_decay: float
) -> Iterator[ParameterGroup]:
    """Groups by layer, whose rates fall by `layer_decay` from the head to the embeddings; weight
    decay on matrices alone."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    found = {name: LAYER.search(f".{name}") for name, _ in named}
    top = 2 + max([int(match[1]) for match in found.values() if match], default=0)
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        match = found[name]
        is_embedding = "embed" in name or name.startswith(("wte", "transformer.w"))
        depth = int(match[1]) + 1 if match else 0 if is_embedding else top
        groups.setdefault((depth, parameter.ndim >= 2), []).append(parameter)
    for (depth, decays), parameters in sorted(groups.items()):
        decay = weight_decay if decays else 0.0
        yield ParameterGroup(parameters, decay, lr_scale=layer_decay ** (top - depth))
