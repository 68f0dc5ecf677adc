"""Adapters beside frozen weights: peft's, whatever the kind; frozen weights in 4 bits.

`PiSSA` and `OLoRA` take a part out of the weights at the start; an adapter that is continued has
learned something already. The start of either is kept as a second, frozen adapter: the reference of
preferences, and what an export takes off again.
"""

import dataclasses
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn
from transformers.pytorch_utils import Conv1D

from tpukit.errors import ConfigError, DataError

# That it computes 4 bits on this CPU without a package of its own.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
LEARNED, START = "default", "start"
"""Names of the adapter that is trained, and of its start."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "query", "key",
            "value", "query_proj", "key_proj", "value_proj", "Wqkv"),
    "query": ("q_proj",), "key": ("k_proj",), "value": ("v_proj",),
    "attention_out": ("o_proj", "attn.c_proj", "out_proj", "attention.dense",
                      "attention.output.dense", "attn.Wo"),
    "mlp_in": ("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h",
               "intermediate.dense", "mlp.Wi"),
    "mlp_gate": ("gate_proj",),
    "mlp_out": ("down_proj", "mlp.c_proj", "fc2", "fc_out", "dense_4h_to_h", "mlp.Wo"),
}  # fmt: skip
"""Layers of a block by what they do -> their names in transformers' models."""
MATRIX = re.compile(r"\.lora_(?:embedding_)?([AB])\b")
"""The two matrices of LoRA in a tensor's name."""
NEED_DATA = ("eva", "corda", "lora_ga", "loftq")
"""Starts of peft that are made from data, or with weights of its own choice."""
NOT_MERGED = ("trainable_token_indices", "layer_replication", "alora_invocation_tokens",
              "arrow_config")  # fmt: skip
"""Fields of peft whose updates are not those of single matrices."""
NAMES = {"target_modules", "modules_to_save", "exclude_modules", "feedforward_modules",
         "target_parameters", "layers_pattern"}  # fmt: skip
"""Fields of peft that list names of modules."""
WORDS = re.compile(r"[\w.]+(\|[\w.]+)*")
"""Names with | between; other texts are peft's patterns."""
ALL_LINEAR = "all-linear"
"""peft's word for all linear layers but the output projection, in place of their names."""
NOT_TRAINED = ("ADALORA", "ADAMSS", "POLY", "LILY")
"""Kinds of peft that need more of a training loop than a loss, or are never merged."""


def peft_config(fields: Mapping[str, Any], lm: Any) -> Any:
    """peft's configuration for this model. Raises `ConfigError` for what cannot be trained here."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING.get(fields["peft_type"])
    known = {f.name: f.type for f in dataclasses.fields(kind)} if kind else {"peft_type": str}
    # What a later release of peft has, and this file does not use, is left out.
    for name, value in ((name, value) for name, value in fields.items() if value):
        if kind is None or name not in known:
            what = f"field {name!r}" if kind else f"peft_type {fields['peft_type']!r}"
            names = ", ".join(sorted(known if kind else PEFT_TYPE_TO_CONFIG_MAPPING))
            raise ConfigError(f"adapter: the installed peft has no {what}.", f"It has {names}.")
        if known[name] in (bool, "bool") and not isinstance(value, bool):
            raise ConfigError(f"adapter: {name} {value!r} is not true or false.", "Give one.")
        if name in NOT_MERGED:
            raise ConfigError(
                f"adapter: {name} cannot be merged into the weights.", "Leave it out."
            )
    if fields["peft_type"] in NOT_TRAINED:
        raise ConfigError(
            f"adapter: {fields['peft_type']} needs a training loop of its own, or is never merged.",
            "Choose another peft_type, such as LORA.",
        )
    fields = {"task_type": "CAUSAL_LM", **{n: v for n, v in fields.items() if n in known}}
    fields["inference_mode"] = False  # what peft saves would not be trained
    _name_modules(fields, lm)
    layers = fields.get("layers_to_transform")
    last = max([layers] if isinstance(layers, int | float) else layers or [-1])
    count = lm.config.get_text_config().num_hidden_layers
    if last >= count:
        raise ConfigError(
            f"lora_layers: there is no layer {last}.", f"The model has layers 0 to {count - 1}."
        )
    if "fan_in_fan_out" not in fields and fields["peft_type"] == "LORA":
        fields["fan_in_fan_out"] = any(isinstance(m, Conv1D) for m in lm.modules())
    start = fields.get("init_lora_weights", True)
    if fields.get("fan_in_fan_out") and start == "olora":
        raise ConfigError("adapter: peft's OLoRA takes no Conv1D of GPT-2.", "Choose pissa.")
    if start in NEED_DATA:
        raise ConfigError(
            f"adapter: init_lora_weights {start!r} is made from data, before a run.",
            "Make it with peft, and go on from it with lora_init.",
        )
    try:
        return kind(**fields)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(
            f"adapter: peft takes no such configuration: {error}.", f"See peft's {kind.__name__}."
        ) from error


def _name_modules(fields: dict[str, Any], lm: Any) -> None:
    """Gives the fields that name modules the form that peft takes."""
    for name in NAMES.intersection(fields):
        # A word is one name to users, and to peft a pattern, or as many names as it has letters.
        value = fields[name]
        if isinstance(value, str) and value != ALL_LINEAR:
            is_pattern = name != "modules_to_save" and not WORDS.fullmatch(value)
            fields[name] = value if is_pattern else value.split("|")
    own = [name for name, _ in lm.named_modules()]
    for module in fields.get("modules_to_save") or ():
        if not any(name.endswith(module) for name in own):  # peft would leave it out
            known = ", ".join(sorted(filter(str.isidentifier, {n.rpartition(".")[2] for n in own})))
            raise ConfigError(
                f"adapter: modules_to_save: a {lm.config.model_type} has no {module}.",
                f"Choose among {known}.",
            )
    if fields.get("target_modules") == [ALL_LINEAR]:
        fields["target_modules"] = ALL_LINEAR
    if isinstance(fields.get("target_modules"), list | tuple):
        fields["target_modules"] = _present(fields["target_modules"], lm)


def _present(targets: Any, lm: Any) -> list[str]:
    """The names of layers that these stand for in this model."""
    kinds = (nn.Linear, nn.Embedding, Conv1D)
    layers = [name for name, module in lm.named_modules() if isinstance(module, kinds)]
    found: list[str] = []
    for target in targets:
        names = (target, *KINDS.get(target, ()))
        own = [n for n in names if any(f".{path}".endswith(f".{n}") for path in layers)]
        if not own:
            known = sorted({path.rpartition(".")[2] for path in layers})
            raise ConfigError(
                f"lora_targets: a {lm.config.model_type} has no {target}.",
                f"Choose among qkv, attention_out, mlp_in, mlp_out, {', '.join(known)}.",
            )
        found += own
    return list(dict.fromkeys(found))


# -- into a model --------------------------------------------------------------------------------
def add_adapter(
    lm: Any, fields: Mapping[str, Any], *, fresh: bool = True, keep_start: bool = False
) -> None:
    """Freezes the model and puts fp32 adapters beside the layers that the fields of peft's
    configuration name.

    fresh: they start as the fields say; else they hold anything, to be loaded next.
    keep_start: as a second adapter, for `as_at_start`.
    """
    from peft import inject_adapter_in_model

    config = peft_config(fields, lm)
    ends = {id(module) for module in (lm.get_input_embeddings(), lm.get_output_embeddings())}
    # A model that only reads has no output projection.
    output = lm.get_output_embeddings()
    is_tied = output is not None and lm.get_input_embeddings().weight is output.weight
    lm.requires_grad_(False)
    own = {field.name for field in dataclasses.fields(config)}
    plain = config
    if "init_lora_weights" in own:
        plain = dataclasses.replace(config, init_lora_weights=True)
    start = plain
    if "lora_dropout" in own:
        start = dataclasses.replace(plain, lora_dropout=0.0)
    try:
        with warnings.catch_warnings(action="ignore"):
            # A bias beside a layer that has none cannot be merged.
            warnings.filterwarnings("error", ".*has no bias")
            inject_adapter_in_model(config if fresh else plain, lm, LEARNED)
            if "init_lora_weights" in own:  # an export asks what it started as
                lm.peft_config[LEARNED].init_lora_weights = config.init_lora_weights
            trained = {n: p for n, p in lm.named_parameters() if p.requires_grad}
            if keep_start:
                inject_adapter_in_model(start, lm, START)
    except (TypeError, ValueError, AttributeError, RuntimeError, UserWarning) as error:
        raise ConfigError(
            f"adapter: peft cannot adapt this model so: {str(error).splitlines()[0]}",
            "Choose other lora_targets, or another configuration.",
        ) from error
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(name in trained)
        if name in trained or f".{START}" in name:
            parameter.data = parameter.data.float()
    adapted = {id(part) for _, layer in _layers(lm) for part in layer.children()}
    saved = [
        end.modules_to_save[LEARNED].weight
        for end in (lm.get_input_embeddings(), output and lm.get_output_embeddings())
        if hasattr(end, "modules_to_save")
    ]
    is_one = len(saved) == 2 and saved[0] is saved[1] and not keep_start  # peft ties one adapter
    if is_tied and adapted & ends and not is_one:
        raise ConfigError(
            "adapter: this model's embeddings are its output projection: an adapter of one alone"
            " cannot be merged.",
            "Leave embed_tokens and lm_head (wte) out, or train them whole:"
            " modules_to_save=embed_tokens,ensure_weight_tying=true.",
        )
    if keep_start:
        for _, layer in _layers(lm):
            layer.set_adapter(LEARNED)
        copy_start(lm)


def copy_start(lm: Any) -> None:
    """Keeps the adapter, as it is now, as its start."""
    named = dict(lm.named_parameters())
    for name, parameter in named.items():
        if f".{START}" in name:
            parameter.data.copy_(named[name.replace(f".{START}", f".{LEARNED}")].data)


def _layers(lm: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return ((name, module) for name, module in lm.named_modules() if isinstance(module, kinds))


@contextmanager
def as_at_start(lm: Any) -> Iterator[None]:
    """A model's adapters as they were before they learned, inside: at their start, or off."""
    layers = [layer for _, layer in _layers(lm)]
    has_start, was_training = START in getattr(lm, "peft_config", {}), lm.training
    lm.eval()
    active = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer.set_adapter(START, inference_mode=True) if has_start else layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, names in zip(layers, active, strict=True):
            layer.set_adapter(LEARNED) if has_start else layer.enable_adapters(True)
            layer._active_adapter = names  # the same list: what steps replace is looked at
        lm.train(was_training)


def load_adapter(lm: Any, folder: Path) -> None:
    """Puts the adapter of a PEFT directory into a model with one of its configuration."""
    from peft import set_peft_model_state_dict

    try:
        weights = load_file(folder / WEIGHTS_FILE)
        plain = {name.removeprefix("base_model.model."): t.float() for name, t in weights.items()}
        done: Any = set_peft_model_state_dict(lm, plain, LEARNED)
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise DataError(
            f"Cannot read the adapter {folder}: {' '.join(str(error).split())}.",
            "lora_init takes a directory that peft saved, with safetensors.",
        ) from error
    missing = [n for n, p in lm.named_parameters() if p.requires_grad and n in done.missing_keys]
    for name in [*done.unexpected_keys[:1], *missing[:1]]:
        raise DataError(
            f"The adapter {folder} does not fit these weights: {name!r} is in one of them alone.",
            "Give the weights that it was trained beside (--init).",
        )
    if not takes_part(lm.peft_config[LEARNED].to_dict()):
        copy_start(lm)


# -- out of a model ------------------------------------------------------------------------------
def merge_adapter(lm: Any) -> None:
    """Adds the adapter to the weights and removes it; in fp64, as an update is mostly rounded away
    in bf16."""
    # From the inside: parameters of one module have adapters around each other.
    for name, layer in reversed(list(_layers(lm))):
        if hasattr(layer, "modules_to_save"):
            lm.set_submodule(name, layer.modules_to_save[LEARNED])
            continue
        dtype = next(p.dtype for n, p in layer.named_parameters() if "base_layer" in n)
        layer.double()
        layer.merge(adapter_names=[LEARNED])
        lm.set_submodule(name, layer.get_base_layer().to(dtype))
    del lm.peft_config


def adapter_files(lm: Any) -> dict[str, bytes]:
    """A PEFT directory: the adapter beside the weights that the run began with."""
    from peft import get_peft_model_state_dict

    fields = lm.peft_config[LEARNED].to_dict() | {"inference_mode": True}
    learned, start = (
        get_peft_model_state_dict(lm, adapter_name=name, save_embedding_layers=False)
        if name in lm.peft_config else {}
        for name in (LEARNED, START)
    )  # fmt: skip
    if takes_part(fields):
        # What was taken out of the weights, W - B0 A0 + B A, as an update of W: [B -B0] [A; A0].
        for name in learned:
            if (matrix := MATRIX.search(name)) is None:
                continue  # a whole module, a magnitude
            down = matrix[1] == "A"
            both = [learned[name], start[name] if down else -start[name]]
            learned[name] = torch.cat(both, 0 if down else 1)
        factor = 2**0.5 if fields["use_rslora"] else 2
        for name, pattern, by in (
            ("r", "rank_pattern", 2),
            ("lora_alpha", "alpha_pattern", factor),
        ):
            fields[name] *= by
            fields[pattern] = {layer: by * value for layer, value in fields[pattern].items()}
        fields["init_lora_weights"] = True
    # Some kinds have one tensor in several layers, which safetensors refuses.
    tensors = {
        f"base_model.model.{n}": t.detach().cpu().contiguous().clone() for n, t in learned.items()
    }
    text = json.dumps(fields, indent=2, default=lambda value: sorted(map(str, value)))
    return {CONFIG_FILE: text.encode(), WEIGHTS_FILE: save(tensors, {"format": "pt"})}


def takes_part(fields: Mapping[str, Any]) -> bool:
    """Whether the adapter starts as a part of the weights, which is taken out of them."""
    return str(fields.get("init_lora_weights")).startswith(("pissa", "olora"))
