"""A tiny BERT, its tokenizer and texts that it can classify, as a competition holds them."""

import csv

import numpy as np

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "day", "very", "a"]


def write_bert(folder):
    """The model and its tokenizer in `folder/bert`, as `save_pretrained` leaves them."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder / "bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")


def write_texts(folder, parts=("train", "valid", "test"), rows=20):
    """PART.csv (id, text, label) for each part, test.csv without labels."""
    rng = np.random.default_rng(0)
    for part in parts:
        columns = 2 if part == "test" else 3
        with (folder / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerow(["id", "text", "label"][:columns])
            for index in range(rows):
                label = ["bad", "good"][index % 2]
                words = ["a", label, *["very"] * rng.integers(0, 12), "day"]
                csv.writer(file).writerow([f"{part}{index}", " ".join(words), label][:columns])
