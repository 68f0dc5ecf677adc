"""A text competition with a transformers classifier (BERT, DeBERTa, ...): train.csv to submission.

tpukit train --task docs/tasks/classify_text.py:Texts --data-path competition
tpukit test --run results/texts
tpukit predict --run results/texts --data-path competition --sample-submission sample.csv
`competition` holds train.csv and test.csv with the columns id, text and (train) label; other names
are settings, as in `--set text=comment`. A tenth of train.csv is validated on, the same rows each
time, or valid.csv where there is one. `--set model=` is a name on the Hugging Face Hub or a folder.
"""

import csv
import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tpukit import Datasets, ShuffledPlan, Task, TrainingDefaults, infer, read_table, stack_samples


class TokenizedTexts:
    def __init__(self, tokens, labels):
        self.tokens, self.labels = tokens, labels
        self.lengths = np.array([len(row) for row in tokens])

    def __len__(self):
        return len(self.tokens)

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

    def __init__(
        self, data_path="./data", model="bert-base-uncased", lengths="64,512",
        id="id", text="text", label="label",
    ):  # fmt: skip
        self.folder, self.model = Path(data_path), model
        self.id, self.text, self.label = id, text, label
        # The lengths that a batch may have: on a TPU each is compiled once.
        self.lengths = [int(length) for length in str(lengths).split(",")]

    # -- data --------------------------------------------------------------------------------------
    @cached_property
    def classes(self):
        return sorted({row[self.label] for row in read_table(self.folder / "train.csv").records()})

    def restore(self, artifacts):
        self.classes = json.loads(artifacts["classes.json"])
        return self

    def datasets(self):
        rows, valid = read_table(self.folder / "train.csv").records(), self.folder / "valid.csv"
        if valid.exists():
            train, valid = rows, read_table(valid).records()
        else:
            order = np.random.default_rng(0).permutation(len(rows))
            cut = max(1, len(rows) // 10)
            valid, train = [rows[i] for i in order[:cut]], [rows[i] for i in order[cut:]]
        kept = {"classes.json": json.dumps(self.classes).encode()}
        return Datasets(self.texts(train), self.texts(valid), artifacts=kept)

    def texts(self, rows):
        """Tokens and labels; rows without a label, those of test.csv, get the first."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        words = [row[self.text] for row in rows]
        tokens = tokenizer(words, truncation=True, max_length=self.lengths[-1])["input_ids"]
        known = [row.get(self.label, self.classes[0]) for row in rows]
        return TokenizedTexts(tokens, [self.classes.index(label) for label in known])

    # -- batches of a few fixed shapes -------------------------------------------------------------
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

    # -- model, loss, submission -------------------------------------------------------------------
    def build_model(self, ops):
        return AutoModelForSequenceClassification.from_pretrained(
            self.model, num_labels=len(self.classes)
        )

    def scores(self, model, batch):
        return model(input_ids=batch["tokens"], attention_mask=batch["attention"]).logits.float()

    def loss(self, model, batch):
        scores = self.scores(model, batch)
        right = scores.argmax(1) == batch["label"]
        loss = F.cross_entropy(scores, batch["label"], reduction="none")
        return {"loss": loss, "accuracy": right.float()}

    def predict(self, model, backend, request, log):
        """Each id's class; where the sample has a column for each class, the probabilities."""
        tests = request.test_csv or (request.data_path or self.folder) / "test.csv"
        tests = read_table(tests).records()
        found = infer(self, self.texts(tests), lambda b: self.scores(model, b).softmax(1), backend)
        of_id = dict(zip((row[self.id] for row in tests), found, strict=True))
        sample = request.sample_submission and read_table(request.sample_submission).records()
        columns = list(sample[0]) if sample else [self.id, self.label]
        places = [self.classes.index(c) for c in columns if c in self.classes]
        out = request.out or Path("submission.csv")
        if backend.is_main:
            with out.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                for name in [row[columns[0]] for row in sample or ()] or of_id:
                    row = of_id[name]
                    best = self.classes[row.argmax()]
                    writer.writerow([name, *(row[places] if places else [best])])
        log(f"{len(of_id)} rows in {out}")
        return {"rows": len(of_id), "path": str(out)}
