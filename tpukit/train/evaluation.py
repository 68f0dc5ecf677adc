"""A trained model's outputs for a data set, its validation metrics, their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.errors import DataError, UsageError
from tpukit.hardware.backend import Backend, Batch
from tpukit.train.checks import described, expect, task_mistake
from tpukit.train.clocks import CompilationWatch, shapes_of
from tpukit.train.learner import BatchSums, seed_loss
from tpukit.train.loader import LoaderSettings, SeeBatch, make_loader
from tpukit.train.metric_names import MetricName, parse_metrics
from tpukit.train.metrics import metrics_of_first_rows, named_metrics
from tpukit.train.plan import decided_before, validation_name
from tpukit.train.task import MicroBatch, PlanSettings, SampleSource, Task, overrides, restored
from tpukit.train.weights import arguments_of

if TYPE_CHECKING:
    from tpukit.train.learner import Learner
    from tpukit.train.plan import RunPlan
    from tpukit.train.requests import EvaluationRequest

ROWS_PER_DEVICE = 16
IN_PROCESS = LoaderSettings(workers=0, seed=0)
Rows = dict[str, NDArray[Any]]


@torch.no_grad()
def infer(
    task: Task,
    data: SampleSource,
    forward: Callable[[Batch], Tensor],
    backend: Backend,
    rows_per_device: int = ROWS_PER_DEVICE,
    loading: LoaderSettings = IN_PROCESS,
) -> NDArray[Any]:
    """`forward(batch)` (rows, ...) of every sample, (samples, ...) in order, on the host.

    Floats become float32. The ranks share the work; every rank must call it and gets all outputs.
    """

    def outputs(batch: Batch) -> Rows:
        with backend.autocast():
            found = forward(batch)
        rows = rows_on_host({"outputs": found}, batch, forward, backend)
        return {**rows, "mask": np.ones(len(rows["mask"]))}

    micro_batches = all_batches(task, data, backend, rows_per_device * backend.devices)
    if not micro_batches:
        raise DataError("infer: the data set has no samples.", "Check its path.")
    # Filled rows stay: what a sample gives does not depend on how many come with it.
    return rows_of_data(task, data, micro_batches, backend, loading, outputs)["outputs"]


def rows_of_data(
    task: Task,
    data: SampleSource,
    micro_batches: Sequence[MicroBatch],
    backend: Backend,
    loading: LoaderSettings,
    forward: Callable[[Batch], Rows],
    see: SeeBatch | None = None,
) -> Rows:
    """What `forward` returns for each batch, as rows of the whole data set in its order.

    Each rank computes its share and gets all rows. `forward` returns arrays (rows, ...) with a
    `mask` (rows,), or {} for every batch; what it draws is a function of seed and batch.
    """
    shares = [micro.share(backend.rank, backend.world_size) for micro in micro_batches]
    loader = make_loader(task, data, shares, loading, see)
    parts = []
    for micro, batch in zip(micro_batches, backend.batches(loader), strict=True):
        first = (micro.keys or (micro.filler,))[0]
        seed_loss(backend, loading.seed, *first)
        parts.append(forward(batch))
    if not any(parts):
        return {}
    return in_data_order(backend.all_gather_objects(parts), micro_batches)


def rows_on_host(found: Any, batch: Batch, method: Callable[..., Any], backend: Backend) -> Rows:
    """What a method gave for a batch by name, floats in fp32, and the batch's mask, on the host.

    Raises UsageError for what is not a value for each row.
    """
    count = len(batch["mask"])
    for name, value in expect(found, dict, method, "a dict of tensors by name").items():
        if not isinstance(value, Tensor) or value.shape[:1] != (count,):
            raise task_mistake(
                method, f"returned {name!r} as {described(value)} for a batch of {count} rows",
                f"Return a tensor of shape ({count}, ...): a value for each row.",
            )  # fmt: skip
    found = {n: v.float() if v.is_floating_point() else v for n, v in found.items()}
    # All at once: a graph for each would be compiled otherwise.
    backend.finish()
    host = backend.to_host({**found, "mask": batch["mask"]})
    return {name: tensor.numpy() for name, tensor in host.items()}


def in_data_order(parts: Sequence[Sequence[Rows]], micro_batches: Sequence[MicroBatch]) -> Rows:
    """The ranks' parts of each batch as rows of the whole set, without masked and filled ones."""
    # One batch is the ranks' parts one after the other; filled rows come last.
    whole = [
        {name: np.concatenate([part[name] for part in ranks])[: len(micro.keys)]
         for name in ranks[0]}
        for ranks, micro in zip(zip(*parts, strict=True), micro_batches, strict=True)
    ]  # fmt: skip
    shapes = [{name: v.shape[1:] for name, v in batch.items() if name != "mask"} for batch in whole]
    if odd := [shape for shape in shapes if shape != shapes[0]]:
        raise UsageError(
            f"rows of the shapes {shapes[0]} in one batch and {odd[0]} in another.",
            "Pad them to one size, or return a value a row.",
        )
    rows = {name: np.concatenate([batch[name] for batch in whole]) for name in whole[0]}
    samples = np.array([key.sample for micro in micro_batches for key in micro.keys])
    order = np.argsort(samples, kind="stable")
    kept = order[rows.pop("mask")[order] > 0]
    return {name: values[kept] for name, values in rows.items()}


# -- metrics -------------------------------------------------------------------------------------
def validation_scores(
    plan: RunPlan, learner: Learner, watch: CompilationWatch, loading: LoaderSettings
) -> dict[str, float]:
    """All validation metrics with the model's present weights, the same on every rank.

    `valid_loss`, or `valid_NAME_loss` where the sets have names.
    """
    found: dict[str, float] = {}
    names = parse_metrics(plan.config.metric)
    model = learner.backend.unwrap(learner.model)
    with learner.evaluating():
        watch.done("keep")  # what is put back
        for name, data in plan.datasets.validation_sets().items():
            micro_batches = list(plan.task.evaluation_batches(data, plan.settings))
            values = metrics_of(learner.sums, data, micro_batches, loading, watch, names)
            if overrides(plan.task, "score"):
                values |= plan.task.score(model, learner.backend, data)
                watch.done("score")
            found |= {validation_name(name, k): v for k, v in values.items()}
    watch.done("evaluated")
    # What a task computes may depend on its rank: every rank must take the same decisions.
    return learner.backend.all_gather_objects(found)[0]  # type: ignore[no-any-return]


def require_metrics(plan: RunPlan, learner: Learner) -> None:
    """Raises UsageError where the validation will not give what `metric` and `best_metric` name.

    By one batch of each set, before the first step; every rank must call it. What cannot be known
    by it (`score`, a `compute` that needs more rows), and what would be graphs of their own, which
    take minutes, is met at the first validation.
    """
    task, backend, wanted = plan.task, learner.backend, plan.best.name
    names, asked = parse_metrics(plan.config.metric), plan.config.best_metric
    if names and not overrides(task, "validation_rows"):
        named_metrics(names, {})
    scores = overrides(task, "score")
    if backend.compiles_everything or not (names or (asked and not scores)):
        return

    def computed(task: Task, rows: Rows) -> dict[str, float]:
        by_name = metrics_of_first_rows(names, rows, task.predicts)
        try:
            with catch_warnings(action="ignore"):
                return {**_computed(task, rows), **by_name}
        except Exception:  # of so few rows
            return {**by_name, wanted: math.nan}

    before, loading = backend.state(), replace(plan.loading, workers=0)
    sums, watch = BatchSums(task, backend, learner.model), CompilationWatch(backend)
    found: dict[str, float] = {}
    with learner.evaluating():
        for name, data in plan.datasets.validation_sets().items():
            first = list(islice(task.evaluation_batches(data, plan.settings), 1))
            values = metrics_of(sums, data, first, loading, watch, names, computed)
            found |= {k if k == wanted else validation_name(name, k): v for k, v in values.items()}
    backend.load_state(before)
    if not scores:
        plan.best.require_among(found)


def metrics_of_run(
    task: Task,
    model: nn.Module,
    backend: Backend,
    request: EvaluationRequest,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """The JSON fields of `tpukit test`: the task's own, or its validation metrics.

    Raises UsageError where the task has neither.
    """
    if overrides(task, "evaluate"):
        fields = task.evaluate(model, backend, request, log)
        expect(fields, dict, task.evaluate, "a dict of JSON fields")
        return {**fields, "metric_names": dict(task.metric_names)} if task.metric_names else fields
    datasets = _with_data_path(task, request).datasets()
    sets = datasets.validation_sets()
    learned = request.run.checkpoint.state.identity if request.run else {}
    if any(learned.get(name, value) != value for name, value in datasets.identity.items()):
        log(
            "Warning: this is not the data that the run was trained with: it may have learned some"
            " of the samples that it is tested on."
        )
    if not sets:
        raise UsageError(
            f"task {task.name!r} has no validation data, and no `evaluate`.",
            "Add `def evaluate(self, model, backend, request, log)` to the task class;"
            " docs/own_task.py has one.",
        )
    sums, watch = BatchSums(task, backend, model), CompilationWatch(backend)
    metrics: dict[str, float] = {}
    samples = 0
    # As the run validated, that its numbers are found again.
    of_run = request.run.train_config if request.run else {}
    seed = int(of_run.get("global_seed", 0)) + request.seed
    rows = request.batch_size or _rows_of_run(request, backend)
    for name, data in sets.items():
        micro_batches = all_batches(task, data, backend, rows, seed)
        if request.limit is not None:
            micro_batches = list(_alone(micro_batches, {*request.chosen(range(len(data)))}))
        samples += sum(len(micro.keys) for micro in micro_batches)
        loading = LoaderSettings(0, seed)
        values = metrics_of(sums, data, micro_batches, loading, watch, request.metrics())
        metrics |= {"_".join(filter(None, (name, k))): value for k, value in values.items()}
    for warning in sums.inputs.warnings():
        log(warning)
    metrics = backend.all_gather_objects(metrics)[0]
    text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    log(f"{samples} samples: {text}")
    named = request.named("valid")
    return {"task": task.name, "data": named, "samples": samples, "metrics": metrics}


def mean_values(
    task: Task, model: nn.Module, backend: Backend, data: SampleSource
) -> dict[str, float]:
    """The means of what the loss returns over a data set; every rank must call it."""
    sums, watch = BatchSums(task, backend, model), CompilationWatch(backend)
    return metrics_of(sums, data, all_batches(task, data, backend), IN_PROCESS, watch)


def all_batches(
    task: Task, data: SampleSource, backend: Backend, rows: int | None = None, seed: int = 0
) -> list[MicroBatch]:
    """All samples in batches of `rows` over all devices."""
    rows = rows or ROWS_PER_DEVICE * backend.devices
    settings = PlanSettings(rows, rows, backend.devices, seed, compiles=backend.compiles)
    return list(task.evaluation_batches(data, settings))


def _rows_of_run(request: EvaluationRequest, backend: Backend) -> int | None:
    """Rows of the run's micro-batches, where it trained on this hardware."""
    if request.run is None:
        return None
    rows = decided_before(request.run.folder, backend).get("rows_per_device")
    return rows and rows * backend.devices


def _with_data_path(task: Task, request: EvaluationRequest) -> Task:
    """The task made anew with the request's data path, from which it may have made others."""
    if request.data_path is None:
        return task
    given = arguments_of(task)
    if "data_path" not in signature(task.options or type(task)).parameters:
        raise UsageError(
            f"task {task.name!r} takes no `data_path` that --data-path could replace.",
            "Give its constructor one: `def __init__(self, data_path=...)`.",
        )
    kind = type(given.get("data_path") or "")
    other = type(task)(**{**given, "data_path": kind(request.data_path)})
    return restored(other, request.run.checkpoint.artifacts()) if request.run else other


def _alone(micro_batches: Sequence[MicroBatch], samples: set[int]) -> Iterator[MicroBatch]:
    """Micro-batches of the same shapes with these samples alone, one a row."""
    for _, alike in groupby(micro_batches, lambda micro: (micro.rows, micro.shape)):
        first, *others = alike
        keys = [k for micro in (first, *others) for k in micro.keys if k.sample in samples]
        for start in range(0, len(keys), first.rows):
            part = tuple(keys[start : start + first.rows])
            ones = (1,) * len(part) + (0,) * (first.rows - len(part))
            yield replace(first, keys=part, counts=first.counts and ones)


def metrics_of(
    sums: BatchSums,
    data: SampleSource,
    micro_batches: Sequence[MicroBatch],
    loading: LoaderSettings,
    watch: CompilationWatch,
    names: Sequence[MetricName] = (),
    computed: Callable[[Task, Rows], dict[str, float]] | None = None,
) -> dict[str, float]:
    """The means, the computed metrics and those by name of one set; the model is in eval mode.

    computed: in place of the task's `compute` and of metrics by name.
    """
    task, backend, inputs = sums.task, sums.backend, sums.inputs
    if inputs.is_mean is None and (backend.world_size > 1 or backend.compiles):
        # Elsewhere rows always divide, and another shape costs nothing.
        _look_at_loss(sums, data, micro_batches[:1], loading)
    if inputs.means if backend.compiles else backend.world_size == 1 or inputs.is_mean:
        # A mean would count filled rows: at most one more program for each shape.
        units = backend.devices if backend.world_size > 1 else 1
        parts = [micro.without_filled_rows(units) for micro in micro_batches]
        micro_batches = list(chain.from_iterable(parts))
    has_rows = overrides(task, "validation_rows") and (bool(names) or overrides(task, "compute"))

    def added(batch: Batch) -> Rows:
        sums.add(batch)
        watch.done("evaluate", shapes_of([batch]))
        if not has_rows:
            return {}
        with torch.no_grad(), backend.autocast():
            found = backend.call(sums.model, task.validation_rows, batch)
        rows = rows_on_host(found, batch, task.validation_rows, backend)
        watch.done("accumulate", shapes_of([batch]))
        return rows

    rows = rows_of_data(task, data, micro_batches, backend, loading, added, sums.inputs.see)
    values = sums.read()
    watch.done("read_evaluation")
    if computed is not None and has_rows:
        return values | computed(task, rows)
    if overrides(task, "compute") and has_rows:
        values |= _computed(task, rows)
    return values | named_metrics(names, rows, task.predicts)


@torch.no_grad()
def _look_at_loss(
    sums: BatchSums, data: SampleSource, first: Sequence[MicroBatch], loading: LoaderSettings
) -> None:
    """A forward pass of the first micro-batch, which shows whether the loss returns means."""
    backend = sums.backend
    shares = [micro.share(backend.rank, backend.world_size) for micro in first]
    for batch in backend.batches(make_loader(sums.task, data, shares, loading)):
        sums.forward(batch, [])


def _computed(task: Task, rows: Rows) -> dict[str, float]:
    found: Mapping[str, Any] = task.compute(rows)
    try:
        return {name: float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise task_mistake(
            task.compute, f"did not return numbers by name: {error}", 'Return {"auc": 0.9}.'
        ) from error


def mean_interval(
    values: NDArray[np.floating[Any]], low: float = -math.inf, high: float = math.inf
) -> list[float] | None:
    """The mean's 95 % interval by Student's t, of independent samples (n,); None for one sample.

    `low` and `high` are the ends of the metric's range. The mean lies within them, so the interval
    is cut there: it covers the mean as often as before.
    """
    from scipy.stats import t as student

    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return None
    half = float(student.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return [max(low, mean - half), min(high, mean + half)]
