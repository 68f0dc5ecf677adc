"""Families of language models: each one's names of fields and tensors in transformers' files."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

LLAMA_TOP = {
    "token_embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
LLAMA_BLOCK = {
    "norm_1": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "qkv": "self_attn.qkv_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_out": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm",
    "mlp_gate": "mlp.gate_proj",
    "mlp_in": "mlp.up_proj",
    "mlp_out": "mlp.down_proj",
}
GEMMA_BLOCK = LLAMA_BLOCK | {
    "after_1": "post_attention_layernorm",
    "norm_2": "pre_feedforward_layernorm",
    "after_2": "post_feedforward_layernorm",
}
LLAMA_SHAPE = {
    "fused": False, "gated": True, "rms_norm": True, "attention_bias": False,
    "attention_out_bias": False, "mlp_bias": False,
}  # fmt: skip
GEMMA_SHAPE = LLAMA_SHAPE | {"norms": "both", "norm_offset": True, "scaled_embedding": True}
SIZES_FIELDS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "vocabulary_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "tied": "tie_word_embeddings",
}
HEAD = {"head_width": "head_dim"}
BIASES = {"attention_bias": "attention_bias", "attention_out_bias": "attention_bias"}
MLP_BIAS = {"mlp_bias": "mlp_bias"}
GELU = "gelu_pytorch_tanh"
PLAIN = {"attention_bias": (False, None), "mlp_bias": (False, None), "lm_head_bias": (False, None)}
"""What configurations say of biases that the family does not have."""
GEMMA_FIELDS = HEAD | BIASES | {
    "activation": "hidden_activation", "query_scale": "query_pre_attn_scalar",
    "attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping",
}  # fmt: skip
GEMMA_DEFAULTS = {
    "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "attention_bias": False,
    "hidden_activation": GELU, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers."""

    architecture: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `DecoderConfig` that all its models share."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of `DecoderConfig` and what the configuration calls them."""
    block: Mapping[str, str] = field(default_factory=lambda: LLAMA_BLOCK)
    """Modules of a block and what the weights' file calls them."""
    top: Mapping[str, str] = field(default_factory=lambda: LLAMA_TOP)
    layer: str = "model.layers.{}."
    """What stands before the names of a block."""
    windows: str = "none"
    """Layers with a window, where `layer_types` does not list them: `all`, `even`, `pattern`
    (all but each sixth), `late` (from `max_window_layers` on) or `none`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that a configuration may leave out."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that change the model, and the values that are honoured; the first is the default."""


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        block={
            "norm_1": "ln_1", "qkv": "attn.c_attn", "attention_out": "attn.c_proj",
            "norm_2": "ln_2", "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj",
        },
        top={"token_embedding": "transformer.wte", "position_embedding": "transformer.wpe",
             "norm": "transformer.ln_f", "head": "lm_head"},
        layer="transformer.h.{}.",
    ),
    "llama": Family(
        "LlamaForCausalLM", LLAMA_SHAPE, HEAD | BIASES | MLP_BIAS,
        defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    ),
    "mistral": Family(
        "MistralForCausalLM", LLAMA_SHAPE, HEAD, windows="all", only=PLAIN,
        defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "sliding_window": 4096,
                  "num_key_value_heads": 8},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", LLAMA_SHAPE | {"attention_bias": True}, windows="late",
        defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", LLAMA_SHAPE | {"qk_norm": "head"}, HEAD | BIASES, windows="late",
        defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", GEMMA_SHAPE, GEMMA_FIELDS, GEMMA_BLOCK, windows="even",
        defaults=GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        only={"use_bidirectional_attention": (None, False), "hidden_act": (GELU,)},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", GEMMA_SHAPE | {"qk_norm": "head"}, GEMMA_FIELDS, GEMMA_BLOCK,
        windows="pattern", defaults=GEMMA_DEFAULTS,
        only={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,),
              "hidden_act": (GELU,)},
    ),
    "phi3": Family(
        "Phi3ForCausalLM", LLAMA_SHAPE | {"fused": True},
        block=LLAMA_BLOCK | {"mlp_in": "mlp.gate_up_proj"}, windows="all",
        only=PLAIN | {"full_attn_mod": (1,), "interpolate_factor": (1,)},
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", LLAMA_SHAPE, BIASES | MLP_BIAS,
        defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 2e6},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", LLAMA_SHAPE | {"norms": "after", "qk_norm": "all"}, BIASES,
        block={**{k: v for k, v in LLAMA_BLOCK.items() if not k.startswith("norm_")},
               "after_1": "post_attention_layernorm", "after_2": "post_feedforward_layernorm"},
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        only={"clip_qkv": (None,)},
    ),
}  # fmt: skip
"""Families by the `model_type` of a transformers configuration."""


@cache
def named_sizes() -> dict[str, dict[str, Any]]:
    """Public models by name: `hub`, the name there, and the fields of a configuration."""
    text = (files("tpukit.tasks.summarize.model") / "sizes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def their_name(family: Family, name: str) -> str:
    """A module or tensor of ours as the weights' file calls it."""
    if not name.startswith("blocks."):
        module, *rest = name.split(".")
        return ".".join((family.top[module], *rest))
    _, layer, module, *rest = name.split(".")
    return family.layer.format(layer) + ".".join((family.block[module], *rest))
