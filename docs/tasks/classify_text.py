"""Classify texts of any length with a transformers model (BERT, DistilBERT, DeBERTa, ...).

tpukit train --task docs/tasks/classify_text.py:Texts --data-path reviews
tpukit test --run results/texts
tpukit predict --run results/texts --data-path reviews --out classes.csv
`reviews` holds train.csv and valid.csv with the columns text and label (0, 1, ...). The setting
`model` is a name on the Hugging Face Hub, or a folder of `save_pretrained`.
"""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tpukit.train.inference import infer
from tpukit.train.task import Datasets, ShuffledPlan, Task, TrainingDefaults, stack_samples


class TextFile:
    def __init__(self, path, tokenizer, longest):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        self.texts = [row["text"] for row in rows]
        self.labels = [int(row["label"]) for row in rows]
        self.tokens = tokenizer(self.texts, truncation=True, max_length=longest)["input_ids"]
        self.lengths = np.array([len(tokens) for tokens in self.tokens])

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"tokens": self.tokens[index], "label": self.labels[index]}


class ByLength:
    """The steps of `ShuffledPlan`, each sorted by length before it is cut into micro-batches."""

    def __init__(self, data, settings, with_length):
        self.shuffled = ShuffledPlan(len(data), settings)
        self.data, self.with_length = data, with_length

    def steps_per_epoch(self):
        return self.shuffled.steps_per_epoch()

    def step(self, step):
        micro_batches = self.shuffled.step(step)
        keys = [key for micro in micro_batches for key in micro.keys]
        waiting = iter(sorted(keys, key=lambda key: self.data.lengths[key.sample]))
        return [
            self.with_length(replace(m, keys=tuple(next(waiting) for _ in m.keys)), self.data)
            for m in micro_batches
        ]


class Texts(Task):
    name = "texts"
    defaults = TrainingDefaults(global_batch_size=32, epochs=3, lr=5e-5, weight_decay=0.01)

    def __init__(self, data_path="./data", model="bert-base-uncased", classes=2, lengths="64,512"):
        self.data_path, self.model, self.classes = Path(data_path), model, classes
        # The lengths that a batch may have: on a TPU each is compiled once.
        self.lengths = [int(length) for length in str(lengths).split(",")]

    def build_model(self, ops):
        return AutoModelForSequenceClassification.from_pretrained(
            self.model, num_labels=self.classes
        )

    def texts(self, part, data_path=None):
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        path = Path(data_path or self.data_path) / f"{part}.csv"
        return TextFile(path, tokenizer, self.lengths[-1])

    def datasets(self):
        return Datasets(self.texts("train"), self.texts("valid"))

    def with_length(self, micro, data):
        longest = max(data.lengths[key.sample] for key in micro.keys)
        return replace(micro, shape=next(n for n in self.lengths if n >= longest))

    def plan(self, data, settings):
        return ByLength(data, settings, self.with_length)

    def evaluation_batches(self, data, settings):
        for micro in super().evaluation_batches(data, settings):
            yield self.with_length(micro, data)

    def collate(self, samples, micro):
        padded = []
        for sample in samples:
            count = len(sample["tokens"])
            tokens, attention = np.zeros((2, micro.shape), np.int64)
            tokens[:count], attention[:count] = sample["tokens"], 1
            padded.append({"tokens": tokens, "attention": attention, "label": sample["label"]})
        return stack_samples(padded, micro.rows)

    def scores(self, model, batch):
        return model(input_ids=batch["tokens"], attention_mask=batch["attention"]).logits.float()

    def loss(self, model, batch):
        scores = self.scores(model, batch)
        right = scores.argmax(1) == batch["label"]
        loss = F.cross_entropy(scores, batch["label"], reduction="none")
        return {"loss": loss, "accuracy": right.float()}

    def predict(self, model, backend, request, log):
        data = self.texts("valid", request.data_path)
        scores = infer(self, data, lambda batch: self.scores(model, batch), backend)
        out = request.out or Path("classes.csv")
        if backend.is_main:
            with out.open("w", newline="") as file:
                csv.writer(file).writerow(["text", "class"])
                csv.writer(file).writerows(zip(data.texts, scores.argmax(1), strict=True))
        log(f"{len(data)} classes in {out}")
        return {"rows": len(data), "path": str(out)}
