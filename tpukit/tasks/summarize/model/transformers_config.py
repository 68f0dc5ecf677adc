"""GPT-2's shape from a transformers configuration: each field is honoured, or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tpukit.errors import DataError
from tpukit.tasks.summarize.model.gpt2 import GPT2Config

WHAT_INIT_TAKES = (
    "--init takes a Hugging Face directory (config.json, model.safetensors), a name on the hub, or"
    " a nanoGPT checkpoint (.pt)."
)
ACTIVATIONS = {"gelu_new": False, "gelu": True, "gelu_pytorch_tanh": False}
"""Whether GELU is exact, by the name that a transformers configuration gives it."""
ONLY_VALUES: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "quantization_config": (None,),
}
"""Fields of a transformers configuration that change the model, and the values that are GPT-2's."""
HONOURED = {
    "n_layer", "n_head", "n_embd", "vocab_size", "n_positions", "n_ctx", "layer_norm_epsilon",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
}  # fmt: skip
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
    "early_stopping", "remove_invalid_values",
}  # fmt: skip


def read_shape(fields: Mapping[str, Any], path: Path) -> GPT2Config:
    """The shape in `config.json` of the directory `path`.

    Raises `DataError` naming a field that is missing, unknown, or not as in a plain GPT-2.
    """
    file = path / "config.json"
    width = fields.get("n_embd")
    allowed: dict[str, tuple[Any, ...]] = {
        **ONLY_VALUES,
        "n_inner": (None, 4 * width if isinstance(width, int) else None),
        "activation_function": tuple(ACTIVATIONS),
    }
    for name, values in allowed.items():
        if fields.get(name, values[0]) not in values:
            raise DataError(
                f"{file}: {name} = {json.dumps(fields[name])}; tpukit's GPT-2 knows "
                f"{' or '.join(json.dumps(v) for v in values)} only.",
                "Other values give other logits: use weights of a plain GPT-2.",
            )
    unknown = sorted(fields.keys() - allowed.keys() - HONOURED - WITHOUT_EFFECT)
    if unknown:
        raise DataError(
            f"{file}: tpukit does not know what {', '.join(unknown)} means.",
            "Remove it from config.json if the logits do not depend on it.",
        )
    try:
        shape = {
            "layers": fields["n_layer"],
            "heads": fields["n_head"],
            "width": width,
            "vocabulary_size": fields["vocab_size"],
            "block_size": fields.get("n_positions") or fields["n_ctx"],
        }
    except KeyError as error:
        raise DataError(
            f"{file} is not GPT-2's: {error.args[0]!r} is missing.", WHAT_INIT_TAKES
        ) from error
    shape["exact_gelu"] = ACTIVATIONS[fields.get("activation_function", "gelu_new")]
    shape["norm_eps"] = fields.get("layer_norm_epsilon", 1e-5)
    return checked_shape(shape, file)


def fold_score_scales(
    tensors: dict[str, Tensor], fields: Mapping[str, Any], config: GPT2Config
) -> None:
    """Scales the queries where the configuration scales attention scores in another way."""
    unscaled = not fields.get("scale_attn_weights", True)
    by_layer = fields.get("scale_attn_by_inverse_layer_idx", False)
    for layer in range(config.layers):
        factor = math.sqrt(config.width // config.heads) if unscaled else 1.0
        factor /= layer + 1 if by_layer else 1
        for kind in ("weight", "bias"):
            tensors[f"blocks.{layer}.qkv.{kind}"][: config.width] *= factor


def checked_shape(shape: Mapping[str, Any], path: Path) -> GPT2Config:
    """Raises `DataError` where a size is not a positive whole number."""
    sizes = {name: shape[name] for name in ("layers", "heads", "width", "vocabulary_size",
                                            "block_size")}  # fmt: skip
    bad = [n for n, v in sizes.items() if not isinstance(v, int) or isinstance(v, bool) or v < 1]
    if not bad and sizes["width"] % sizes["heads"]:
        bad = ["width", "heads"]
    if bad:
        found = ", ".join(f"{name} {sizes[name]!r}" for name in bad)
        raise DataError(f"{path} has an invalid shape: {found}.", WHAT_INIT_TAKES)
    return GPT2Config(**shape)
