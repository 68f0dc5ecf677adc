"""The two models of `summarize_training.py` and `summarize_generation.py`, as transformers has
them: GPT-2 124M, and one of 100 M parameters of Qwen3's shape (twice as many queries as keys, heads
of 128, their norms, SwiGLU, tied embeddings)."""

from typing import Any

VOCABULARY, END = 50257, 50256
MODELS = {"gpt2": "GPT-2 124M", "qwen3": "Qwen3's shape, 100M"}


def make_transformers(name: str) -> Any:
    """Random weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

    ends = {"bos_token_id": END, "eos_token_id": END}
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=640, intermediate_size=1920, num_hidden_layers=11,
            num_attention_heads=10, num_key_value_heads=5, head_dim=128,
            max_position_embeddings=1024, tie_word_embeddings=True, **ends,
        ))  # fmt: skip
    # The fused tanh GELU: the default `gelu_new` is several slow operations, the same function.
    return GPT2LMHeadModel(GPT2Config(
        activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        **ends,
    ))  # fmt: skip
