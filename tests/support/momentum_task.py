"""MoCo: a momentum encoder and a queue of keys, moved once a step as docs/own_task.md writes it."""

import torch
import torch.nn.functional as F
from contrastive_task import of_all_ranks, pair
from torch import nn

from tpukit.train.task import Datasets, Task, TrainingDefaults

MOMENTUM, QUEUED = 0.9, 32


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(QUEUED, 4), dim=1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))


class MoCo(Task):
    name = "moco"
    defaults = TrainingDefaults(
        global_batch_size=8, max_steps=6, lr=1e-2, rows_per_device=1024, optimizer="sgd",
        ema_decay=0.9, ema_warmup=0,
    )  # fmt: skip

    def __init__(self):
        self.keys = []

    def build_model(self, ops):
        return Encoders()

    def datasets(self):
        return Datasets([*map(pair, range(32))], [*map(pair, range(8))])

    def loss(self, model, batch):
        query = F.normalize(model.query(batch["image"]).float(), dim=1)
        with torch.no_grad():
            key = F.normalize(model.key(batch["text"]).float(), dim=1)
        if model.training:
            self.keys.append(key)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ model.queue.T], 1) / 0.2
        first = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        return {"loss": F.cross_entropy(scores, first, reduction="none")}

    def after_step(self, model):
        torch._foreach_lerp_([*model.key.parameters()], [*model.query.parameters()], 1 - MOMENTUM)
        keys = of_all_ranks(torch.cat(self.keys))
        self.keys.clear()
        model.queue.copy_(torch.cat([keys, model.queue])[:QUEUED])
        model.steps += 1
