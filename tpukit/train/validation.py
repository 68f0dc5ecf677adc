"""Validation metrics: weighted means, and what a task computes from the rows of a whole set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from tpukit.errors import UsageError
from tpukit.hardware.backend import Backend, Batch
from tpukit.train.batch_sums import BatchSums
from tpukit.train.inference import ROWS_PER_DEVICE, Rows, rows_of_data
from tpukit.train.loader import LoaderSettings
from tpukit.train.mistakes.returned import expect, task_mistake
from tpukit.train.monitor.compilation_watch import CompilationWatch, shapes_of
from tpukit.train.task import MicroBatch, PlanSettings, SampleSource, Task, overrides

if TYPE_CHECKING:
    from tpukit.train.learner import Learner
    from tpukit.train.plan import RunPlan
    from tpukit.train.requests import EvaluationRequest


def validation_scores(plan: RunPlan, learner: Learner, watch: CompilationWatch) -> dict[str, float]:
    """All validation metrics with the model's present weights, the same on every rank.

    `valid_loss`, or `valid_NAME_loss` where the sets have names.
    """
    found: dict[str, float] = {}
    # No new processes in the middle of a run: a fork beside the threads that write a checkpoint
    # or talk to other ranks can hang. Batches are made on the backend's own thread instead.
    loading = replace(plan.loading, workers=0)
    learner.model.eval()
    for name, data in plan.datasets.validation_sets().items():
        micro_batches = list(plan.task.evaluation_batches(data, plan.settings))
        values = metrics_of(learner.sums, data, micro_batches, loading, watch)
        values |= plan.task.score(learner.backend.unwrap(learner.model), learner.backend, data)
        watch.done("score")
        found |= {"_".join(filter(None, ("valid", name, k))): v for k, v in values.items()}
    learner.model.train()
    # What a task computes may depend on its rank: every rank must take the same decisions.
    return learner.backend.all_gather_objects(found)[0]  # type: ignore[no-any-return]


def metrics_of_run(
    task: Task,
    model: nn.Module,
    backend: Backend,
    request: EvaluationRequest,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """The JSON fields of `tpukit test`: the task's own, or its validation metrics."""
    if not overrides(task, "evaluate"):
        return _run_metrics(task, model, backend, request, log)
    fields = task.evaluate(model, backend, request, log)
    expect(fields, dict, task.evaluate, "a dict of JSON fields")
    return {**fields, "metric_names": dict(task.metric_names)} if task.metric_names else fields


def _run_metrics(
    task: Task,
    model: nn.Module,
    backend: Backend,
    request: EvaluationRequest,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Raises UsageError where the task has no validation data."""
    sets = _with_data_path(task, request).datasets().validation_sets()
    if not sets:
        raise UsageError(
            f"task {task.name!r} has no validation data, and no `evaluate`.",
            "Add `def evaluate(self, model, backend, request, log)` to the task class;"
            " docs/own_task.py has one.",
        )
    rows = request.batch_size or ROWS_PER_DEVICE * backend.devices
    settings = PlanSettings(rows, rows, backend.devices, request.seed, compiles=backend.compiles)
    sums, watch = BatchSums(task, backend, model), CompilationWatch(backend)
    metrics: dict[str, float] = {}
    samples = 0
    for name, data in sets.items():
        micro_batches = list(_first(task.evaluation_batches(data, settings), request.limit))
        samples += sum(len(micro.keys) for micro in micro_batches)
        loading = LoaderSettings(0, request.seed)
        values = metrics_of(sums, data, micro_batches, loading, watch)
        metrics |= {"_".join(filter(None, (name, k))): value for k, value in values.items()}
    for warning in sums.inputs.warnings():
        log(warning)
    metrics = backend.all_gather_objects(metrics)[0]
    text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    log(f"{samples} samples: {text}")
    return {"task": task.name, "samples": samples, "metrics": metrics}


def _with_data_path(task: Task, request: EvaluationRequest) -> Task:
    if request.data_path is None:
        return task
    if not hasattr(task, "data_path"):
        raise UsageError(
            f"task {task.name!r} keeps no `data_path` that --data-path could replace.",
            "Keep it in `__init__`: `self.data_path = data_path`.",
        )
    other = copy(task)
    other.data_path = type(other.data_path)(request.data_path)
    return other


def _first(micro_batches: Iterable[MicroBatch], limit: int | None) -> Iterator[MicroBatch]:
    """The micro-batches with the first `limit` samples in them; all where it is None."""
    for micro in micro_batches:
        if limit is None:
            yield micro
        elif limit > 0:
            yield replace(micro, keys=micro.keys[:limit])
            limit -= len(micro.keys)


def metrics_of(
    sums: BatchSums,
    data: SampleSource,
    micro_batches: Sequence[MicroBatch],
    loading: LoaderSettings,
    watch: CompilationWatch,
) -> dict[str, float]:
    """The means and the computed metrics of one set; the model is in eval mode."""
    task, backend = sums.task, sums.backend
    micro_batches = _countable(micro_batches, sums)
    has_rows = overrides(task, "validation_rows")

    def added(batch: Batch) -> Rows:
        sums.add(batch)
        watch.done("evaluate", shapes_of([batch]))
        if not has_rows:
            return {}
        rows = sums.rows_of(batch)
        watch.done("accumulate", shapes_of([batch]))
        return rows

    rows = rows_of_data(task, data, micro_batches, backend, loading, added, sums.inputs.see)
    # Rank 0 warns, and another one's rows may fill up.
    filled = backend.all_gather_objects(sums.inputs.has_filled_rows)
    sums.inputs.has_filled_rows = any(filled)
    values = sums.read()
    watch.done("read_evaluation")
    if has_rows:
        values |= _computed(task, rows)
    return values


def _countable(micro_batches: Sequence[MicroBatch], sums: BatchSums) -> Sequence[MicroBatch]:
    """Without filled rows, where a mean would count them and no program is compiled for a shape."""
    backend, is_mean = sums.backend, sums.inputs.is_mean
    # Before the first batch of a run's test; one rank's rows always divide.
    is_unknown = is_mean is None and backend.world_size == 1
    if backend.compiles or not (is_mean or is_unknown):
        return micro_batches
    return [part for m in micro_batches for part in m.without_filled_rows(backend.devices)]


def _computed(task: Task, rows: Rows) -> dict[str, float]:
    found: Mapping[str, Any] = task.compute(rows)
    try:
        return {name: float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise task_mistake(
            task.compute, f"did not return numbers by name: {error}", 'Return {"auc": 0.9}.'
        ) from error
