"""How a global batch is split over devices and micro-batches, and the memory that decides it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Backend, Batch
from tpukit.hardware.modules import has_batch_norm
from tpukit.io.process import WorkerInit
from tpukit.io.units import format_bytes
from tpukit.io.workers import EndedError, TimedCall
from tpukit.train.task import Task, form_name, forms_of

if TYPE_CHECKING:
    from tpukit.train.config import TrainConfig

Found = TypeVar("Found")

USED_FRACTION = 0.85
"""Part of a device's memory that an estimated step may take."""
ESTIMATE_SECONDS = 180.0
"""Maximum seconds of an estimate; without one a batch is not cut, or its operations unknown."""

Examples = Callable[[int], Sequence[Batch]]
"""This rank's host batches of a number of rows, the costliest first."""


class StepCosts(Protocol):
    """What a step takes of a device, predicted without executing it.

    rows: those of a micro-batch on the device. accumulate: micro-batches of the step.
    """

    def memory_bytes(self, rows: int, accumulate: int, /) -> int:
        """Peak memory."""

    def moved_bytes(self, rows: int, accumulate: int, /) -> float:
        """Bytes that the step's operators read and write."""

    def operations(self, rows: int, /) -> float:
        """Operations of a step of one micro-batch: the products of its passes, none twice."""


PredictCosts = Callable[[Task, "TrainConfig", Backend, Examples], StepCosts]
"""Predicts what a run's steps take of the backend's devices."""


@dataclass(frozen=True)
class BatchSplit:
    """global_batch_size = accumulate x devices x rows_per_device."""

    global_batch_size: int
    devices: int
    accumulate: int
    reason: str = ""
    """Why a step is cut into micro-batches; empty where it is not."""

    @property
    def rows_per_device(self) -> int:
        return self.global_batch_size // (self.devices * self.accumulate)

    @property
    def micro_rows(self) -> int:
        """Rows of one micro-batch over all devices."""
        return self.global_batch_size // self.accumulate

    def describe(self) -> str:
        return (
            f"{self.global_batch_size} = {self.rows_per_device} samples x {self.devices} device(s)"
            f" x {self.accumulate} micro-batch(es)"
        )

    def consequences(self, model: nn.Module) -> str | None:
        """Why a step is cut, and what that changes; None where it is not cut."""
        if self.accumulate == 1:
            return None
        rows = self.rows_per_device * self.devices
        norm = f"BatchNorm normalizes by at most {rows} samples; " * has_batch_norm(model)
        return (
            f"A step of {self.global_batch_size} samples is cut into {self.accumulate}"
            f" micro-batches: {self.reason}. The gradient of a mean over samples stays the same;"
            f" {norm}a loss that compares the samples of a batch sees {rows}, and what it moves (a"
            " queue, an EMA teacher) moves with each: `after_step` is called once a step."
        )


def split_batch(
    global_batch_size: int,
    devices: int,
    accumulate: int | None = None,
    most_rows_per_device: int | None = None,
) -> BatchSplit:
    """The requested split, or the one with the fewest accumulation steps.

    Raises ConfigError naming the nearest sizes that divide.
    """
    if accumulate is not None:
        _require_multiple(global_batch_size, devices * accumulate, devices, accumulate)
        return BatchSplit(global_batch_size, devices, accumulate, f"--accumulate {accumulate}")
    _require_multiple(global_batch_size, devices, devices, 1)
    rows = global_batch_size // devices
    if most_rows_per_device is None or rows <= most_rows_per_device:
        return BatchSplit(global_batch_size, devices, 1)
    fewest = next(n for n in divisors(rows) if rows // n <= most_rows_per_device)
    reason = f"the task's rows_per_device is {most_rows_per_device}"
    return BatchSplit(global_batch_size, devices, fewest, reason)


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _require_multiple(size: int, unit: int, devices: int, accumulate: int) -> None:
    if size % unit == 0:
        return
    below, above = size // unit * unit, (size // unit + 1) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    parts = f"{devices} device(s)" + (
        f" x {accumulate} accumulation steps" if accumulate > 1 else ""
    )
    raise ConfigError(
        f"--global-batch-size {size} does not divide over {parts}.",
        f"The nearest sizes that do: {nearest}.",
    )


# -- memory --------------------------------------------------------------------------------------
def fit_to_memory(
    split: BatchSplit,
    task: Task,
    config: TrainConfig,
    backend: Backend,
    examples: Examples,
    predict: PredictCosts | None,
    *,
    cuts: bool,
    before: str | None,
) -> tuple[Task, BatchSplit, tuple[str, str] | None]:
    """The task's fastest form, and its split with the fewest micro-batches, that the device has the
    memory for, as predicted; the form's name and the reason where the task has several.

    cuts: whether the split may change. before: the name of the form that the run had so far, which
    it keeps. Where the device reports no memory, or the task cannot be traced, the form is the last
    and the split stays. The same in every rank.
    """
    memory, forms = backend.usage().memory, forms_of(task)
    names = [form_name(task, form) for form in forms]
    if before in names:
        forms = [forms[names.index(before)]]
    limit = memory.limit if memory else None
    cuts = cuts and split.rows_per_device > 1
    found = None
    # Rank 0 alone: the others' cores are its own meanwhile.
    traces = backend.is_main and (cuts or len(forms) > 1)
    if predict is not None and limit is not None and traces:

        def costs(form: Task) -> StepCosts:
            return predict(form, config, backend, examples)

        limit_bytes = int(limit * USED_FRACTION)
        decide = partial(_fastest_that_fits, forms, split, costs, limit_bytes, cuts=cuts)
        found = in_worker(decide, late="a step is not cut for lack of memory")()
    found = backend.all_gather_objects(found)[0]
    place, parts, whole = found or (len(forms) - 1, 1, 0)
    chosen, choice = forms[place], None
    if len(names) > 1:
        why = f"estimated for {format_bytes(limit or 0)} of a device"
        why = why if found else "the memory of the device or of the step is not known"
        why = why if len(forms) > 1 else "as the run did before"
        choice = form_name(task, chosen), why
    if parts == 1:
        return chosen, split, choice
    reason = (
        f"{split.rows_per_device} samples a device would take about {format_bytes(whole)} of"
        f" {format_bytes(limit or 0)} (an estimate: `tpukit probe-batch` measures, --accumulate"
        " decides)"
    )
    return chosen, replace(split, accumulate=parts, reason=reason), choice


def sample_operations(
    split: BatchSplit, task: Task, config: TrainConfig, backend: Backend, examples: Examples,
    predict: PredictCosts | None,
) -> Callable[[], float | None]:  # fmt: skip
    """Starts to count the operations of a training step for one sample; the call waits for them.

    None where they are of no use or cannot be traced, where batches differ in shape, and in ranks
    that are not the first.
    """
    rows = split.rows_per_device
    if predict is None or not (backend.is_main and backend.usage().peak_flops):
        return lambda: None

    def traced() -> float | None:
        costs = predict(task, config, backend, examples)
        return costs.operations(rows) / rows if len(examples(rows)) == 1 else None

    return in_worker(traced)


def in_worker(
    decide: Callable[[], Found | None], late: str | None = None
) -> Callable[[], Found | None]:
    """Starts `decide` in a forked process: what models keep of a trace ends with it.

    The call waits for what it gives; None where it raises, is killed or takes too long, and where
    processes are not forked: they would import the task anew. late: what a warning says of one that
    takes too long.
    """
    if multiprocessing.get_start_method() != "fork":
        return lambda: None
    # What a process's first optimizer imports: for the run too, and not once in each worker.
    importlib.import_module("torch._dynamo")
    call = TimedCall(_decided, (decide, WorkerInit()), ESTIMATE_SECONDS, "fork")

    @cache
    def result() -> Found | None:
        found: Found | None = None
        try:
            found = call.wait()
        except TimeoutError:
            if late is not None:
                print(
                    f"Warning: a step's memory was not estimated within {ESTIMATE_SECONDS:.0f} s:"
                    f" {late}; --accumulate N cuts it.",
                    file=sys.stderr,
                    flush=True,
                )
        except EndedError:
            pass
        return found

    return result


def _decided(decide: Callable[[], Any], initialize: WorkerInit) -> Any:
    initialize(0)
    torch.set_num_threads(1)
    # What a task and torch print on tensors without values; the run prints its own.
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with suppress(Exception):  # whatever a user's task raises on tensors without values
        return decide()
    return None


def _fastest_that_fits(
    forms: Sequence[Task], split: BatchSplit, costs_of: Callable[[Task], StepCosts],
    limit_bytes: int, *, cuts: bool,
) -> tuple[int, int, int]:  # fmt: skip
    """The place of the form whose step moves the fewest bytes among those that fit, else of the
    last; the fewest parts of the split's micro-batches in which it fits (1 unless `cuts`); the
    memory in bytes that uncut ones take. What fits whole is faster than the forms after it."""
    rows, fitting, whole = split.rows_per_device, [], 0
    for place, form in enumerate(forms):
        costs = costs_of(form)
        whole = costs.memory_bytes(rows, split.accumulate)
        for parts in divisors(rows) if cuts else [1]:
            if parts < min(whole // limit_bytes, rows) and cuts:
                continue
            cut = rows // parts, split.accumulate * parts
            if whole <= limit_bytes or (parts > 1 and costs.memory_bytes(*cut) <= limit_bytes):
                moved = costs.moved_bytes(*cut) if len(forms) > 1 else 0.0
                fitting.append((moved, place, parts, whole))
                break
        if whole <= limit_bytes:
            break
    return min(fitting, default=(0.0, place, rows if cuts else 1, whole))[1:]
