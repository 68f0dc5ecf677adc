"""The config of a training run: one frozen dataclass, filled from options, a file and a preset.

Imports no torch, so that `--help` and errors in an option cost nothing.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tpukit.errors import ConfigError
from tpukit.hardware.options import HARDWARE, HardwareOptions, OptimizerName
from tpukit.io.files import require_regular
from tpukit.io.ranges import (
    BATCH,
    COUNT,
    DECAY,
    FROM_ZERO,
    LARGEST_COUNT,
    SEED,
    Range,
    flag,
    range_problems,
    ranges_of,
    setting,
    shown,
)
from tpukit.train.metric_names import parse_metrics, with_whole_paths
from tpukit.train.tracking import TrackerName, missing_tracker

Schedule = Literal["constant", "linear", "cosine"]
EMAUpdates = Literal["ema_pytorch", "ema_pytorch-0.5.2", "multiples"]
Config = TypeVar("Config")

BATCH_AND_RATE, VALIDATION = "Batch and rate", "Validation"
LENGTH_AND_LOGS, RUN_FOLDER = "Length and logs", "Run folder"
PANELS = (BATCH_AND_RATE, VALIDATION, LENGTH_AND_LOGS, HARDWARE, RUN_FOLDER)
"""Panels of `--help` in their order; a setting names its own, or has no option but `--set`."""

METRIC = re.compile(r"(?:(min|max):)?(valid_\S+)")
"""`valid_loss`, `min:valid_loss` or `max:valid_auc`."""


@dataclass(frozen=True)
class TaskSettings:
    """Settings of a run that a task may have defaults of its own for.

    decides: the setting decides the arithmetic; a resumed run must have the same. earlier: its
    value in runs from before it existed, where that is not the default. panel: where `--help` shows
    it.
    """

    global_batch_size: int = setting(64, BATCH, decides=True, panel=BATCH_AND_RATE)
    """Samples of one optimizer step, over all devices and micro-batches (default: the task's)."""
    epochs: int | None = setting(None, COUNT, panel=LENGTH_AND_LOGS)
    """Passes over the training data (default: the task's)."""
    max_steps: int | None = setting(None, COUNT, panel=LENGTH_AND_LOGS)
    """Optimizer steps, instead of epochs (default: the task's)."""
    ckpt_every: int | None = setting(None, COUNT, panel=LENGTH_AND_LOGS)
    """Optimizer steps between two checkpoints, each after a validation (default: the task's, or
    each epoch and every 500)."""
    metric: str | None = setting(None, panel=VALIDATION)
    """Metrics of the validation by name, separated by commas (macro_f1, auc, qwk, rmse, map@3; a
    function of yours as max:FILE.py:FUNCTION); the first decides the best checkpoint."""
    best_metric: str | None = None
    """Metric of the best checkpoint: NAME (the least, unless the task declares the most as better),
    min:NAME or max:NAME (default: the first of --metric, else valid_loss)."""
    early_stopping: int | None = setting(None, Range(0, LARGEST_COUNT))
    """Validations without a better best_metric after which training stops (default: never)."""
    lr: float = setting(1e-3, FROM_ZERO, decides=True, panel=BATCH_AND_RATE)
    """Peak learning rate (default: the task's)."""
    schedule: Schedule = setting("constant", decides=True)
    """Learning rate after the warm-up: constant, linear or cosine."""
    warmup_steps: int = setting(0, Range(0, LARGEST_COUNT), decides=True)
    """Optimizer steps of linear warm-up."""
    final_lr_fraction: float = setting(0.01, FROM_ZERO, decides=True, earlier=1.0)
    """The last step's learning rate as a fraction of the peak (linear and cosine schedules)."""
    clip_norm: float | None = setting(1.0, Range(0, 1e9, whole=False), decides=True)
    """Largest gradient norm over all parameters; 0 switches clipping off."""
    optimizer: OptimizerName = setting("adamw", decides=True)
    """Optimizer, where the task builds none: adamw, adam, sgd, rmsprop, adafactor, lion, or
    of bitsandbytes adamw_8bit, paged_adamw or paged_adamw_8bit (a GPU's)."""
    weight_decay: float = setting(0.0, FROM_ZERO, decides=True)
    """Weight decay, on matrices only; decoupled in AdamW, Adafactor and Lion."""
    momentum: float = setting(0.9, DECAY, decides=True)
    """Momentum of SGD and RMSprop."""
    ema_decay: float | None = setting(None, DECAY, decides=True)
    """Decay of the EMA weights that are validated and tested (default: the task's, or no EMA)."""
    ema_every: int = setting(1, COUNT, decides=True)
    """Optimizer steps between two updates of the EMA weights."""
    ema_warmup: int = setting(100, Range(0, LARGEST_COUNT), decides=True, earlier=0)
    """Optimizer steps in which the EMA weights copy the weights; their decay then rises to
    ema_decay. 0: ema_decay from the first step."""
    ema_updates: EMAUpdates = setting("ema_pytorch", decides=True, earlier="multiples")
    """Steps with an update of the EMA weights: ema_pytorch (1, 1 + ema_every, ...),
    ema_pytorch-0.5.2 (the same, with one more copy after the warm-up) or multiples (ema_every,
    2 ema_every, ..., as in runs that do not record it)."""


@dataclass(frozen=True)
class TrainConfig(TaskSettings, HardwareOptions):
    """Everything that decides a run, apart from the task's own config.

    The options of training commands are made from these fields and their docstrings.
    """

    data_path: str = setting("./data", panel=RUN_FOLDER)
    """Folder of the data."""
    results_dir: str | None = setting(None, panel=RUN_FOLDER)
    """The run folder itself (default: the task's)."""
    global_seed: int = setting(0, SEED, decides=True, panel=LENGTH_AND_LOGS)
    """Seed of the weights, the order of the data, each sample's draws and dropout."""
    log_every: int = setting(50, COUNT, panel=LENGTH_AND_LOGS)
    """Optimizer steps between two log lines."""
    track: TrackerName = setting("tensorboard", panel=LENGTH_AND_LOGS)
    """Library that gets the metrics beside TensorBoard's event files: wandb or trackio."""
    num_workers: int | None = setting(None, Range(0, 1024), panel=LENGTH_AND_LOGS)
    """DataLoader workers over all ranks of this host (default: from the cores, none on a CPU)."""
    loader_timeout: float = setting(600.0, Range(1, 30 * 86400, whole=False))
    """Longest wait for a batch of the DataLoader workers, in seconds."""
    accumulate: int | None = setting(None, BATCH, panel=BATCH_AND_RATE)
    """Gradient accumulation steps (default: the fewest that memory allows)."""
    beta1: float = setting(0.9, DECAY, decides=True)
    """First moment decay of Adam and Lion."""
    beta2: float = setting(0.999, DECAY, decides=True)
    """Second moment decay of Adam; of Lion's one moment."""
    profile: bool = setting(False, panel=HARDWARE)
    """Write a trace of a few steps into the run folder."""
    resume: bool = setting(True, panel=RUN_FOLDER)
    """Resume the run in the run folder, if there is one; --no-resume sets it aside."""
    resume_from: str | None = setting(None, panel=RUN_FOLDER)
    """A read-only run folder to start from."""
    init_from: str | None = setting(None, panel=RUN_FOLDER)
    """A run whose best (EMA) weights a new run begins with; all else begins anew."""
    max_time: float | None = setting(
        None, Range(1, 10 * 365 * 86400, whole=False), panel=LENGTH_AND_LOGS, unit="DURATION"
    )
    """Time after which the run stops with a checkpoint (8h30m)."""

    def problems(self) -> Iterator[str]:
        """What is wrong beyond types and ranges."""
        if self.best_metric is not None and not METRIC.fullmatch(self.best_metric):
            yield f"best_metric {self.best_metric!r} is not [min:|max:]valid_NAME."
        try:
            parse_metrics(self.metric)
        except ConfigError as error:
            yield " ".join(filter(None, (error.message, error.hint)))
        if missing := missing_tracker(self.track):
            yield missing
        if None not in (self.epochs, self.max_steps):
            yield "--epochs and --max-steps were both given: give one."


OPTIONS: Mapping[str, tuple[str, ...]] = {
    panel: tuple(f.name for f in fields(TrainConfig) if f.metadata.get("panel") == panel)
    for panel in PANELS
}
"""Settings that have an option by panel; `--set` reaches the others."""


def option_name(name: str) -> str:
    """How a command is given a setting: `--lr`, `--set beta1`."""
    return flag(name) if any(name in names for names in OPTIONS.values()) else f"--set {name}"


_DECIDING = [entry for entry in fields(TrainConfig) if entry.metadata.get("decides")]
ARITHMETIC = tuple(entry.name for entry in _DECIDING)
"""Settings that a resumed run must share with the run that it resumes."""
EARLIER_VALUES: Mapping[str, Any] = {
    entry.name: entry.metadata.get("earlier", entry.default) for entry in _DECIDING
}
"""Values of those settings in runs that do not record them."""

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"log_every": 5},
    "safe": {"global_batch_size": 8, "num_workers": 2},
    "balanced": {"global_batch_size": 16, "num_workers": 4},
    "fast": {"global_batch_size": 32, "num_workers": 4},
}
"""Settings of each preset for any task; a task's own presets add to them."""

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
        tables = tomllib.loads(require_regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"Config file {path} does not exist.", "Check --config.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config file {path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"Config file {path} is not valid TOML: {error}.", "Fix that line."
        ) from error
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


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping from the layers, the strongest first; a value of None was not given."""
    merged: dict[str, Any] = {}
    for layer in layers:
        given = {name: value for name, value in layer.items() if value is not None}
        # The two lengths exclude each other: a stronger layer's one replaces a weaker one's other.
        if {"epochs", "max_steps"} & merged.keys():
            given = {n: v for n, v in given.items() if n not in ("epochs", "max_steps")}
        merged = {**given, **merged}
    return merged


def build(
    config_class: type[Config], values: Mapping[str, Any], name: Callable[[str], str] = flag
) -> Config:
    """The config with these values. All problems are collected and raised as one ConfigError:
    types, choices, ranges, and what a method `problems` of the class says of several fields.

    name: how messages name a field.
    """
    hints = get_type_hints(config_class)
    problems = _field_problems(config_class, values, hints, name)
    config = config_class(**{n: v for n, v in values.items() if n not in problems})
    own = getattr(config_class, "problems", None)
    messages = [*problems.values(), *range_problems(config, name), *(own(config) if own else ())]
    if messages:
        raise ConfigError(" ".join(messages), _nearest_hint(problems, values, hints))
    return config


def build_settings(config_class: type[Config], values: Mapping[str, Any]) -> Config:
    """A task's settings. `--set` and config files do not know the types: where a text is expected,
    numbers and lists become one, and 0 and 1 a truth value where that is no number."""
    hints, meant = get_type_hints(config_class), dict[str, Any]()
    for name, value in values.items():
        kinds = _parts(hints.get(name))
        if kinds == (str,) and value is not None:
            meant[name] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        elif bool in kinds and value in (0, 1) and not {int, float} & {*kinds}:
            meant[name] = bool(value)
    return build(config_class, {**values, **meant}, str)


def resolve(*layers: Mapping[str, Any], name: Callable[[str], str] = flag) -> TrainConfig:
    """The config from its layers, the strongest first (options, file, preset, task defaults)."""
    values = merge(*layers)
    if isinstance(values.get("metric"), str):
        values["metric"] = with_whole_paths(values["metric"])
    return build(TrainConfig, values, name)


def _nearest_hint(
    problems: Mapping[str, str], values: Mapping[str, Any], hints: Mapping[str, Any]
) -> str | None:
    """The known names, or the allowed values, closest to the mistyped ones."""
    near = [
        nearest(shown(values[name]).strip("'"), filter(_is_text, _choices(hints[name])))
        if name in hints
        else nearest(name, hints)
        for name in problems
    ]
    found = [name for name in near if name]
    return f"Did you mean {', '.join(found)}?" if found else None


def nearest(name: str, names: Any) -> str | None:
    """The known name closest to a mistyped one."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return matches[0] if matches else None


def _field_problems(
    config_class: type, values: Mapping[str, Any], hints: Mapping[str, Any],
    name: Callable[[str], str],
) -> dict[str, str]:  # fmt: skip
    """A sentence for each value of the wrong type and each unknown name, by field."""
    problems, ranges = {}, ranges_of(config_class)
    for field, value in values.items():
        if field not in hints:
            problems[field] = f"Unknown setting {field!r}."
        elif not _matches(value, hints[field]) and field in ranges:
            problems[field] = ranges[field].problem(name(field), value)
        elif not _matches(value, hints[field]):
            problems[field] = f"{name(field)} {shown(value)} is not {_expected(hints[field])}."
    return problems


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union with None left out; of another type itself."""
    if get_origin(hint) is Literal:
        return (hint,)
    return tuple(part for part in get_args(hint) if part is not type(None)) or (hint,)


def _choices(hint: Any) -> list[Any]:
    """The values that the Literals of a type allow."""
    return [c for part in _parts(hint) if get_origin(part) is Literal for c in get_args(part)]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _matches(value: Any, hint: Any) -> bool:
    kinds = [part for part in _parts(hint) if get_origin(part) is not Literal]
    if value is None:
        return type(None) in get_args(hint)
    if isinstance(value, bool):
        return bool in kinds or any(value is choice for choice in _choices(hint))
    return value in _choices(hint) or any(
        isinstance(value, int | float) if part is float else isinstance(value, part)
        for part in kinds
    )


def _expected(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text",
             Path: "a path"}  # fmt: skip
    kinds = [names[part] for part in _parts(hint) if get_origin(part) is not Literal]
    choices = ", ".join(map(str, _choices(hint)))
    if not kinds:
        return f"one of {choices}"
    return " or ".join([*kinds, *filter(None, [choices])])


def preset_values(name: str | None, of_the_task: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a preset: those for any task, with the task's own over them."""
    if name is None:
        return {}
    if name not in PRESETS:
        close = nearest(name, PRESETS)
        raise ConfigError(
            f"Unknown preset {name!r}; there are {', '.join(PRESETS)}.",
            f"Did you mean {close}?" if close else None,
        )
    return {**PRESETS[name], **of_the_task}
