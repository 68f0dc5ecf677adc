"""A task on a stream of datasets that writes down which samples each rank's steps have used."""

import os
from pathlib import Path

import numpy as np
import torch
from tiny_task import Rows, Tiny

from tpukit.train.task import Datasets, stack_samples

PASS = 128


class Numbered(Tiny):
    """The tiny task; each sample has a number, and a file of the rank those of its steps."""

    name = "numbered"

    def datasets(self):
        from datasets import Dataset

        numbers = Dataset.from_dict({"number": range(PASS)})
        return Datasets(numbers.to_iterable_dataset(num_shards=8), Rows(10))

    def collate(self, samples, micro):
        rows = Rows(PASS)
        if "number" not in samples[0]:
            return stack_samples(samples, micro.rows)
        numbers = [int(sample["number"]) for sample in samples]
        made = [{**rows[n], "noise": np.zeros(2, np.float32), "number": n} for n in numbers]
        return stack_samples(made, micro.rows)

    def draw(self, sample, rng):
        return sample if "number" in sample else super().draw(sample, rng)

    def loss(self, model, batch):
        numbers = batch.get("number")
        if numbers is not None and torch.is_grad_enabled():
            file = Path(os.environ["TPUKIT_TEST_USED"], os.environ.get("RANK", "0"))
            with file.open("a") as used:
                used.write(" ".join(str(int(n)) for n in numbers) + "\n")
        return super().loss(model, {k: v for k, v in batch.items() if k != "number"})
