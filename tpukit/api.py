"""The Python API: what the commands do, in this process. `tpukit` exports it.

Keyword arguments are the commands' options by name. Errors are `TpukitError`s; nothing exits.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from tpukit.commands.options.option_sets import UNITS
from tpukit.commands.options.own_options import DECLARED, DEFAULT_TASK
from tpukit.commands.options.training import (
    GivenSettings,
    SettingSources,
    default_folder,
    read_settings,
)
from tpukit.commands.predict import prediction
from tpukit.commands.running import USED, hardware_options, in_this_process, use_model
from tpukit.commands.sizing import (
    check_search,
    settings_to_repeat,
    size_batch,
    size_model,
    task_source,
)
from tpukit.commands.test import evaluation
from tpukit.errors import ConfigError, HardwareError
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import find_kind, holds_tpu, opened_backend, prepare_environment
from tpukit.probe.batch.search import SearchSettings
from tpukit.train.config import TrainConfig, build, nearest
from tpukit.train.requests import EvaluationOptions, PredictionOptions
from tpukit.train.user_code import refuse_while_importing, task_failure

if TYPE_CHECKING:
    from tpukit.hardware.backend import Backend
    from tpukit.registry.trained import TrainedTask
    from tpukit.train.plan import TrainingRequest
    from tpukit.train.requests import TrainingResult
    from tpukit.train.task import Task

    TaskLike = str | type[Task] | Task
    RunLike = str | Path | TrainingResult | TrainedTask | type[Task] | Task

Log = Callable[[str], None]
HARDWARE = tuple(name for name in USED if name != "master_port")
"""Options of `evaluate` and `predict` that choose the hardware."""
Options = TypeVar("Options")


def fit(
    task: TaskLike,
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    log: Log = print,
    **options: Any,
) -> TrainingResult:
    """Trains a task, or resumes its run, as `tpukit train` does.

    task: an object, its class, or its name (`"eit"`, `"my_file.py:MyTask"`).
    options: those of `tpukit train` (`global_batch_size=`, `epochs=`, `max_time="8h30m"`,
        `results_dir=`, `hw=`, ...); any other is a setting of a task given by class or name.
    log: called with each line for people.

    Returns the fields of `tpukit train --json`; `Path` of it is the run folder.

    Raises:
        InterruptedRunError: a signal or the notebook's stop button; the checkpoint is written, and
            the same call goes on.
        TpukitError: what cannot be used or done, with a hint.
    """
    refuse_while_importing()
    settings = _settings(options, preset, config)
    kind = prepare_environment(settings.hardware())
    if _is_out_of_reach(task):
        if settings.train.get("num_workers"):
            log("num_workers=0: spawned processes cannot import a class of a notebook's cell.")
        settings = dataclasses.replace(settings, train={**settings.train, "num_workers": 0})
    request = settings.request(task, kind)
    for remark in request.remarks():
        log(remark)
    hardware = settings.backend_options(request.config)
    in_this_process(hardware, log)
    from tpukit.train.loader import import_before_limit
    from tpukit.train.task import for_probing

    if hardware.memory_limit is not None:
        import_before_limit(for_probing(request.task))
    with opened_backend(hardware, log, once=False, runs=request.run_folders) as backend:
        import torch

        from tpukit.train.run import train_run

        # A cell above may have switched them off.
        with torch.inference_mode(False), torch.set_grad_enabled(True):
            _check_gradients(backend)
            return train_run(request, backend, log)


def evaluate(
    run: RunLike | None = None,
    *,
    checkpoint: str | Path | None = None,
    task: TaskLike | None = None,
    settings: Mapping[str, Any] | None = None,
    log: Log = print,
    **options: Any,
) -> dict[str, Any]:
    """Evaluates a trained run, as `tpukit test` does; returns its JSON fields.

    run: a run folder, what `fit` or `load` returned, or a task (the run in its own folder).
    checkpoint: a file of other code instead of a run.
    task, settings: where the run does not record them.
    options: those of `tpukit test` (`data=`, `data_path=`, `limit=`, `out=`, `hw=`, ...).

    Under torchrun the ranks that are not the first get an empty dict.
    """
    from tpukit.registry.trained import open_checkpoint_file

    refuse_while_importing()
    given = _take(EvaluationOptions, options)
    hardware = _hardware(options, log)
    if (run is None) == (checkpoint is None):
        raise ConfigError("evaluate takes a run or checkpoint=.", "Give one of the two.")
    if run is not None:
        trained = _open(run, task, settings, log)
    else:
        chosen = task or DEFAULT_TASK
        trained = open_checkpoint_file(Path(checkpoint or ""), chosen, settings or {})
    with _failures_named():
        _refuse_unknown(options, "test", trained, EvaluationOptions)
        use = evaluation(trained, given, options)
        return dict(use_model(trained, use, hardware, log, once=False) or {})


def predict(
    run: RunLike | list[RunLike],
    *,
    task: TaskLike | None = None,
    settings: Mapping[str, Any] | None = None,
    log: Log = print,
    **options: Any,
) -> dict[str, Any]:
    """Writes a trained run's predictions, as `tpukit predict` does; returns its JSON fields.

    run, task, settings: as `evaluate` takes them; a list of runs is averaged (images).
    options: those of `tpukit predict` (`data_path=`, `test_csv=`, `out=`, `num_beams=`, ...).
    """
    refuse_while_importing()
    given = _take(PredictionOptions, options)
    hardware = _hardware(options, log)
    runs = run if isinstance(run, list) else [run]
    if not runs:
        raise ConfigError("predict takes a run, or a list of runs; the list is empty.")
    trained, *others = (_open(one, task, settings, log) for one in runs)
    with _failures_named():
        _refuse_unknown(options, "predict", trained, PredictionOptions)
        use = prediction(trained, given, options, others)
        return dict(use_model(trained, use, hardware, log, once=False) or {})


def load(
    run: RunLike,
    *,
    task: TaskLike | None = None,
    settings: Mapping[str, Any] | None = None,
    log: Log = print,
) -> TrainedTask:
    """A trained run: `.model` (a plain module with the best or EMA weights), `.task`, `.config`.

    run, task, settings: as `evaluate` takes them. The model is on the CPU, in eval mode.
    """
    refuse_while_importing()
    return _open(run, task, settings, log)


def find_batch(
    task: TaskLike | None = None,
    *,
    model: Any = None,
    inputs: Mapping[str, str | tuple[int, ...]] | None = None,
    target: str | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    log: Log = print,
    **options: Any,
) -> dict[str, Any]:
    """Finds the batch that fits, as `tpukit probe-batch` does; returns its JSON fields.

    task: as `fit` takes it.
    model, inputs: instead of a task, a module or what builds one, and its inputs by name: a shape
        without the batch, or `"128:int64<1000"`.
    target: a TPU to compile for (`"v5e-8"`); None: measure here, in child processes.
    options: those of `tpukit probe-batch` (`start=`, `max=`, `hw=`, ...); any other is a setting of
        a task given by class or name, or an argument of the model's function.
    """
    refuse_while_importing()
    search = _take(SearchSettings, options)
    check_search(search, target, options)
    given = _settings({**options, "global_batch_size": search.global_batch_size}, preset, config)
    _require_free_devices(given.hardware(), target)
    if target is None:
        prepare_environment(given.hardware())
    if model is not None and task is None:
        texts = [f"{name}={_input_text(shape)}" for name, shape in (inputs or {}).items()]
        return size_model(model, texts, given, target, search, log)
    if task is None or model is not None or inputs is not None:
        raise ConfigError(
            "find_batch takes a task, or model= with inputs=.", "Give one of the two."
        )
    request = given.request(task, None if target else find_kind(given.hardware()))
    for remark in request.remarks():
        log(remark)
    call = partial(_call, task)
    if isinstance(task, str):
        return size_batch(request, task_source(request), target, search, log, call)
    from tpukit.probe.trials.carried import carried

    with carried(request.task) as source:
        return size_batch(request, source, target, search, log, call)


def _call(task: TaskLike, request: TrainingRequest, global_batch: int, accumulate: int) -> str:
    """The call that trains with a recommendation."""
    settings = settings_to_repeat(request, global_batch, accumulate)
    if task is request.task:  # an object has its own data path
        settings.pop("data_path", None)
    else:
        settings |= request.task_settings
    return f"tpukit.fit({', '.join(['task', *(f'{n}={v!r}' for n, v in settings.items())])})"


def _input_text(shape: str | tuple[int, ...]) -> str:
    return shape if isinstance(shape, str) else "x".join(map(str, shape)) or "scalar"


# -- options -------------------------------------------------------------------------------------
def _settings(
    options: Mapping[str, Any], preset: str | None, config: str | Path | None
) -> GivenSettings:
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    # NumPy's numbers, of a sweep.
    options = {n: v.item() if getattr(v, "ndim", None) == 0 else v for n, v in options.items()}
    given = {n: _plain(TrainConfig, n, v) if n in names else v for n, v in options.items()}
    sources = SettingSources(preset, str(config) if config else None)
    return dataclasses.replace(read_settings(given, sources), command="the same call")


def _plain(kind: type, name: str, value: Any) -> Any:
    """A field's value as the command line would give it: paths as text, units read."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    unit = next(f.metadata.get("unit") for f in dataclasses.fields(kind) if f.name == name)
    return UNITS[unit](value) if unit and isinstance(value, str) else value


def _take(kind: type[Options], options: dict[str, Any]) -> Options:
    """The options of one kind, out of those that were given; texts become paths.

    Raises ConfigError for values that the command line does not take either.
    """
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    given = {f.name: _plain(kind, f.name, options.pop(f.name)) for f in fields if f.name in options}
    texts = {n for n, v in given.items() if isinstance(v, str) and hints[n] == Path | None}
    given = {name: Path(v) if name in texts else v for name, v in given.items()}
    return build(kind, {name: value for name, value in given.items() if value is not None})


def _hardware(options: dict[str, Any], log: Log) -> HardwareOptions:
    """Takes the hardware's options out of a call's."""
    given = {name: options.pop(name) for name in HARDWARE if name in options}
    hardware = hardware_options(given)
    in_this_process(hardware, log)
    return hardware


def _refuse_unknown(
    options: Mapping[str, Any], command: str, trained: TrainedTask, kind: type[Any]
) -> None:
    """Raises ConfigError for an option that neither the command nor the task has."""
    declared = getattr(trained.task, DECLARED[command])
    own = [field.name for field in dataclasses.fields(declared)] if declared else []
    for name in options.keys() - set(own):
        near = nearest(name, [*HARDWARE, *own, *(f.name for f in dataclasses.fields(kind))])
        raise ConfigError(f"unknown option {name!r}.", f"Did you mean {near}?" if near else None)


# -- runs and processes --------------------------------------------------------------------------
def _open(
    run: RunLike, task: TaskLike | None, settings: Mapping[str, Any] | None, log: Log
) -> TrainedTask:
    from tpukit.registry.classes import own_class
    from tpukit.registry.trained import TrainedTask, open_trained
    from tpukit.train.task import Task

    if isinstance(run, TrainedTask):
        return run
    if isinstance(run, Task | type):
        task, cls = run, own_class(run if isinstance(run, type) else type(run))
        run = default_folder(cls)
    return open_trained(Path(run), log, task, settings)


@contextmanager
def _failures_named() -> Iterator[None]:
    """What the user's own code raises becomes a TaskFailedError, as `fit` raises it."""
    try:
        yield
    except Exception as error:
        failure = task_failure(error)
        if failure is None or failure is error:
            raise
        raise failure from error


def _is_out_of_reach(task: TaskLike) -> bool:
    """Whether DataLoader workers would start without the task's class: it is of this session."""
    from tpukit.registry.classes import SESSION

    cls = task if isinstance(task, type) else type(task)
    start = multiprocessing.get_start_method(allow_none=True)
    forks = (start or multiprocessing.get_all_start_methods()[0]) == "fork"
    return cls.__module__ == SESSION and not forks


def _check_gradients(backend: Backend) -> None:
    """Raises HardwareError where torch_xla came too late for this process to train on XLA."""
    import torch

    if not backend.compiles_everything:
        return
    one = torch.ones((), device=backend.device, requires_grad=True)
    try:
        (one * one).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise HardwareError(
            f"hw={backend.describe()['hardware']!r}: this process computed gradients before"
            " torch_xla was initialised, and cannot on XLA devices any more.",
            "Restart the kernel and make this the first call that trains.",
            id="xla-too-late",
        ) from error


def _require_free_devices(hardware: HardwareOptions, target: str | None) -> None:
    if target is None and holds_tpu() and find_kind(hardware) == "tpu":
        raise HardwareError(
            "This process holds the TPU, which the processes of the trials need.",
            'Restart the kernel and call find_batch before fit, or give target="v5e-8".',
            id="tpu-held",
        )
