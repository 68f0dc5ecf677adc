"""`tpukit probe-batch`: the batch that fits, measured on this machine or by the TPU compiler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tpukit.commands.options.option_sets import Given, options_of
from tpukit.commands.options.own_options import TaskOption
from tpukit.commands.options.training import GivenSettings, settings_options
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.reports.batch import comparison
from tpukit.commands.running import chosen_task
from tpukit.commands.sizing import check_search, size_batch, size_model, task_source
from tpukit.errors import ConfigError, OutOfMemoryError
from tpukit.hardware.options import HARDWARE, HardwareOptions
from tpukit.hardware.select import prepare_environment
from tpukit.io.ranges import setting
from tpukit.probe.batch.search import SearchSettings

TASK, OWN_MODEL, SEARCH = "Task", "A model of your own", "Search"
SEARCH_FIELDS = ("start", "max", "multiple_of", "margin", "global_batch_size", "time_limit",
                 "trial_time", "max_time", "exact")  # fmt: skip
HARDWARE_FIELDS = ("hw", "devices", "precision", "shard", "kernels", "memory_limit")

SearchOptions = Annotated[Given, options_of(SearchSettings, {SEARCH: SEARCH_FIELDS})]
ProbeSettings = Annotated[
    GivenSettings, settings_options({HARDWARE: HARDWARE_FIELDS, TASK: ("data_path",)})
]


@dataclass(frozen=True)
class ProbedPlaces:
    """Devices in place of this machine's."""

    target: str | None = None
    """TPU to compile for (v5e-8, v6e-1, ...), or GPUs to predict for (t4, 2xt4, a100-40, 24GB),
    instead of measuring."""
    compare: str | None = setting(None, metavar="TARGET,TARGET,...")
    """Targets side by side, in place of --target: t4,l4,a100-40."""


@dataclass(frozen=True)
class OwnModel:
    """A model without a task."""

    model: str | None = None
    """my_file.py:make_model, or package.module:function; without a colon the task's setting
    `model`."""
    inputs: list[str] | None = setting(None, metavar="NAME=SHAPE[:DTYPE[<N]]")
    """An input of --model, without the batch: image=3x224x224, 'ids=128:int64<1000'."""


def probe_batch(
    search: SearchOptions,
    given: ProbeSettings,
    places: Annotated[ProbedPlaces, options_of(ProbedPlaces, {HARDWARE: ("target", "compare")})],
    bare: Annotated[OwnModel, options_of(OwnModel, {OWN_MODEL: ("model", "inputs")})],
    task: TaskOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the batch that fits: measured on this machine, or by the TPU compiler (--target).

    Trials run the training step in child processes.
    """
    output, settings = Output(as_json=json), SearchSettings(**search)
    target, compare = places.target, places.compare
    model, inputs = bare.model, bare.inputs
    targets = [target] if compare is None else [name.strip() for name in compare.split(",")]
    if target and compare is not None:
        raise ConfigError("--target and --compare exclude each other.", "Give one of them.")
    for name in targets:
        check_search(settings, name, given.train)
    factory = model if _is_factory(model, task, inputs) else None
    if settings.global_batch_size is not None:
        given.train["global_batch_size"] = settings.global_batch_size
    if factory is None and model is not None:
        given.task["model"] = model
    # With a target only its children compute, in an environment of their own.
    here = targets == [None]
    kind = prepare_environment(given.hardware() if here else HardwareOptions(hw="cpu"))
    chosen = "" if factory else task or chosen_task(given, "probe-batch", output)
    request = None if factory else given.request(chosen, kind if here else None)
    for remark in request.remarks() if request else ():
        output.text(remark)

    def size(name: str | None, log: Callable[[str], None]) -> dict[str, Any]:
        if factory is not None:
            return size_model(factory, inputs or [], given, name, settings, log)
        assert request is not None
        return size_batch(request, task_source(request), name, settings, log)

    if compare is None:
        output.result(size(target, output.text))
    else:
        _compare(targets, size, output)


def _compare(
    targets: Sequence[str | None],
    size: Callable[[str | None, Callable[[str], None]], dict[str, Any]],
    output: Output,
) -> None:
    rows = []
    for name in targets:
        output.text(f"{name} ...")
        try:
            rows.append(size(name, lambda line: None))
        except OutOfMemoryError as error:
            rows.append({"target": name, "error": error.message})
    for line in comparison(rows):
        output.text(line)
    output.result({"compared": rows})


def _is_factory(model: str | None, task: str | None, inputs: list[str] | None) -> bool:
    """Whether `--model` names a function; raises ConfigError for mixtures."""
    if model is None or ":" not in model:
        if inputs:
            raise ConfigError(
                f"--input {inputs[0]}: only a model of your own takes inputs.",
                "Name the function that builds it, too: --model FILE:FUNCTION.",
            )
        return False
    if task is not None:
        raise ConfigError(
            f"--task {task} and --model {model} exclude each other.", "Give one of them."
        )
    return True
