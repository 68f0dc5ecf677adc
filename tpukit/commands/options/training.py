"""The options that training commands share, and what is decided from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpukit.errors import ConfigError
from tpukit.hardware.options import HardwareOptions
from tpukit.train.config import (
    ConfigFile,
    TrainConfig,
    parse_bytes,
    parse_duration,
    preset_values,
    read_config_file,
    resolve,
)

if TYPE_CHECKING:
    from tpukit.train.task import Task

BATCH, LENGTH, HARDWARE, RUN = "Batch and rate", "Length and logs", "Hardware", "Run folder"


def _option(*names: str, panel: str, help: str) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help)


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training command; None is not given."""

    data_path: Annotated[
        str | None, _option("--data-path", panel=RUN, help="Folder of the data (./data).")
    ] = None
    global_batch_size: Annotated[
        int | None,
        _option(
            "--global-batch-size",
            panel=BATCH,
            help="Samples a step, over all devices and micro-steps.",
        ),
    ] = None
    accumulate: Annotated[
        int | None,
        _option("--accumulate", panel=BATCH, help="Micro-steps a step (the fewest that fit)."),
    ] = None
    lr: Annotated[float | None, _option("--lr", panel=BATCH, help="Peak learning rate.")] = None
    preset: Annotated[
        str | None, _option("--preset", panel=BATCH, help="quick, safe, balanced or fast.")
    ] = None
    config: Annotated[
        str | None,
        _option("--config", panel=BATCH, help="A TOML file; options beat it, it beats the preset."),
    ] = None
    epochs: Annotated[
        int | None, _option("--epochs", panel=LENGTH, help="Passes over the data.")
    ] = None
    max_steps: Annotated[
        int | None, _option("--max-steps", panel=LENGTH, help="Steps, instead of --epochs.")
    ] = None
    max_time: Annotated[
        str | None,
        _option("--max-time", panel=LENGTH, help="Stop in time, with a checkpoint: 8h30m."),
    ] = None
    log_every: Annotated[
        int | None, _option("--log-every", panel=LENGTH, help="Steps between log lines (50).")
    ] = None
    ckpt_every: Annotated[
        int | None,
        _option("--ckpt-every", panel=LENGTH, help="Steps between validations and saves (500)."),
    ] = None
    global_seed: Annotated[
        int | None, _option("--global-seed", panel=LENGTH, help="Seeds everything (0).")
    ] = None
    num_workers: Annotated[
        int | None,
        _option("--num-workers", panel=LENGTH, help="Loading processes in all (from the cores)."),
    ] = None
    hw: Annotated[
        str | None, _option("--hw", panel=HARDWARE, help="auto, tpu, gpu or cpu (auto).")
    ] = None
    devices: Annotated[
        int | None,
        _option("--devices", "--nproc", panel=HARDWARE, help="Devices to use (all)."),
    ] = None
    precision: Annotated[
        str | None, _option("--precision", panel=HARDWARE, help="auto, bf16, fp16, fp32 (auto).")
    ] = None
    shard: Annotated[
        bool | None,
        _option("--shard", panel=HARDWARE, help="Shard weights and optimizer over devices."),
    ] = None
    compile: Annotated[
        bool | None,
        _option("--compile/--no-compile", panel=HARDWARE, help="torch.compile (where it pays)."),
    ] = None
    check_bf16: Annotated[
        bool | None,
        _option("--check-bf16", panel=HARDWARE, help="Compare a step in bf16 and fp32 first."),
    ] = None
    deterministic: Annotated[
        bool | None,
        _option("--deterministic", panel=HARDWARE, help="Bit-equal resume on GPUs too."),
    ] = None
    memory_limit: Annotated[
        str | None,
        _option("--memory-limit", panel=HARDWARE, help="Memory to live within: 4GB."),
    ] = None
    master_port: Annotated[
        int | None, _option("--master-port", panel=HARDWARE, help="torchrun's port (a free one).")
    ] = None
    profile: Annotated[
        bool | None,
        _option("--profile", panel=HARDWARE, help="Keep a trace of a few steps to look at."),
    ] = None
    plan: Annotated[
        str | None,
        _option("--plan", panel=HARDWARE, help="Ask the TPU compiler (v5e-8, ...) and exit."),
    ] = None
    results_dir: Annotated[
        str | None, _option("--results-dir", panel=RUN, help="The run folder itself.")
    ] = None
    resume: Annotated[
        bool | None,
        _option("--resume/--no-resume", panel=RUN, help="Go on with the run there (--resume)."),
    ] = None
    resume_from: Annotated[
        str | None, _option("--resume-from", panel=RUN, help="A read-only run to start from.")
    ] = None
    settings: Annotated[
        list[str] | None,
        _option("--set", panel=BATCH, help="NAME=VALUE: any other training or task setting."),
    ] = None


@dataclass(frozen=True)
class TrainingRequest:
    """A training command's own part of a training."""

    task: str
    """`eit`, `summarize` or `my_file.py:MyTask`."""
    task_settings: Mapping[str, Any]
    """The task's options as given; None is not given."""
    usual_folder: str
    """The run folder where --results-dir names none; `{name}` is the task's."""


@dataclass(frozen=True)
class DecidedTraining:
    """Everything decided before a backend opens."""

    task: Task
    task_settings: dict[str, Any]
    config: TrainConfig
    folder: Path


# -- deciding --------------------------------------------------------------------------------------
def hardware_options(options: TrainingOptions) -> HardwareOptions:
    """The hardware part of the options, before torch is imported."""
    config = resolve(*_layers(options, _read_file(options), {}))
    names = {field.name for field in dataclasses.fields(HardwareOptions)}
    return HardwareOptions(**{n: v for n, v in dataclasses.asdict(config).items() if n in names})


def decide(request: TrainingRequest, options: TrainingOptions) -> DecidedTraining:
    """Options over file over preset over the task's defaults; the task built."""
    from tpukit.tasks.registry import find_task, make_task

    file = _read_file(options)
    cls = find_task(request.task)
    preset = cls.presets.get(options.preset) if options.preset else None
    train_names = {field.name for field in dataclasses.fields(TrainConfig)}
    _, extra = _split_settings(options.settings or [], train_names)
    settings = {
        **(preset.task if preset else {}),
        **{n: v for n, v in file.task.items() if n != "name"},
        **{n: v for n, v in request.task_settings.items() if v is not None},
        **extra,
    }
    task_presets = {name: dict(p.train) for name, p in cls.presets.items()}
    layers = _layers(options, file, task_presets)
    data_path = next((layer["data_path"] for layer in layers if layer.get("data_path")), "./data")
    task = make_task(cls, settings, data_path)
    config = resolve(*layers, _task_defaults(task))
    folder = config.results_dir or request.usual_folder.format(name=task.name)
    return DecidedTraining(task, settings, config, Path(folder))


def _read_file(options: TrainingOptions) -> ConfigFile:
    return read_config_file(options.config) if options.config else ConfigFile({}, {})


def _layers(
    options: TrainingOptions, file: ConfigFile, task_presets: Mapping[str, Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The training settings, the strongest first."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    given = {n: v for n, v in dataclasses.asdict(options).items() if n in names and v is not None}
    if "max_time" in given:
        given["max_time"] = parse_duration(given["max_time"])
    if "memory_limit" in given:
        given["memory_limit"] = parse_bytes(given["memory_limit"])
    extra, _ = _split_settings(options.settings or [], names)
    return [given, extra, file.train, preset_values(options.preset, task_presets)]


def _split_settings(
    pairs: list[str], train_names: set[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`--set NAME=VALUE` pairs: those of the training, those of the task."""
    import tomllib

    train: dict[str, Any] = {}
    task: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not separator or not name:
            raise ConfigError(f"--set {pair!r} is not NAME=VALUE.", "Write --set lr=0.001.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        (train if name in train_names else task)[name] = value
    return train, task


def _task_defaults(task: Task) -> dict[str, Any]:
    values = {n: v for n, v in dataclasses.asdict(task.defaults).items()
              if n not in ("rows_per_device", "adam")}  # fmt: skip
    return {**values, "beta1": task.defaults.adam.betas[0], "beta2": task.defaults.adam.betas[1]}
