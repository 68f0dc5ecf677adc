"""Train a small Llama on a text file, byte by byte, and let it write on.

tpukit train --task docs/tasks/llama.py:Llama --data-path book.txt --set width=384 --set layers=6
tpukit predict --run results/llama --data-path prompts.txt --out written.txt
`book.txt` is any text; `prompts.txt` has one prompt a line.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tpukit import Datasets, Task, TrainingDefaults, infer, stack_samples


class Windows:
    """Windows of `length` bytes, one after the other."""

    def __init__(self, text, length):
        self.text, self.length = text, length

    def __len__(self):
        return len(self.text) // self.length

    def __getitem__(self, index):
        start = index * self.length
        return {"tokens": self.text[start : start + self.length].astype(np.int64)}


class Llama(Task):
    name = "llama"
    defaults = TrainingDefaults(
        global_batch_size=32, max_steps=2000, lr=1e-3, weight_decay=0.1,
        schedule="cosine", warmup_steps=100, ema_decay=0.99,
    )  # fmt: skip

    def __init__(self, data_path="book.txt", width=128, layers=2, heads=4, length=128, written=64):
        self.data_path, self.length, self.written = Path(data_path), length, written
        self.config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=3 * width,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
            max_position_embeddings=length,
        )  # fmt: skip

    def build_model(self, ops):
        return LlamaForCausalLM(self.config)

    def datasets(self):
        text = np.frombuffer(self.data_path.read_bytes(), np.uint8)
        cut = int(0.9 * len(text))
        return Datasets(Windows(text[:cut], self.length), Windows(text[cut:], self.length))

    def loss(self, model, batch):
        tokens = batch["tokens"]
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        return {"loss": losses.mean(1)}

    def probe_batches(self, settings):
        rows = settings.micro_rows
        return [stack_samples([{"tokens": np.zeros(self.length, np.int64)}] * rows, rows)]

    def next_logits(self, model, batch):
        """(rows, 256): after each row's last byte; what follows it in the window is not seen."""
        logits = model(input_ids=batch["tokens"], use_cache=False).logits
        last = (batch["count"] - 1)[:, None, None].expand(-1, 1, logits.shape[-1])
        return torch.gather(logits, 1, last)[:, 0]

    def predict(self, model, backend, request, log):
        prompts = Path(request.data_path or "prompts.txt").read_bytes().splitlines()
        prompts = [prompt[-(self.length - self.written) :] for prompt in prompts]
        samples = [{"tokens": np.zeros(self.length, np.int64), "count": len(p)} for p in prompts]
        for sample, prompt in zip(samples, prompts, strict=True):
            sample["tokens"][: len(prompt)] = list(prompt)
        for _ in range(self.written):
            scores = infer(self, samples, lambda batch: self.next_logits(model, batch), backend)
            for sample, byte in zip(samples, scores.argmax(1), strict=True):
                sample["tokens"][sample["count"]] = byte
                sample["count"] += 1
        out = request.out or Path("written.txt")
        if backend.is_main:
            texts = [bytes(s["tokens"][: s["count"]].astype(np.uint8)) for s in samples]
            out.write_bytes(b"\n".join(texts) + b"\n")
        log(f"{len(samples)} texts in {out}")
        return {"rows": len(samples), "path": str(out)}
