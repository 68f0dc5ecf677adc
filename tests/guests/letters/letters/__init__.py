"""Text letter by letter: a task in one file, its settings the constructor's parameters."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tpukit import Datasets, Task, TrainingDefaults

LETTERS = 128


@dataclass(frozen=True)
class Scoring:
    in_bits: bool = False
    """Give the loss in bits a letter instead of nats."""


@dataclass(frozen=True)
class Writing:
    prompt: str = "the "
    """Text to go on from."""
    length: int = 20
    """Letters to write."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the likeliest letter."""


class Windows:
    def __init__(self, codes, context):
        self.codes, self.context = codes, context

    def __len__(self):
        return len(self.codes) - self.context

    def __getitem__(self, index):
        window = self.codes[index : index + self.context + 1].astype(np.int64)
        return {"letters": window[:-1], "next": window[1:]}


class Reader(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, letters):
        return self.head(self.layer(self.embedding(letters))[0])


class Letters(Task):
    """Text letter by letter."""

    name = "letters"
    test_options = Scoring
    predict_options = Writing
    defaults = TrainingDefaults(global_batch_size=16, max_steps=10, lr=1e-2)

    def __init__(self, data_path="./book.txt", *, context: int = 16, width: int = 32):
        self.data_path, self.context, self.width = data_path, context, width

    def datasets(self):
        text = Path(self.data_path).read_text(encoding="ascii")
        codes = np.frombuffer(text.encode(), np.uint8)
        cut = len(codes) * 9 // 10
        return Datasets(Windows(codes[:cut], self.context), Windows(codes[cut:], self.context))

    def build_model(self, ops):
        return Reader(self.width)

    def loss(self, model, batch):
        scores = model(batch["letters"]).transpose(1, 2).float()
        return {"loss": F.cross_entropy(scores, batch["next"], reduction="none").mean(1)}

    @torch.no_grad()
    def evaluate(self, model, backend, request, log):
        data = self.datasets().valid
        rows = [data[index] for index in request.chosen(range(len(data)))]
        batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])).to(backend.device)
                 for name in rows[0]}  # fmt: skip
        loss = float(self.loss(model, batch)["loss"].mean())
        unit = np.log(2) if request.options.in_bits else 1.0
        return {"task": self.name, "samples": len(rows), "metrics": {"loss": loss / unit}}

    @torch.no_grad()
    def predict(self, model, backend, request, log):
        options, generator = request.options, torch.Generator().manual_seed(0)
        text = options.prompt
        for _ in range(options.length):
            codes = torch.tensor([[*text.encode()]], device=backend.device)
            scores = model(codes)[0, -1].cpu().float()
            if options.temperature:
                chances = (scores / options.temperature).softmax(0)
                letter = int(torch.multinomial(chances, 1, generator=generator))
            else:
                letter = int(scores.argmax())
            text += chr(letter)
        out = request.out or Path("text.txt")
        out.write_text(text, encoding="ascii")
        return {"rows": 1, "path": str(out)}
