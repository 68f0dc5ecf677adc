"""The options that training commands share, and the request that follows from them."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpukit.commands.options.option_sets import Given, OptionSet, options_of, read_value
from tpukit.errors import ConfigError
from tpukit.hardware.detect import EMULATED_KERNELS
from tpukit.hardware.options import HARDWARE, HardwareOptions, Kind
from tpukit.hardware.select import find_kind
from tpukit.io.remote import address_of
from tpukit.train.config import (
    OPTIONS,
    ConfigFile,
    TrainConfig,
    build,
    merge,
    nearest,
    option_name,
    preset_values,
    read_config_file,
    resolve,
)

if TYPE_CHECKING:
    from tpukit.train.plan import TrainingRequest
    from tpukit.train.task import Preset, Task

DEFAULT_EPOCHS = 10
"""Epochs of a task that names neither epochs nor steps."""
RESERVED = frozenset(("name", "source"))
"""What a run's config.toml keeps of the task itself, beside its settings."""
DECIDING = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "CUDA_VISIBLE_DEVICES", EMULATED_KERNELS)
"""Environment variables that decide the hardware; the command that resumes a run sets them too."""
PlanOption = Annotated[
    str | None,
    typer.Option(rich_help_panel=HARDWARE, help="Ask the TPU compiler (v5e-8, ...) and exit."),
]


STEPS_WORTH_COMPILING = 500
"""Optimizer steps of a run on GPUs that gain more than torch.compile takes: minutes, on the few
cores of a notebook."""


@dataclass(frozen=True)
class SettingSources:
    """Sources of settings beside their own options."""

    preset: str | None = None
    """quick, safe, balanced or fast."""
    config: str | None = None
    """A TOML file; options override it, it overrides the preset."""
    settings: list[str] | None = None
    """NAME=VALUE: any other training or task setting."""


@dataclass(frozen=True)
class GivenSettings:
    """What a user gave, from options, `--set`, file and preset; no task is imported yet."""

    train: dict[str, Any]
    """Training settings from options and `--set`."""
    task: dict[str, Any]
    """The task's settings from options and `--set`."""
    file: ConfigFile
    preset: str | None
    command: str = "the same call"
    """Command that resumes the run."""

    def get(self, name: str) -> Any:
        """A training setting that was given by an option, `--set` or the file; None: it was not."""
        return self.train.get(name) or self.file.train.get(name)

    def hardware(self) -> HardwareOptions:
        """The hardware part, before a task that may import torch is imported."""
        names = {field.name for field in dataclasses.fields(HardwareOptions)}
        values = merge(self.train, self.file.train, preset_values(self.preset, {}))
        return build(HardwareOptions, {n: v for n, v in values.items() if n in names}, option_name)

    def backend_options(self, config: TrainConfig) -> HardwareOptions:
        """The hardware part of a run's config: what its backend is opened with."""
        is_short = self.preset == "quick" or (config.max_steps or math.inf) < STEPS_WORTH_COMPILING
        if config.compile is None and is_short and find_kind(config) == "gpu":
            return dataclasses.replace(config, compile=False)
        return config

    def request(self, task: str | type[Task] | Task, kind: Kind | None = None) -> TrainingRequest:
        """The request for a task: by name or `FILE:CLASS`, a class, or an object that is taken
        as it is.

        kind: the hardware that it trains on; a task may have a preset for the CPU.
        """
        from tpukit.probe.gpu_memory.run_costs import predict_costs
        from tpukit.registry.classes import default_data_path, find_task, make_task, own_class
        from tpukit.train.plan import TrainingRequest
        from tpukit.train.run_folder import run_folder
        from tpukit.train.task import Preset, Task
        from tpukit.train.weights import recordable, settings_of

        if isinstance(task, Task):
            cls = own_class(type(task))
        else:
            cls = find_task(task) if isinstance(task, str) else own_class(task)
        file = {name: value for name, value in self.file.task.items()
                if name not in RESERVED}  # fmt: skip
        name = self.preset or self._preset_for_cpu(cls, {**file, **self.task}, kind)
        preset = cls.presets.get(name or "", Preset())
        _refuse_hardware_kind(cls, name, preset)
        layers = [self.train, self.file.train, preset_values(name, preset.train)]
        if isinstance(task, Task):
            self._refuse_settings_of_an_object(cls.name)
            built, settings = task, settings_of(task)
            data_path = settings.get("data_path", default_data_path(cls))
        else:
            settings = {**preset.task, **file, **self.task}
            data_path = merge(*layers).get("data_path", default_data_path(cls))
            built, settings = make_task(cls, settings, data_path), recordable(settings)
        if taken := RESERVED & settings.keys():
            raise ConfigError(
                f"Task {cls.name!r}: a setting cannot be called {min(taken)!r}.",
                "config.toml keeps the task itself there: rename the parameter.",
            )
        layers = [{"data_path": data_path}, *layers, task_defaults(built)]
        config = resolve(*layers, name=option_name)
        folder = run_folder(config.results_dir or default_folder(cls))
        _require_another_folder(config.init_from, folder.path)
        spec = task if isinstance(task, str) else cls.source or cls.name
        return TrainingRequest(
            built, config, folder, settings, spec, self.command,
            chosen_preset=None if self.preset else name, predict_costs=predict_costs,
        )  # fmt: skip

    def _preset_for_cpu(
        self, cls: type[Task], given: Mapping[str, Any], kind: Kind | None
    ) -> str | None:
        """The task's preset for a CPU, unless a setting that it sets is given."""
        if kind != "cpu" or cls.cpu_preset is None:
            return None
        return None if cls.presets[cls.cpu_preset].task.keys() & given.keys() else cls.cpu_preset

    def _refuse_settings_of_an_object(self, task: str) -> None:
        given = {**self.task, **{n: v for n, v in self.train.items() if n == "data_path"}}
        for name, value in given.items():
            near = nearest(name, [field.name for field in dataclasses.fields(TrainConfig)])
            guess = f"Did you mean {near}? " if near and near != name else ""
            raise ConfigError(
                f"{name}={value!r} is not an option of the training, and the task object {task!r}"
                " has its settings already.",
                f"{guess}Give settings of a task to its constructor.",
            )


def _refuse_hardware_kind(task: type[Task], name: str | None, preset: Preset) -> None:
    """Raises ConfigError where a task's preset sets what is decided before the task is imported."""
    if "hw" in preset.train:
        raise ConfigError(
            f"preset {name!r} of task {task.name!r} sets hw, which is chosen before the task's file"
            " is imported.",
            f"Remove it from {task.__name__}.presets and give --hw {preset.train['hw']}.",
        )


def _require_another_folder(init_from: str | None, folder: Path) -> None:
    """Raises ConfigError where a run would begin with the weights of its own folder."""
    from tpukit.train.run_folder import run_folder

    if init_from is None:
        return
    if address_of(init_from) is not None:  # its checkpoints are copied with their run
        source = run_folder(init_from.partition("/checkpoints/")[0]).path
    else:
        source = Path(init_from).resolve()
    if folder.resolve() in (source, *source.parents):
        raise ConfigError(
            f"--init-from {init_from} is in the folder of the new run itself.",
            "Give the new run another one: --results-dir DIR.",
        )


def default_folder(task: type[Task]) -> str:
    """The run folder of a task where --results-dir names none."""
    return str(vars(task).get("folder") or f"results/{task.name}")


def read_settings(given: Given, sources: SettingSources) -> GivenSettings:
    """What a command was given: training settings and the task's own, by name."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    pairs = parse_settings(sources.settings or [])
    file = read_config_file(sources.config) if sources.config else ConfigFile({}, {})
    set_here = [f"{name}={os.environ[name]}" for name in DECIDING if name in os.environ]
    # --no-resume again would set the stopped run aside.
    words = [word for word in sys.argv[1:] if word != "--no-resume"]
    command = shlex.join([*set_here, "tpukit", *words])
    train = [{n: v for n, v in layer.items() if n in names} for layer in (given, pairs)]
    task = {n: v for n, v in {**given, **pairs}.items() if n not in names and v is not None}
    return GivenSettings(merge(*train), task, file, sources.preset, command)


def settings_options(panels: Mapping[str, Sequence[str]]) -> OptionSet:
    """The options that a command makes GivenSettings of: training settings by panel, their further
    sources, the task's own."""
    sources = options_of(SettingSources, {"Settings": ("preset", "config", "settings")})
    names = [parameter.name for parameter in sources.parameters]

    def read(given: Given) -> GivenSettings:
        own = {name: given.pop(name) for name in names if name in given}
        return read_settings(given, SettingSources(**own))

    parameters = [*options_of(TrainConfig, panels).parameters, *sources.parameters]
    return OptionSet(parameters, takes_own=True, read=read)


TrainingSettings = Annotated[GivenSettings, settings_options(OPTIONS)]
"""The parameter of a training command that receives its settings."""


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs of `--set`, values as in TOML, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not separator or not name:
            raise ConfigError(f"--set {pair!r} is not NAME=VALUE.", "Write --set lr=0.001.")
        settings[name] = read_value(text)
    return settings


def task_defaults(task: Task) -> dict[str, Any]:
    """What a task sets for its training where nobody else does."""
    from tpukit.registry.classes import default_data_path

    ends = task.defaults.epochs, task.defaults.max_steps
    values = {n: v for n, v in dataclasses.asdict(task.defaults).items()
              if n not in ("rows_per_device", "adam")}  # fmt: skip
    if ends == (None, None):
        values["epochs"] = DEFAULT_EPOCHS
    values["data_path"] = default_data_path(type(task))
    return {**values, "beta1": task.defaults.adam.betas[0], "beta2": task.defaults.adam.betas[1]}
