"""Names of our settings in other trainers, and the setting that a mistyped name means."""

import difflib
from collections.abc import Iterable

OTHER_NAMES = {
    "learning_rate": "lr", "batch_size": "global_batch_size", "bs": "global_batch_size",
    "train_batch_size": "global_batch_size", "per_device_train_batch_size": "global_batch_size",
    "num_train_epochs": "epochs", "num_epochs": "epochs", "max_epochs": "epochs",
    "steps": "max_steps", "num_steps": "max_steps", "max_iters": "max_steps",
    "output_dir": "results_dir", "out_dir": "results_dir", "seed": "global_seed",
    "gpus": "devices", "num_devices": "devices", "workers": "num_workers",
    "num_processes": "devices", "gradient_accumulation_steps": "accumulate",
    "save_steps": "ckpt_every", "save_every": "ckpt_every", "logging_steps": "log_every",
    "device": "hw", "accelerator": "hw", "data_dir": "data_path", "dataset": "data_path",
    "mixed_precision": "precision", "amp": "precision", "max_grad_norm": "clip_norm",
    "grad_clip": "clip_norm", "warmup": "warmup_steps", "num_warmup_steps": "warmup_steps",
    "patience": "early_stopping", "lr_scheduler_type": "schedule", "num_classes": "classes",
}  # fmt: skip
"""Name elsewhere -> ours."""


def nearest_setting(name: str, known: Iterable[str]) -> str | None:
    """The known setting that a mistyped name, or another trainer's, stands for."""
    ours = list(known)
    candidates = [*ours, *(other for other, own in OTHER_NAMES.items() if own in ours)]
    near = difflib.get_close_matches(name, candidates, n=1)
    return next((n if n in ours else OTHER_NAMES[n] for n in near), None)
