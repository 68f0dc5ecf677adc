"""Validation metrics: weighted means, and what a task computes from the rows of a whole set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tpukit.train.loader import make_loader
from tpukit.train.mistakes.returned import task_mistake
from tpukit.train.monitor.compilation_watch import CompilationWatch, shapes_of
from tpukit.train.step import Learner
from tpukit.train.task import MicroBatch, SampleSource, Task

if TYPE_CHECKING:
    from tpukit.train.engine import RunPlan

Rows = dict[str, NDArray[Any]]


def validation_scores(plan: RunPlan, learner: Learner, watch: CompilationWatch) -> dict[str, float]:
    """All validation metrics with the model's present weights, the same on every rank.

    `valid_loss`, or `valid_NAME_loss` where the sets have names.
    """
    found: dict[str, float] = {}
    for name, data in plan.datasets.validation_sets().items():
        values = _evaluate(plan, learner, watch, data)
        values |= plan.task.score(learner.model, learner.backend, data)
        watch.done("score")
        found |= {"_".join(filter(None, ("valid", name, k))): v for k, v in values.items()}
    # What a task computes may depend on its rank: every rank must take the same decisions.
    return learner.backend.all_gather_objects(found)[0]  # type: ignore[no-any-return]


def _evaluate(
    plan: RunPlan, learner: Learner, watch: CompilationWatch, data: SampleSource
) -> dict[str, float]:
    """The metrics of one set but for the task's `score`."""
    task, backend = plan.task, learner.backend
    micro_batches = list(task.evaluation_batches(data, plan.settings))
    shares = [micro.share(backend.rank, backend.world_size) for micro in micro_batches]
    # No new processes in the middle of a run: a fork beside the threads that write a checkpoint
    # or talk to other ranks can hang. Batches are made on the backend's own thread instead.
    loader = make_loader(task, data, shares, replace(plan.loading, workers=0))
    accumulates = type(task).accumulate is not Task.accumulate
    parts: list[Rows] = []
    learner.model.eval()
    for batch in backend.batches(loader):
        learner.evaluation_step(batch)
        watch.done("evaluate", shapes_of([batch]))
        if accumulates:
            parts.append(learner.rows_of(batch))
            watch.done("accumulate", shapes_of([batch]))
    learner.model.train()
    values = learner.read_evaluation()
    watch.done("read_evaluation")
    if accumulates:
        rows = in_data_order(backend.all_gather_objects(parts), micro_batches)
        values |= _computed(task, rows)
    return values


def in_data_order(parts: Sequence[Sequence[Rows]], micro_batches: Sequence[MicroBatch]) -> Rows:
    """The ranks' parts of each batch as rows of the whole set, without masked and filled ones."""
    # One batch is the ranks' parts one after the other; filled rows come last.
    whole = [
        {name: np.concatenate([part[name] for part in ranks])[: len(micro.keys)]
         for name in ranks[0]}
        for ranks, micro in zip(zip(*parts, strict=True), micro_batches, strict=True)
    ]  # fmt: skip
    rows = {name: np.concatenate([batch[name] for batch in whole]) for name in whole[0]}
    samples = np.array([key.sample for micro in micro_batches for key in micro.keys])
    order = np.argsort(samples, kind="stable")
    kept = order[rows.pop("mask")[order] > 0]
    return {name: values[kept] for name, values in rows.items()}


def _computed(task: Task, rows: Rows) -> dict[str, float]:
    found: Mapping[str, Any] = task.compute(rows)
    try:
        return {name: float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise task_mistake(
            task.compute, f"did not return numbers by name: {error}", 'Return {"auc": 0.9}.'
        ) from error
