"""Twenty steps of TRL's DPOTrainer on all pairs at once; prints their losses.

trl_preferences.py START ADAPTER ROWS: a model's directory, that of an adapter to go on from, which
need not be there, and rows of prompt, chosen and rejected as JSON.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import peft
import torch
import transformers
import trl
from trainers import losses_of


def main() -> None:
    start, adapter, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    lm = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    if Path(adapter).is_dir():
        lm = peft.PeftModel.from_pretrained(lm, adapter, is_trainable=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    tokenizer.pad_token = tokenizer.eos_token
    with TemporaryDirectory() as folder:
        arguments = trl.DPOConfig(
            output_dir=folder, per_device_train_batch_size=len(rows), max_steps=20,
            learning_rate=2e-3, lr_scheduler_type="constant", adam_beta2=0.95, beta=0.1,
            logging_steps=1, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = trl.DPOTrainer(
            lm, args=arguments, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )  # fmt: skip
        losses = losses_of(trainer)
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
