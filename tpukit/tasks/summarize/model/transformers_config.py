"""A decoder's shape from a transformers configuration: fields are honoured or refused by name."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tpukit.errors import DataError
from tpukit.tasks.summarize.model.decoder import ACTIVATIONS, DecoderConfig
from tpukit.tasks.summarize.model.families import FAMILIES, SIZES_FIELDS, Family
from tpukit.tasks.summarize.model.rotary import check_rope

WHAT_INIT_TAKES = (
    "--init takes a Hugging Face directory (config.json, model.safetensors), a name on the hub, or"
    " a nanoGPT checkpoint (.pt)."
)
ONLY_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
}
"""Fields that change the model, and the values that are honoured in every family."""
WITHOUT_EFFECT = {
    # Of the file, and of how transformers computes.
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "use_bfloat16", "torchscript", "tf_legacy_loss", "gradient_checkpointing", "return_dict",
    "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_past",
    "output_scores", "chunk_size_feed_forward", "reorder_and_upcast_attn", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "is_decoder", "auto_map",
    # Of training and of other heads: dropout here is `--set dropout=P`.
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "initializer_range", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "num_labels", "_num_labels", "id2label", "label2id", "problem_type", "finetuning_task",
    "cross_attention_hidden_size", "task_specific_params", "tie_encoder_decoder",
    # Of the tokenizer and of generation, which has options of its own.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "tokenizer_class", "prefix", "bad_words_ids", "exponential_decay_length_penalty",
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups",
    "num_return_sequences", "diversity_penalty", "length_penalty", "repetition_penalty",
    "encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "max_length", "min_length",
    "early_stopping", "remove_invalid_values", "cache_implementation", "pretraining_tp",
    "attention_dropout", "embedding_dropout", "transformers.js_config", "unsloth_version",
    "unsloth_fixed", "is_llama_config",
    "max_window_layers", "no_rope_layer_interval",
}  # fmt: skip


class _Fields:
    """The fields of a configuration; what nothing has asked for changes the model unknown to us."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], file: Path) -> None:
        self.values = {**defaults, **given}
        self.file = file
        self._given = given
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The value of an optional field."""
        self._read.add(name)
        return self.values.get(name, default)

    def require(self, name: str) -> Any:
        if name not in self.values:
            raise DataError(f"{self.file} is not complete: {name!r} is missing.", WHAT_INIT_TAKES)
        return self.take(name)

    def allow(self, name: str, values: tuple[Any, ...], kind: str) -> None:
        """Raises `DataError` where the field has another value; the first is the default."""
        if self.take(name, values[0]) not in values:
            raise DataError(
                f"{self.file}: {name} = {json.dumps(self.values[name])}; tpukit's {kind} knows "
                f"{' or '.join(json.dumps(v) for v in values)} only.",
                "Other values give other logits: use weights of a plain model of this kind.",
            )

    def refuse_unknown(self) -> None:
        unknown = sorted(self._given.keys() - self._read - WITHOUT_EFFECT)
        if unknown:
            raise DataError(
                f"{self.file}: tpukit does not know what {', '.join(unknown)} means.",
                "Remove it from config.json if the logits do not depend on it.",
            )


def read_shape(given: Mapping[str, Any], path: Path) -> DecoderConfig:
    """The shape in `config.json` of the directory `path`.

    Raises `DataError` naming a field that is missing, unknown, or has a value that is not honoured.
    """
    file = path / "config.json"
    kind = given.get("model_type", "gpt2")
    if kind not in FAMILIES:
        raise DataError(
            f"{file}: model_type {kind!r} is not known.",
            f"--init takes {', '.join(FAMILIES)}.",
        )
    fields = _Fields(given, FAMILIES[kind].defaults, file)
    fields.take("model_type")
    for name, values in {**ONLY_VALUES, **FAMILIES[kind].only}.items():
        fields.allow(name, values, kind)
    shape = _gpt2_shape(fields) if kind == "gpt2" else _shape(fields, kind, FAMILIES[kind])
    fields.refuse_unknown()
    return checked_shape(shape, file)


def _gpt2_shape(fields: _Fields) -> dict[str, Any]:
    width = fields.require("n_embd")
    fields.allow("n_inner", (None, 4 * width if isinstance(width, int) else None), "GPT-2")
    fields.allow("tie_word_embeddings", (True,), "GPT-2")
    fields.allow("activation_function", tuple(ACTIVATIONS), "GPT-2")
    for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "n_ctx"):
        fields.take(name)
    return {
        "layers": fields.require("n_layer"),
        "heads": fields.require("n_head"),
        "width": width,
        "vocabulary_size": fields.require("vocab_size"),
        "block_size": fields.take("n_positions") or fields.require("n_ctx"),
        "activation": fields.take("activation_function", "gelu_new"),
        "norm_eps": fields.take("layer_norm_epsilon", 1e-5),
    }


def _shape(fields: _Fields, kind: str, family: Family) -> dict[str, Any]:
    """The fields of `DecoderConfig` of every family but GPT-2."""
    names = {**SIZES_FIELDS, **family.fields}
    required = {"layers", "heads", "width", "vocabulary_size", "block_size", "mlp_width"}
    shape: dict[str, Any] = {"family": kind, **family.shape}
    for ours, theirs in names.items():
        value = fields.require(theirs) if ours in required else fields.take(theirs)
        if value is not None:
            shape[ours] = value
    activation = shape.setdefault("activation", "silu")
    fields.allow(names["activation"], (activation, *ACTIVATIONS)[activation not in ACTIVATIONS :],
                 kind)  # fmt: skip
    rotated = fields.take("no_rope_layers")
    if kind == "smollm3":
        every = fields.take("no_rope_layer_interval", 4)
        rotated = rotated or [int((n + 1) % every != 0) for n in range(shape["layers"])]
    shape["unrotated"] = tuple(n for n, turns in enumerate(rotated or ()) if not turns)
    shape["window"], shape["windowed"] = _windows(fields, family, shape)
    shape["rope"], shape["window_rope"] = _rope(fields, kind)
    return {**shape, "source": dict(fields.values)}


def _windows(
    fields: _Fields, family: Family, shape: Mapping[str, Any]
) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers that have it."""
    window, types = fields.take("sliding_window"), fields.take("layer_types")
    if family.windows == "late" or shape["family"] == "smollm3":
        window = window if fields.take("use_sliding_window", False) else None
    patterns = [fields.take(f"{start}sliding_window_pattern") for start in ("", "_")]
    pattern = next(filter(None, patterns), 6)
    first = fields.take("max_window_layers", 28)
    if window is None:
        return None, ()
    if types is not None:
        if other := sorted(set(types) - {"full_attention", "sliding_attention"}):
            raise DataError(
                f"{fields.file}: layer_types has {other[0]!r}.",
                "tpukit knows full_attention and sliding_attention.",
            )
        return window, tuple(n for n, name in enumerate(types) if name == "sliding_attention")
    layers = range(shape["layers"])
    return window, {
        "all": tuple(layers),
        "even": tuple(layers[::2]),
        "pattern": tuple(n for n in layers if (n + 1) % pattern),
        "late": tuple(layers[first:]),
        "none": shape["unrotated"],
    }[family.windows]


def _rope(fields: _Fields, kind: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Rotary positions of all layers, and of those with a window where they differ."""
    given = fields.take("rope_parameters") or {}
    scaling = fields.take("rope_scaling") or {}
    plain = {"rope_theta": fields.take("rope_theta", 1e6 if kind == "gemma3_text" else 1e4)}
    longest = fields.require("max_position_embeddings")
    plain["original_max_position_embeddings"] = (
        fields.take("original_max_position_embeddings") or longest
    )
    if kind == "phi3":
        plain["partial_rotary_factor"] = fields.take("partial_rotary_factor", 1.0)
    of_window = None
    if kind == "gemma3_text":
        local = {"rope_theta": fields.take("rope_local_base_freq", 1e4), "rope_type": "default"}
        of_window = {**local, **given.get("sliding_attention", {})}
        given = given.get("full_attention", {})
    rope = {**plain, **scaling, **given}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if rope["rope_type"] in ("default", "linear"):
        rope.pop("original_max_position_embeddings")
    elif rope.get("factor") is None:
        rope["factor"] = longest / rope["original_max_position_embeddings"]
    for one in (rope, of_window or rope):
        check_rope(one, str(fields.file))
    return rope, of_window


def fold_score_scales(
    tensors: dict[str, Tensor], fields: Mapping[str, Any], config: DecoderConfig
) -> None:
    """Scales the queries where the configuration scales attention scores in another way."""
    unscaled = not fields.get("scale_attn_weights", True)
    by_layer = fields.get("scale_attn_by_inverse_layer_idx", False)
    for layer in range(config.layers):
        factor = math.sqrt(config.width // config.heads) if unscaled else 1.0
        factor /= layer + 1 if by_layer else 1
        for kind in ("weight", "bias"):
            tensors[f"blocks.{layer}.qkv.{kind}"][: config.width] *= factor


def checked_shape(shape: Mapping[str, Any], path: Path) -> DecoderConfig:
    """Raises `DataError` where a size is not a positive whole number."""
    sizes = {name: shape[name] for name in ("layers", "heads", "width", "vocabulary_size",
                                            "block_size")}  # fmt: skip
    bad = [n for n, v in sizes.items() if not isinstance(v, int) or isinstance(v, bool) or v < 1]
    if not bad and sizes["width"] % sizes["heads"]:
        bad = ["width", "heads"]
    if bad:
        found = ", ".join(f"{name} {sizes[name]!r}" for name in bad)
        raise DataError(f"{path} has an invalid shape: {found}.", WHAT_INIT_TAKES)
    return DecoderConfig(**shape)
