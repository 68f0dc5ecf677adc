"""What a training run is told: one frozen dataclass, filled from options, a file and a preset.

Imports no torch, so that `--help` and errors in an option cost nothing.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from tpukit.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run, apart from the task's own config."""

    data_path: str = "./data"
    """Folder of the data."""
    results_dir: str | None = None
    """The run folder itself; None takes the task's usual one."""
    global_batch_size: int = 64
    """Samples of one optimizer step, over all devices and micro-steps."""
    epochs: int | None = None
    """Passes over the training data; exclusive with max_steps."""
    max_steps: int | None = None
    """Optimizer steps; exclusive with epochs."""
    global_seed: int = 0
    """Seeds weights, order of the data, each sample's draws and dropout."""
    log_every: int = 50
    """Optimizer steps between two log lines (a read from the device)."""
    ckpt_every: int = 500
    """Optimizer steps between two checkpoints, each after a validation."""
    num_workers: int | None = None
    """Data loading processes over all training processes of this host; None: from the cores, and
    none where the processor itself trains: a thread makes its batches."""
    accumulate: int | None = None
    """Micro-steps an optimizer step; None: the fewest that keep a device's rows moderate."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "constant"
    """How the rate goes on after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    final_lr_fraction: float = 1.0
    """The last step's rate as a part of the peak (linear and cosine schedules)."""
    clip_norm: float | None = 1.0
    """Largest gradient norm over all parameters; 0 switches clipping off."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only."""
    beta1: float = 0.9
    """Adam's first moment decay."""
    beta2: float = 0.999
    """Adam's second moment decay."""
    ema_decay: float | None = None
    """Decay of the averaged weights that are validated and tested; None keeps no average."""
    ema_every: int = 1
    """Steps between two updates of the average."""
    hw: Literal["auto", "tpu", "gpu", "cpu"] = "auto"
    """Hardware; auto takes what is there."""
    devices: int | None = None
    """Devices to use; None: all."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the forward pass; weights stay fp32."""
    shard: bool = False
    """Shard parameters and optimizer state over the devices."""
    compile: bool | None = None
    """torch.compile; None: where it pays."""
    deterministic: bool = False
    """Deterministic kernels on a GPU, so that a resumed run is bit-equal there too."""
    memory_limit: int | None = None
    """Bytes a process may take (CPU) or a device may use (GPU)."""
    check_bf16: bool = False
    """Compare one step in bf16 and fp32 before training."""
    profile: bool = False
    """Write a trace of a few steps into the run folder."""
    resume: bool = True
    """Go on with the run in the run folder, if there is one."""
    resume_from: str | None = None
    """A read-only run folder to start from."""
    max_time: float | None = None
    """Seconds after which the run stops with a checkpoint."""
    master_port: int | None = None
    """torchrun's port; None lets it choose."""


ARITHMETIC = (
    "global_batch_size",
    "global_seed",
    "lr",
    "schedule",
    "warmup_steps",
    "final_lr_fraction",
    "clip_norm",
    "weight_decay",
    "beta1",
    "beta2",
    "ema_decay",
    "ema_every",
)
"""Fields that a resumed run must share with the run it goes on with."""

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"log_every": 5},
    "safe": {"global_batch_size": 8, "num_workers": 2},
    "balanced": {"global_batch_size": 16, "num_workers": 4},
    "fast": {"global_batch_size": 32, "num_workers": 4},
}
"""What a preset says for any task; a task's own presets add to it."""

TASK_TABLE = "task"
TRAIN_TABLE = "train"
INFORMATIVE_TABLES = ("decided", "versions", "preset")


@dataclass(frozen=True)
class ConfigFile:
    """A TOML file's two tables."""

    train: Mapping[str, Any]
    task: Mapping[str, Any]


def read_config_file(path: str | Path) -> ConfigFile:
    """Reads `--config`: training keys at the top or under [train], the task's under [task].

    A run's own `config.toml` is such a file. Raises ConfigError naming file, line and key.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"Config file {path} does not exist.", "Check --config.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config file {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"Config file {path} is no TOML: {error}.", "Mend that line.") from error
    train = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    train |= tables.get(TRAIN_TABLE, {})
    unknown = [
        f"[{name}]"
        for name, value in tables.items()
        if isinstance(value, dict) and name not in (TASK_TABLE, TRAIN_TABLE, *INFORMATIVE_TABLES)
    ]
    if unknown:
        raise ConfigError(
            f"Config file {path} has unknown tables: {', '.join(unknown)}.",
            "Training keys stand under [train], the task's own under [task].",
        )
    return ConfigFile(
        {name.replace("-", "_"): v for name, v in train.items()}, tables.get("task", {})
    )


def resolve(*layers: Mapping[str, Any]) -> TrainConfig:
    """The config from its layers, the strongest first (options, file, preset, task defaults).

    A value of None is not given. All problems are collected and raised as one ConfigError.
    """
    decided: dict[str, Any] = {}
    for layer in layers:
        given = {name: value for name, value in layer.items() if value is not None}
        # The two lengths exclude each other: a stronger layer's one replaces a weaker one's other.
        if {"epochs", "max_steps"} & decided.keys():
            given = {n: v for n, v in given.items() if n not in ("epochs", "max_steps")}
        decided = {**given, **decided}
    problems = _field_problems(decided)
    known = {n: v for n, v in decided.items() if n in _hints() and n not in problems}
    config = TrainConfig(**known)
    messages = [*problems.values(), *_value_problems(config)]
    if messages:
        raise ConfigError(" ".join(messages), _nearest_hint(problems, decided))
    return config


def _hints() -> dict[str, Any]:
    return get_type_hints(TrainConfig)


def option(name: str) -> str:
    """How a user writes the setting: `--global-batch-size`."""
    return f"--{name.replace('_', '-')}"


def _nearest_hint(problems: Mapping[str, str], values: Mapping[str, Any]) -> str | None:
    """The known names, or the allowed values, closest to the mistyped ones."""
    hints = _hints()
    near = [
        nearest(str(values[name]), get_args(hints[name])) if name in hints else nearest(name, hints)
        for name in problems
        if name not in hints or _is_literal(hints[name])
    ]
    found = [name for name in near if name]
    return f"Did you mean {', '.join(found)}?" if found else None


def nearest(name: str, names: Any) -> str | None:
    """The known name closest to a mistyped one."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return matches[0] if matches else None


def _field_problems(values: Mapping[str, Any]) -> dict[str, str]:
    hints = _hints()
    problems = {}
    for name, value in values.items():
        if name not in hints:
            problems[name] = f"Unknown setting {name!r}."
        elif not _matches(value, hints[name]):
            problems[name] = f"{option(name)} {value!r} is not {_expected(hints[name])}."
    return problems


def _options(hint: Any) -> tuple[Any, ...]:
    """The choices of a Literal, or the members of a union with None left out."""
    return tuple(part for part in get_args(hint) if part is not type(None))


def _is_literal(hint: Any) -> bool:
    return getattr(hint, "__origin__", None) is Literal


def _matches(value: Any, hint: Any) -> bool:
    if _is_literal(hint):
        return value in get_args(hint)
    allowed = _options(hint) or (hint,)
    if isinstance(value, bool):
        return bool in allowed
    return any(isinstance(value, int | float) if part is float else isinstance(value, part)
               for part in allowed)  # fmt: skip


def _expected(hint: Any) -> str:
    if _is_literal(hint):
        return f"one of {', '.join(map(str, get_args(hint)))}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return " or ".join(names[part] for part in _options(hint) or (hint,))


def _value_problems(config: TrainConfig) -> list[str]:
    positive = ("global_batch_size", "log_every", "ckpt_every", "accumulate", "devices", "epochs",
                "max_steps", "ema_every", "memory_limit", "max_time")  # fmt: skip
    at_least_zero = (
        "num_workers",
        "warmup_steps",
        "weight_decay",
        "clip_norm",
        "lr",
        "global_seed",
    )
    problems = [
        f"{option(name)} {value} must be at least 1."
        for name in positive
        if (value := getattr(config, name)) is not None and value < 1
    ]
    problems += [
        f"{option(name)} {value} must not be negative."
        for name in at_least_zero
        if (value := getattr(config, name)) is not None and value < 0
    ]
    if config.ema_decay is not None and not 0 <= config.ema_decay < 1:
        problems.append(f"ema_decay = {config.ema_decay} must lie in [0, 1).")
    if config.epochs is not None and config.max_steps is not None:
        problems.append("--epochs and --max-steps were both given: give one.")
    return problems


def preset_values(
    name: str | None, task_presets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The values of a preset: those for any task, with the task's own over them."""
    if name is None:
        return {}
    if name not in PRESETS:
        close = nearest(name, PRESETS)
        raise ConfigError(
            f"Unknown preset {name!r}; there are {', '.join(PRESETS)}.",
            f"Did you mean {close}?" if close else None,
        )
    return {**PRESETS[name], **task_presets.get(name, {})}


def parse_duration(text: str) -> float:
    """Seconds in `8h30m`, `45m`, `90s`, `1d2h` or a plain number of seconds."""
    match = re.fullmatch(
        r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+(?:\.\d+)?)s?)?", text.strip().lower()
    )
    if not match or not any(match.groups()):
        raise ConfigError(f"{text!r} is no duration.", "Write 8h30m, 45m, 90s.")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes in `4GB` (10^9), `4GiB` (2^30), `500MB` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if not match:
        raise ConfigError(f"{text!r} is no amount of memory.", "Write 4GB, 500MB or 3.5GiB.")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """The config's fields by name."""
    return {field.name: getattr(config, field.name) for field in fields(config)}
