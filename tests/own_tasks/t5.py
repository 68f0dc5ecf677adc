"""Sequence to sequence: a T5 that learns to reverse, written out by `generate`."""

import numpy as np
import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

from tpukit.train.task import Datasets, Task, TrainingDefaults


def sequences(count, seed):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        length = rng.integers(3, 9)
        tokens = rng.integers(2, 30, length)
        source, target = np.zeros(8, np.int64), np.full(8, -100)
        source[:length], target[:length] = tokens, tokens[::-1]
        yield {"input_ids": source, "attention_mask": (source > 0).astype(np.int64),
               "labels": target}  # fmt: skip


class Reverse(Task):
    defaults = TrainingDefaults(global_batch_size=16, epochs=2, lr=1e-3)

    def build_model(self, ops):
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=32, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                decoder_start_token_id=0, dropout_rate=0.0,
            )
        )  # fmt: skip

    def datasets(self):
        return Datasets([*sequences(64, 0)], [*sequences(21, 1)])

    def loss(self, model, batch):
        logits = model(**{n: batch[n] for n in ("input_ids", "attention_mask", "labels")}).logits
        losses = F.cross_entropy(logits.float().transpose(1, 2), batch["labels"], reduction="none")
        counted = (batch["labels"] != -100).float().sum(1)
        return {"loss": losses.sum(1) / counted, "weight": counted}

    def predict(self, model, backend, request, log):
        plain = backend.unwrap(model)
        rows = [torch.as_tensor(row["input_ids"])[None] for row in self.datasets().valid]
        if backend.is_main:
            made = [plain.generate(row.to(backend.device), max_new_tokens=8, min_new_tokens=8)
                    for row in rows]  # fmt: skip
            np.savetxt(request.out, np.concatenate([row.cpu().numpy() for row in made]), fmt="%d")
        return {"rows": len(rows), "path": str(request.out)}
