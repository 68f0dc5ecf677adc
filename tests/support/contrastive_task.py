"""A loss over the whole batch, as docs/own_task.md writes it: every row against every other."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tpukit.train.task import Datasets, ParameterGroup, Task, TrainingDefaults


def pair(index):
    """A vector and its noisy reverse."""
    rng = np.random.default_rng(index)
    image, noise = rng.standard_normal((2, 8), dtype=np.float32)
    return {"image": image, "text": image[::-1] + 0.1 * noise}


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(8, 4), nn.Linear(8, 4)


def of_all_ranks(x):
    if torch.distributed.is_initialized():
        return torch.cat(torch.distributed.nn.functional.all_gather(x))
    return x


class Contrastive(Task):
    defaults = TrainingDefaults(global_batch_size=16, max_steps=4, lr=1e-2)

    def build_model(self, ops):
        return Towers()

    def datasets(self):
        return Datasets([*map(pair, range(32))], [*map(pair, range(10))])

    def parameter_groups(self, model, weight_decay):
        text = ParameterGroup(list(model.text.parameters()), weight_decay, lr_scale=0.5)
        return [ParameterGroup(list(model.image.parameters()), weight_decay), text]

    def validation_rows(self, model, batch):
        return {"width": model.image(batch["image"])[:, 0]}

    def compute(self, rows):
        return {"width": float(rows["width"].mean())}

    def loss(self, model, batch):
        # By its parts, as such models are often called (`encode_image`): no forward of the whole.
        image = F.normalize(model.image(batch["image"]), dim=1)
        text = F.normalize(model.text(batch["text"]), dim=1)
        texts, mask = of_all_ranks(text), of_all_ranks(batch["mask"])
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        own = torch.arange(len(image), device=image.device) + rank * len(image)
        scores = (20 * image @ texts.T).float().masked_fill(mask == 0, -1e9)
        return {"loss": F.cross_entropy(scores, own, reduction="none")}
