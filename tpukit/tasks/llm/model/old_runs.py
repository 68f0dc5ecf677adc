"""Runs of the own decoder that tpukit had before transformers' models: read, not resumed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOP = {"token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
BLOCK = {
    "norm_1": "input_layernorm", "query": "self_attn.q_proj", "key": "self_attn.k_proj",
    "value": "self_attn.v_proj", "qkv": "self_attn.qkv_proj", "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm", "attention_out": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm", "mlp_gate": "mlp.gate_proj", "mlp_in": "mlp.up_proj",
    "mlp_out": "mlp.down_proj", "after_1": "post_attention_layernorm",
    "after_2": "post_feedforward_layernorm",
}  # fmt: skip
"""Modules of a block, and what transformers calls them in all families but GPT-2."""
OTHERS = {
    "gemma2": {"norm_2": "pre_feedforward_layernorm"},
    "gemma3_text": {"norm_2": "pre_feedforward_layernorm"},
    "phi3": {"mlp_in": "mlp.gate_up_proj"},
}
GPT2_TOP = {"token_embedding": "transformer.wte", "position_embedding": "transformer.wpe",
            "norm": "transformer.ln_f"}  # fmt: skip
GPT2_BLOCK = {"norm_1": "ln_1", "qkv": "attn.c_attn", "attention_out": "attn.c_proj",
              "norm_2": "ln_2", "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"}  # fmt: skip


@dataclass(frozen=True)
class OldRun:
    """What such a run recorded of its model, and its LoRA settings."""

    recorded: Mapping[str, Any]
    adapter: Mapping[str, Any] | None

    @property
    def family(self) -> str:
        return str(self.recorded.get("family", "gpt2"))

    def shape(self) -> dict[str, Any]:
        """The fields of `load.Shape`."""
        of = self.recorded
        if of.get("source") is not None:
            fields = {**of["source"], "model_type": self.family}
        else:
            exact = of.get("exact_gelu") or of.get("activation") == "gelu"
            fields = {
                "model_type": "gpt2", "n_layer": of["layers"], "n_head": of["heads"],
                "n_embd": of["width"], "n_positions": of["block_size"],
                "layer_norm_epsilon": of.get("norm_eps", 1e-5),
                "activation_function": "gelu" if exact else "gelu_new",
                "bos_token_id": None, "eos_token_id": None,
            }  # fmt: skip
        fields["vocab_size"] = of["vocabulary_size"]
        return {"fields": fields, "block_size": of["block_size"]}

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of `LanguageModel`, adapters merged into their matrices."""
        return {f"lm.{self._name(n)}": self._turned(n, t) for n, t in self._merged(weights).items()}

    def _merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In fp64: in bf16 most of an update would be rounded away."""
        merged = {n: t for n, t in weights.items() if not n.endswith((".down", ".up"))}
        for name in (name for name in weights if name.endswith(".up")):
            assert self.adapter is not None
            base = name.removesuffix(".up")
            update = weights[name].double() @ weights[f"{base}.down"].double()
            scale = self.adapter["lora_alpha"] / self.adapter["r"]
            weight = merged[f"{base}.weight"]
            merged[f"{base}.weight"] = (weight.double() + scale * update).to(torch.float32)
        return merged

    def _name(self, name: str) -> str:
        gpt2 = self.family == "gpt2"
        module, *rest = name.split(".")
        if module != "blocks":
            return ".".join(((GPT2_TOP if gpt2 else TOP)[module], *rest))
        layer, module, *rest = rest
        if gpt2:
            return ".".join(("transformer.h", layer, GPT2_BLOCK[module], *rest))
        known = BLOCK | OTHERS.get(self.family, {})
        return ".".join(("model.layers", layer, known[module], *rest))

    def _turned(self, name: str, tensor: Tensor) -> Tensor:
        """GPT-2's matrices are stored transposed by transformers."""
        in_block = name.startswith("blocks.") and name.endswith(".weight")
        return tensor.t() if self.family == "gpt2" and in_block and tensor.ndim == 2 else tensor
