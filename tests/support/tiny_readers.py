"""Tiny encoders and a decoder of transformers as folders, and tables of texts for them."""

import csv

import torch

from tpukit.tasks.hub.models import without_output
from tpukit.tasks.text.generate import write_review
from tpukit.tasks.text.model.reader import tokenizer_of_texts

LABELS = ("bad", "fair", "good")


def reviews(count, seed=0):
    return [(f"r{index}", *write_review(seed, "x", index)) for index in range(count)]


def write_tables(folder, rows=60, tests=12):
    """train.csv (id, text, label) and test.csv (id, text)."""
    folder.mkdir(parents=True, exist_ok=True)
    made = reviews(rows + tests)
    for name, part, columns in (("train", made[:rows], 3), ("test", made[rows:], 2)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [("id", "text", "label")[:columns], *(row[:columns] for row in part)]
            )
    return folder


def write_reader(folder, kind):
    """A classifier of three classes with its tokenizer, as `save_pretrained` leaves them."""
    import transformers as t

    tokenizer = tokenizer_of_texts([text for _, text, _ in reviews(60)])
    size = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 160,
        "pad_token_id": tokenizer.pad_token_id, "num_labels": 3,
    }  # fmt: skip
    further = {
        "bert": ("Bert", {}),
        "roberta": ("Roberta", {"max_position_embeddings": 164}),
        "deberta": ("DebertaV2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                                  "position_buckets": 16, "share_att_key": True,
                                  "norm_rel_ebd": "layer_norm", "type_vocab_size": 0}),
        "modernbert": ("ModernBert", {"local_attention": 16, "global_attn_every_n_layers": 2}),
        "qwen": ("Qwen2", {"num_key_value_heads": 2}),
    }[kind]  # fmt: skip
    torch.manual_seed(1)
    with without_output():
        config = getattr(t, f"{further[0]}Config")(**{**size, **further[1]})
        model = getattr(t, f"{further[0]}ForSequenceClassification")(config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder
