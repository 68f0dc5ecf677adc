"""`tpukit probe-batch`: the batch that fits, measured on this machine or by the TPU compiler."""

from dataclasses import dataclass
from typing import Annotated

from tpukit.commands.options.option_sets import Given, options_of
from tpukit.commands.options.own_options import TaskOption
from tpukit.commands.options.training import GivenSettings, settings_options
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.running import chosen_task
from tpukit.commands.sizing import check_search, size_batch, size_model, task_source
from tpukit.errors import ConfigError
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
class ProbedPlace:
    """Devices in place of this machine's."""

    target: str | None = None
    """TPU to compile for (v5e-8, v6e-1, ...), or GPUs to predict for (t4, 2xt4, a100-40, 24GB),
    instead of measuring."""


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
    place: Annotated[ProbedPlace, options_of(ProbedPlace, {HARDWARE: ("target",)})],
    bare: Annotated[OwnModel, options_of(OwnModel, {OWN_MODEL: ("model", "inputs")})],
    task: TaskOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the batch that fits: measured on this machine, or by the TPU compiler (--target).

    Trials run the training step in child processes.
    """
    output, settings = Output(as_json=json), SearchSettings(**search)
    target, model, inputs = place.target, bare.model, bare.inputs
    check_search(settings, target, given.train)
    is_bare = _is_factory(model, task, inputs)
    if settings.global_batch_size is not None:
        given.train["global_batch_size"] = settings.global_batch_size
    if model is not None and not is_bare:
        given.task["model"] = model
    # With a target only its children compute, in an environment of their own.
    kind = prepare_environment(HardwareOptions(hw="cpu") if target else given.hardware())
    if is_bare:
        output.result(size_model(model, inputs or [], given, target, settings, output.text))
        return
    chosen = task or chosen_task(given, "probe-batch", output)
    request = given.request(chosen, None if target else kind)
    for remark in request.remarks():
        output.text(remark)
    output.result(size_batch(request, task_source(request), target, settings, output.text))


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
