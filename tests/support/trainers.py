"""Twenty steps of transformers' Trainer or TRL's SFTTrainer on all rows at once; prints the losses.

trainers.py trainer|sft START ROWS OUT: a model's directory, rows of prompt and completion as JSON,
and the directory that gets the model after the last step.
"""

import json
import sys
from tempfile import TemporaryDirectory

import datasets
import torch
import transformers
import trl


def main() -> None:
    kind, start, rows, out = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
    lm = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    tokenizer.pad_token = tokenizer.eos_token
    shared = {
        "per_device_train_batch_size": len(rows), "max_steps": 20, "learning_rate": 2e-3,
        "lr_scheduler_type": "constant", "adam_beta2": 0.95, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        if kind == "sft":
            # It balances experts by a second loss, which transformers' Trainer does not.
            experts = (
                {"router_aux_loss_coef": 0.0} if hasattr(lm.config, "num_local_experts") else {}
            )
            trainer = trl.SFTTrainer(
                lm, args=trl.SFTConfig(output_dir=folder, loss_type="nll", **experts, **shared),
                train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
            )  # fmt: skip
        else:
            trainer = transformers.Trainer(
                lm, args=transformers.TrainingArguments(output_dir=folder, **shared),
                train_dataset=[features(row, tokenizer) for row in rows],
                data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
            )  # fmt: skip
        losses = losses_of(trainer)
    lm.save_pretrained(out)
    print(json.dumps(losses))


def losses_of(trainer) -> list[float]:  # type: ignore[no-untyped-def]
    """The losses of a training in full: the trainer's log rounds to four digits."""
    losses, plainly = [], trainer.compute_loss

    def kept(*given, **named):  # type: ignore[no-untyped-def]
        found = plainly(*given, **named)
        losses.append(float(found[0] if isinstance(found, tuple) else found))
        return found

    trainer.compute_loss = kept
    trainer.train()
    return losses


def features(row: dict[str, str], tokenizer) -> dict[str, list[int]]:  # type: ignore[no-untyped-def]
    prompt = tokenizer(row["prompt"])["input_ids"]
    answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
    return {
        "input_ids": prompt + answer,
        "attention_mask": [1] * len(prompt + answer),
        "labels": [-100] * len(prompt) + answer,
    }


if __name__ == "__main__":
    main()
