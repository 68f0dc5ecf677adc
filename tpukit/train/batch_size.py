"""How a global batch is split over devices and micro-batches, and the memory that decides it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Backend, Batch, TorchOps
from tpukit.hardware.modules import has_batch_norm, move_tensors
from tpukit.io.process import WorkerInit
from tpukit.io.units import format_bytes
from tpukit.train.task import Task, chosen_settings, forms_of

if TYPE_CHECKING:
    from tpukit.train.config import TrainConfig

Found = TypeVar("Found")

USED_FRACTION = 0.85
"""Part of a device's memory that an estimated step may take."""
ESTIMATE_SECONDS = 60.0
"""Maximum seconds of an estimate; without one a batch is not cut."""

Examples = Callable[[int], Sequence[Batch]]
"""This rank's host batches of a number of rows, the costliest first."""
StepMemory = Callable[[int, int], int]
"""Bytes of a device that a step takes, given the rows of a micro-batch and their number."""


class PredictMemory(Protocol):
    """Predicts the memory of a run's steps on the backend's device, without executing them."""

    def __call__(
        self, task: Task, config: TrainConfig, backend: Backend, examples: Examples, /
    ) -> StepMemory: ...


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
            f" {norm}a loss that compares the samples of a batch sees {rows}."
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
    predict: PredictMemory | None,
    *,
    cuts: bool,
    before: str | None,
) -> tuple[Task, BatchSplit, tuple[str, str] | None]:
    """The task's first form, and its split with the fewest micro-batches, that the device has the
    memory for as predicted; the form's name and the reason where the task has several.

    cuts: whether the split may change. before: the name of the form that the run had so far, which
    it keeps. Where the device reports no memory, or the task cannot be traced, the form is the last
    and the split stays. The same in every rank.
    """
    memory, forms = backend.usage().memory, forms_of(task)
    names = [_name_of(task, form) for form in forms]
    if before in names:
        forms = [forms[names.index(before)]]
    limit = memory.limit if memory else None
    cuts = cuts and split.rows_per_device > 1
    found = None
    if predict is not None and limit is not None and (cuts or len(forms) > 1):

        def needed(form: Task) -> StepMemory:
            return predict(form, config, backend, examples)

        found = _in_worker(
            partial(_first_that_fits, forms, split, needed, int(limit * USED_FRACTION), cuts=cuts)
        )
    found = backend.all_gather_objects(found)[0]
    place, parts, whole = found or (len(forms) - 1, 1, 0)
    chosen, choice = forms[place], None
    if len(names) > 1:
        why = f"estimated for {format_bytes(limit or 0)} of a device"
        why = why if found else "the memory of the device or of the step is not known"
        why = why if len(forms) > 1 else "as the run did before"
        choice = _name_of(task, chosen), why
    if parts == 1:
        return chosen, split, choice
    reason = (
        f"{split.rows_per_device} samples a device would take about {format_bytes(whole)} of"
        f" {format_bytes(limit or 0)} (an estimate: `tpukit probe-batch` measures, --accumulate"
        " decides)"
    )
    return chosen, replace(split, accumulate=parts, reason=reason), choice


def _name_of(task: Task, form: Task) -> str:
    settings = chosen_settings(task, form).items()
    return ", ".join(f"{name} = {value}" for name, value in settings)


def sample_operations(
    split: BatchSplit, task: Task, backend: Backend, examples: Examples
) -> float | None:
    """Operations of a training step for one sample: the products of its passes, none twice.

    None where they are of no use or cannot be traced, or where batches differ in shape. The same
    in every rank.
    """
    found = None
    if backend.is_main and backend.usage().peak_flops is not None:
        found = _in_worker(partial(_traced_operations, task, split.rows_per_device, examples))
    shared: float | None = backend.all_gather_objects(found)[0]
    return shared


def _traced_operations(task: Task, rows: int, examples: Examples) -> float | None:
    hosts = examples(rows)
    if len(hosts) != 1:
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _without_values(task.for_probing(), mode).train()
    # Of attention's forms this one consists of products that are counted.
    with mode, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        batch: Batch = {name: mode.from_tensor(tensor) for name, tensor in hosts[0].items()}
        task.loss(model, batch)["loss"].sum().backward()  # type: ignore[no-untyped-call]
    operations: int = counter.get_total_flops()
    return operations / rows


def _in_worker(decide: Callable[[], Found | None]) -> Found | None:
    """What `decide` gives in a forked process: what models keep of a trace ends with it.

    None where it raises, is killed or takes too long, and where processes are not forked: they
    would import the task anew.
    """
    if multiprocessing.get_start_method() != "fork":
        return None
    receiver, sender = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.Process(target=_send, args=(decide, WorkerInit(), sender), daemon=True)
    worker.start()
    sender.close()
    try:
        found: Found | None = receiver.recv() if receiver.poll(ESTIMATE_SECONDS) else None
    except EOFError:
        found = None
    # A fork of a process with threads may hang, where it ignores a request to end.
    worker.kill()
    worker.join()
    receiver.close()
    return found


def _send(decide: Callable[[], Any], initialize: WorkerInit, sender: Connection) -> None:
    initialize(0)
    torch.set_num_threads(1)
    try:
        found = decide()
    except Exception:  # whatever a user's task raises on tensors without values
        found = None
    sender.send(found)


def _first_that_fits(
    forms: Sequence[Task], split: BatchSplit, memory_of: Callable[[Task], StepMemory],
    limit_bytes: int, *, cuts: bool,
) -> tuple[int, int, int]:  # fmt: skip
    """The place of the first form that fits, else of the last; the fewest parts of the split's
    micro-batches in which it does (1 unless `cuts`); the bytes that uncut ones take."""
    rows = split.rows_per_device
    for place, form in enumerate(forms):
        needed = memory_of(form)
        # A second micro-batch adds to the gradients of the first; more take no more.
        whole = needed(rows, min(split.accumulate, 2))
        if whole <= limit_bytes:
            return place, 1, whole
        for parts in divisors(rows)[1:] if cuts else ():
            if parts >= whole // limit_bytes and needed(rows // parts, 2) <= limit_bytes:
                return place, parts, whole
    return place, rows if cuts else 1, whole


def _without_values(task: Task, mode: FakeTensorMode) -> nn.Module:
    """The task's model with shapes alone; built with values where its constructor reads some."""
    try:
        with mode:
            return task.build_model(TorchOps())
    except Exception:
        model = task.build_model(TorchOps())
    move_tensors(model, mode.from_tensor, mode.from_tensor)
    return model
