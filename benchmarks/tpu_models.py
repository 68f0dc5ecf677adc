"""Text models of `tpu_batches.py`, at their usual sizes, from configurations alone."""

from pathlib import Path
from typing import Any

from torch import nn

SIZES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"vocab_size": 50265, "max_position_embeddings": 514},
    "deberta-v3-small": {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12,
                         "intermediate_size": 3072},
    "deberta-v3-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                        "intermediate_size": 3072},
    "deberta-v3-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                         "intermediate_size": 4096},
    "modernbert-base": {"vocab_size": 50368},
    "llama-1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
                 "tie_word_embeddings": True},
}  # fmt: skip
DEBERTA_V3 = {
    "vocab_size": 128100, "relative_attention": True, "position_buckets": 256, "norm_rel_ebd":
    "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
    "position_biased_input": False, "max_relative_positions": -1, "max_position_embeddings": 512,
    "pooler_hidden_size": 768,
}  # fmt: skip


def write_encoder(folder: Path, name: str) -> None:
    """The configuration of an encoder and a tokenizer with its special tokens alone, for the text
    task; it makes the weights."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]",
               "unk_token": "[UNK]", "mask_token": "[MASK]"}  # fmt: skip
    words = {word: place for place, word in enumerate(special.values())}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    if name.startswith("deberta"):
        config = transformers.DebertaV2Config(**{**DEBERTA_V3, **SIZES[name]})
    else:
        config = transformers.ModernBertConfig(**SIZES[name])
    config.save_pretrained(folder)


def make_text_model(name: str) -> nn.Module:
    """A classifier over token ids; for Llama a language model."""
    import transformers

    own = SIZES[name]
    if name.startswith("deberta"):
        config = transformers.DebertaV2Config(**{**DEBERTA_V3, **own})
        return transformers.DebertaV2ForSequenceClassification(config)
    if name.startswith("llama"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**own))
    if name == "roberta":
        return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**own))
    return transformers.BertForSequenceClassification(transformers.BertConfig(**own))
