"""LoRA: a Llama of transformers with adapters of peft."""

import numpy as np
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from predicting import Predicting
from transformers import LlamaConfig, LlamaForCausalLM

from tpukit.train.task import Datasets, TrainingDefaults


def counting(count, seed):
    starts = np.random.default_rng(seed).integers(0, 30, count)
    return [{"input_ids": (start + np.arange(16)) % 32} for start in starts]


class Counting(Predicting):
    defaults = TrainingDefaults(global_batch_size=8, epochs=2, lr=1e-2)

    def build_model(self, ops):
        config = LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        return get_peft_model(LlamaForCausalLM(config), lora)

    def datasets(self):
        return Datasets(counting(32, 0), counting(13, 1))

    def loss(self, model, batch):
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
        losses = F.cross_entropy(
            logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
        )
        return {"loss": losses.mean(1)}

    def outputs(self, model, batch):
        return model(input_ids=batch["input_ids"]).logits[:, -1].argmax(1)
