"""Token classification: ModernBERT with the collator of transformers."""

import numpy as np
import torch.nn.functional as F
from predicting import Predicting
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForTokenClassification,
    ModernBertConfig,
    ModernBertForTokenClassification,
    PreTrainedTokenizerFast,
)

from tpukit.train.task import Datasets, TrainingDefaults


def make_tokenizer():
    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i + 2 for i in range(60)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )


def sentences(count, seed):
    tokenizer, rng = make_tokenizer(), np.random.default_rng(seed)
    for _ in range(count):
        words = rng.integers(0, 60, rng.integers(4, 20))
        tokens = tokenizer(" ".join(f"w{word}" for word in words))["input_ids"]
        yield {"input_ids": tokens, "labels": [int(word % 3) for word in words]}


class Tagger(Predicting):
    defaults = TrainingDefaults(global_batch_size=16, epochs=2, lr=1e-3)

    def build_model(self, ops):
        config = ModernBertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, num_labels=3, pad_token_id=0, attn_implementation="sdpa",
        )  # fmt: skip
        return ModernBertForTokenClassification(config)

    def datasets(self):
        return Datasets([*sentences(48, 0)], [*sentences(21, 1)])

    def collate(self, samples, micro):
        pad = DataCollatorForTokenClassification(
            make_tokenizer(), padding="max_length", max_length=32
        )  # one shape for a TPU
        return dict(pad([dict(sample) for sample in samples]))

    def loss(self, model, batch):
        scores = model(batch["input_ids"], batch["attention_mask"]).logits.float()
        losses = F.cross_entropy(
            scores.transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none"
        )
        counted = (batch["labels"] != -100).float().sum(1)
        return {"loss": losses.sum(1) / counted.clamp(min=1), "weight": counted}

    def outputs(self, model, batch):
        return model(batch["input_ids"], batch["attention_mask"]).logits.argmax(2)
