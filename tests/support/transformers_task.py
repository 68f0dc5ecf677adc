"""A tiny BERT of transformers with random weights, in a file that imports accelerate itself."""

import accelerate  # noqa: F401 - what many scripts begin with
import numpy as np
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

from tpukit.train.task import Datasets, Task, TrainingDefaults


def sentence(index):
    words = np.random.default_rng(index).integers(0, 50, 8)
    return {"words": words, "label": np.int64(index % 2)}


class Sentiment(Task):
    defaults = TrainingDefaults(global_batch_size=8, max_steps=2)

    def build_model(self, ops):
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(
            vocab_size=50, intermediate_size=32, max_position_embeddings=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes,
        )  # fmt: skip
        return BertForSequenceClassification(config)

    def datasets(self):
        sentences = [*map(sentence, range(32))]
        return Datasets(sentences, sentences)

    def loss(self, model, batch):
        logits = model(input_ids=batch["words"]).logits
        return {"loss": F.cross_entropy(logits, batch["label"], reduction="none")}
