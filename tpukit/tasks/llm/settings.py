"""The settings of summaries: the task's own, the training's defaults, the presets."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tpukit.errors import ConfigError, DataError
from tpukit.hardware.backend import AdamSettings
from tpukit.io.ranges import DECAY, LARGEST_COUNT, SEED, Range, setting
from tpukit.tasks.llm.data.prompt import PromptStyle
from tpukit.tasks.llm.data.rows import Columns
from tpukit.tasks.llm.model.sizes import SIZES, parse_model_size
from tpukit.train.task import Preset, TrainingDefaults

FROM_SCRATCH = "scratch"

FINE_TUNING = TrainingDefaults(
    global_batch_size=256,
    max_steps=500,
    lr=5e-5,
    schedule="cosine",
    warmup_steps=100,
    final_lr_fraction=0.1,
    clip_norm=1.0,
    weight_decay=0.1,
    ckpt_every=500,
    adam=AdamSettings((0.9, 0.95)),
)
LORA_LR = 2e-4
"""Peak rate of adapters beside frozen weights."""
DPO_LR, DPO_LORA_LR = 1e-6, 1e-5
"""Peak rates of preferences, of all weights and of adapters."""


@dataclass(frozen=True)
class SummarizeConfig:
    """The task's own settings."""

    data_path: str = "./data"
    """A folder with `train.csv` (or .jsonl, .parquet), the file itself, or a data set of the hub as
    `hf://OWNER/NAME`."""
    valid_file: str | None = None
    """A CSV file to validate on; None splits the training file."""
    valid_fraction: float = setting(0.05, DECAY)
    """The part of the training file that is validated on."""
    split_seed: int = setting(0, SEED)
    """Seeds the split."""
    model: str = "gpt2"
    """A public model such as `gpt2`, `Qwen3-0.6B` or `Gemma-3-270M` (an unknown name lists them),
    or a GPT-2 of LAYERSxHEADSxWIDTH."""
    block_size: int = setting(1024, Range(32, 2**20))
    """Longest prompt and summary together, in tokens."""
    init: str | None = None
    """Weights to start from: a directory, a name on the hub, or `scratch`. None: the hub's weights
    for a named size, from scratch for a custom one."""
    tokenizer: str | None = None
    """`gpt2`, `train`, a `.tiktoken` or `tokenizer.json` file, or a model's directory. None: that
    of `init` where it has a tokenizer, else `gpt2`."""
    vocabulary_size: int = setting(4096, Range(300, 2**20))
    """Tokens of a trained tokenizer."""
    prompt_column: str = "dialogue"
    """The column of a CSV or JSON file that is asked about, cut where it is too long."""
    completion_column: str = "summary"
    """The column that is learned and predicted."""
    rejected_column: str | None = None
    """A column of worse completions: the model learns to prefer the others to them (DPO)."""
    dpo_beta: float = setting(0.1, Range(0, 1e3, whole=False, includes_low=False))
    """How closely preferences keep to the model at the start: larger is closer."""
    id_column: str = "id"
    """The column that names a row; empty: rows are numbered."""
    template: str | None = None
    """The prompt, with `{column}`s of the file. None: the markers of dialogue summaries; with
    `chat`, the prompt's column alone."""
    chat: bool = False
    """The model's chat template goes around the prompt. With `--prompt-column messages` rows hold
    lists of messages, and all messages of the assistant are learned."""
    loss_on_prompt: bool = False
    """Also train on prompt tokens."""
    packing: bool = True
    """Several samples to a row; else one, filled up to the longest."""
    dropout: float = setting(0.0, DECAY)
    """Dropout on embeddings and residual branches, of models that have some (GPT-2)."""
    recompute: bool | Literal["auto"] = False
    """Recompute blocks in the backward pass instead of keeping them; `auto`: where the step does
    not fit otherwise, or is faster so."""
    weights: Literal["fp32", "bf16", "nf4"] = "fp32"
    """`fp32`; `bf16`: frozen weights take half the memory, and AdamW keeps fp32 master copies of
    trained ones; `nf4`: weights beside adapters are in 4 bits (bitsandbytes; a GPU or CPU)."""
    adapter: str | None = None
    """Fields of peft's configuration as NAME=VALUE with commas between (`use_dora=true`,
    `init_lora_weights=pissa`, `peft_type=LOHA,r=8`), or a JSON file of them."""
    lora_rank: int = setting(0, Range(0, 2**16))
    """Rank of LoRA adapters; 0, and no other adapter, trains all weights."""
    lora_alpha: float = setting(16.0, Range(0, 1e6, whole=False, includes_low=False))
    """LoRA updates are scaled by alpha / rank."""
    lora_init: str | None = None
    """A directory with a PEFT adapter to go on from, whose configuration counts."""
    lora_dropout: float = setting(0.0, DECAY)
    """Dropout on the input of LoRA adapters."""
    lora_targets: str = "qkv"
    """Matrices that are adapted: qkv, attention_out, mlp_in, mlp_out, or their names in the model,
    separated by commas; or all-linear."""
    lora_layers: str | None = None
    """Layers that are adapted, counted from 0, such as `0,8-15`; None: all."""
    score_samples: int = setting(32, Range(0, LARGEST_COUNT))
    """Validation samples whose summaries are written and scored at each validation; 0: none."""
    max_new_tokens: int = setting(100, Range(1, 2**20))
    """Most tokens of a summary at validation, in `test` and, by default, in `predict`."""
    generation_slots: int = setting(32, Range(1, 2**16))
    """Batch size of generation on each device."""

    def problems(self) -> Iterator[str]:
        """What is wrong beyond types and ranges. Raises ConfigError for a prompt's mistakes."""
        if self.weights == "nf4" and not self.adapts:
            yield "weights nf4 are not trained: they need lora_rank or adapter."
        if self.weights == "nf4" and self.from_scratch:
            yield "weights nf4 are read again with each start: they need init."
        if self.lora_init and self.adapter:
            yield "adapter: that of lora_init has a configuration of its own."
        if self.rejected_column and self.loss_on_prompt:
            yield "loss_on_prompt: of preferences the completions alone are learned."
        self.style.check()
        if self.init in (None, FROM_SCRATCH):
            parse_model_size(self.model)

    @property
    def style(self) -> PromptStyle:
        """How a row becomes a prompt."""
        prompt, completion = self.prompt_column, self.completion_column
        named = re.findall(r"\{(\w[^{}\"':,\n]*)\}", self.template or "")
        further = tuple(dict.fromkeys(name for name in named if name != prompt))
        messages = self.chat and prompt == "messages"
        columns = Columns(
            prompt, completion, self.id_column or None, further, messages, self.rejected_column
        )
        return PromptStyle(columns, self.template, self.chat)

    @property
    def from_scratch(self) -> bool:
        return self.init == FROM_SCRATCH or (self.init is None and self.model not in SIZES)

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained beside frozen weights."""
        return bool(self.lora_rank or self.adapter or self.lora_init)

    def adapter_fields(self) -> dict[str, Any] | None:
        """The fields of peft's configuration; None: all weights are trained."""
        if not self.adapts:
            return None
        given = read_fields(self.lora_init) if self.lora_init else parse_fields(self.adapter or "")
        if self.lora_rank and given.get("r", self.lora_rank) != self.lora_rank:
            raise ConfigError(
                f"lora_rank {self.lora_rank}: the adapter's rank is {given['r']}.",
                "Leave lora_rank out.",
            )
        targets = [n.strip() for n in str(self.lora_targets).split(",") if n.strip()]
        fields: dict[str, Any] = {"peft_type": "LORA", "target_modules": targets}
        if given.get("peft_type", "LORA") == "LORA":
            # `--set lora_layers=1` is a number.
            layers = None if self.lora_layers is None else parse_layers(str(self.lora_layers))
            fields |= {
                "r": self.lora_rank or 8, "lora_alpha": self.lora_alpha,
                "lora_dropout": self.lora_dropout, "layers_to_transform": layers,
            }  # fmt: skip
        return fields | given


def read_fields(folder_or_file: str) -> dict[str, Any]:
    """The fields of peft's configuration in a JSON file, or in a directory that peft saved."""
    path = Path(folder_or_file).expanduser()
    file = path if path.suffix == ".json" else path / "adapter_config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError(f"a {type(fields).__name__}, expected an object")
        return fields
    except (OSError, ValueError) as error:
        raise DataError(
            f"Cannot read {file}: {error}.",
            "lora_init takes a directory that peft saved, adapter a JSON file such as its"
            " adapter_config.json.",
        ) from error


def parse_fields(text: str) -> dict[str, Any]:
    """`use_dora=true,r=8`, or the name of a JSON file, to fields of peft's configuration."""
    if text.endswith(".json"):
        return read_fields(text)
    fields: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals):
            raise ConfigError(
                f"adapter: {part!r} is not NAME=VALUE.",
                "Give fields of peft's configuration such as use_dora=true, or a .json file.",
            )
        try:
            fields[name] = json.loads(value)
        except ValueError:  # a word
            fields[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return fields


def parse_layers(text: str) -> list[int]:
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
    return sorted(layers)


RECORDED = ("model", "block_size", "vocabulary_size", "dropout", "valid_fraction", "split_seed",
            "lora_rank", "lora_alpha", "lora_targets")  # fmt: skip
"""Settings of which a run records each value."""
PROMPTING = ("prompt_column", "completion_column", "id_column", "template", "chat",
             "loss_on_prompt", "lora_dropout", "lora_layers", "weights", "adapter",
             "rejected_column", "dpo_beta")  # fmt: skip
"""Settings of which a run records other values than the defaults alone."""

PRESETS: Mapping[str, Preset] = {
    "quick": Preset(
        train={"global_batch_size": 32, "max_steps": 600, "lr": 3e-3, "ckpt_every": 200,
               "warmup_steps": 60, "beta2": 0.98},
        task={"model": "3x4x128", "tokenizer": "train", "vocabulary_size": 2048,
              "block_size": 256, "score_samples": 16},
    ),
    "safe": Preset(train={"global_batch_size": 64}),
    "balanced": Preset(train={"global_batch_size": 128}),
    "fast": Preset(train={"global_batch_size": 256}),
}  # fmt: skip
