"""How a global batch is split over devices and micro-batches, and the memory that decides it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Backend, Batch, ModelOps, TorchOps
from tpukit.hardware.modules import has_batch_norm
from tpukit.hardware.options import Precision
from tpukit.io.process import WorkerInit
from tpukit.io.units import format_bytes
from tpukit.train.task import Task, form_name, forms_of

if TYPE_CHECKING:
    from tpukit.train.config import TrainConfig

Found = TypeVar("Found")

USED_FRACTION = 0.85
"""Part of a device's memory that an estimated step may take."""
ESTIMATE_SECONDS = 60.0
"""Maximum seconds of an estimate; without one a batch is not cut."""
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    examples: Callable[[int], Sequence[Batch]],
    *,
    cuts: bool,
    before: str | None,
) -> tuple[Task, BatchSplit, tuple[str, str] | None]:
    """The task's fastest form, and its split with the fewest micro-batches, that the device has the
    memory for, by estimates; the form's name and the reason where the task has several.

    examples: this rank's host batches of a number of rows, the costliest first. cuts: whether the
    split may change. before: the name of the form that the run had so far, which it keeps. Where
    the device reports no memory, or the task cannot be traced, the form is the last and the split
    stays. The same in every rank.
    """
    memory, forms = backend.usage().memory, forms_of(task)
    names = [form_name(task, form) for form in forms]
    if before in names:
        forms = [forms[names.index(before)]]
    limit = memory.limit if memory else None
    cuts = cuts and split.rows_per_device > 1
    found = None
    if limit is not None and (cuts or len(forms) > 1):
        decide = partial(
            _fastest_that_fits, forms, split.rows_per_device if cuts else 1,
            lambda parts: examples(split.rows_per_device // parts), backend.precision,
            int(limit * USED_FRACTION), 3 + (config.ema_decay is not None),
            TracedOps(recomputes=_recomputes(backend)),
        )  # fmt: skip
        found = _in_worker(decide)
    found = backend.all_gather_objects(found)[0]
    place, accumulate, needed = found or (len(forms) - 1, 1, 0)
    chosen, choice = forms[place], None
    if len(names) > 1:
        why = f"estimated for {format_bytes(limit or 0)} of a device"
        why = why if found else "the memory of the device or of the step is not known"
        why = why if len(forms) > 1 else "as the run did before"
        choice = form_name(task, chosen), why
    if accumulate == 1:
        return chosen, split, choice
    reason = (
        f"{split.rows_per_device} samples a device would take about {format_bytes(needed)} of"
        f" {format_bytes(limit or 0)} (an estimate: `tpukit probe-batch` measures, --accumulate"
        " decides)"
    )
    return chosen, replace(split, accumulate=accumulate, reason=reason), choice


def sample_operations(
    split: BatchSplit, task: Task, backend: Backend, examples: Callable[[int], Sequence[Batch]]
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


def _traced_operations(
    task: Task, rows: int, examples: Callable[[int], Sequence[Batch]]
) -> float | None:
    hosts = examples(rows)
    if len(hosts) != 1:
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _without_values(task.for_probing(), TorchOps(), mode).train()
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


def _fastest_that_fits(
    forms: Sequence[Task],
    most: int,
    examples: Callable[[int], Sequence[Batch]],
    precision: Precision,
    limit_bytes: int,
    copies: int,
    ops: TracedOps,
) -> tuple[int, int, int]:
    """The place of the form whose step moves the fewest bytes among those that fit, else of the
    last; the fewest micro-batches, `most` at most, in which it fits; the memory in bytes that one
    alone would take. What fits whole is faster than the forms after it.

    examples: the batches of a part of the step, given the number of parts.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def needed(form: Task, model: nn.Module, parts: int) -> tuple[int, int]:
        host, traffic = examples(parts)[0], Traffic(ops)
        batch: Batch = {name: mode.from_tensor(tensor) for name, tensor in host.items()}
        loss = partial(form.loss, model)
        with mode, traffic if len(forms) > 1 else nullcontext():
            used = traced_bytes(model, loss, batch, precision, copies, ops)
        return used, parts * traffic.bytes

    fitting = []
    for place, form in enumerate(forms):
        model = _without_values(form.for_probing(), ops, mode).train()
        whole, moved = needed(form, model, 1)
        used = whole
        for parts in divisors(most):
            if parts > 1 and parts >= whole // limit_bytes:
                used, moved = needed(form, model, parts)
            if used <= limit_bytes:
                fitting.append((moved, place, parts, whole))
                break
        if used <= limit_bytes and parts == 1:
            break
    return min(fitting, default=(0, place, most, whole))[1:]


def _recomputes(backend: Backend) -> bool:
    """Whether the backend recomputes activations where a model asks for it: a CPU need not."""
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * 2

    if not backend.compiles_everything:
        backend.recompute(count, torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    return calls != 1


class TracedOps(TorchOps):
    """Recomputed functions keep their inputs alone; the backward pass holds the tensors of one of
    them at a time."""

    def __init__(self, *, recomputes: bool = True) -> None:
        self.recomputes = recomputes
        self.inputs: list[Tensor] = []
        self.largest_bytes = 0
        self.passes = 3
        """How many times a step computes what runs now, its gradient counted as two."""

    def recompute(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        if not self.recomputes:
            return super().recompute(function, *tensors)
        self.inputs += tensors
        saved = SavedTensors()
        self.passes += 1
        with saved:
            result = function(*tensors)
        self.passes -= 1
        self.largest_bytes = max(self.largest_bytes, sum(saved.sizes()))
        return result


class Traffic(TorchDispatchMode):
    """Bytes that the operators of a forward pass and its backward pass move, by those of the
    forward pass."""

    def __init__(self, ops: TracedOps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = ops
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.bytes += self.ops.passes * sum(t.nbytes for t in tensors)
        return result


class SavedTensors(saved_tensors_hooks):
    """The tensors that operations within the context save for the backward pass."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__(self.add, lambda tensor: tensor)
        self._known = {_storage(tensor) for tensor in known}
        self._tensors: dict[int, Tensor] = {}

    def add(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._known:
            self._tensors.setdefault(storage, tensor)
        return tensor

    def sizes(self) -> list[int]:
        """Bytes of each; views of one memory count once."""
        return [tensor.untyped_storage().nbytes() for tensor in self._tensors.values()]


def _without_values(task: Task, ops: ModelOps, mode: FakeTensorMode) -> nn.Module:
    """The task's model with shapes alone; built with values where its constructor reads some."""
    try:
        with mode:
            return task.build_model(ops)
    except Exception:
        model = task.build_model(ops)
    shapes: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = shapes.setdefault(id(tensor), mode.from_tensor(tensor))
                    tensors[name] = fake
    return model


def traced_bytes(
    model: nn.Module,
    loss: Callable[[Batch], dict[str, Tensor]],
    batch: Batch,
    precision: Precision,
    copies: int,
    ops: TracedOps,
) -> int:
    """Estimated peak memory of a forward and backward pass, in bytes.

    The weights, `copies` more of the trained ones (gradients, moments, EMA), the batch, what the
    forward pass saves for the backward pass, what is recomputed at a time, and twice the largest
    saved tensor.
    """
    parameters = list(model.parameters())
    half = HALVES.get(precision)
    saved = SavedTensors((*parameters, *model.buffers()))
    ops.inputs, ops.largest_bytes = [], 0
    with saved:
        with torch.autocast("cpu", dtype=half) if half else nullcontext():
            outputs = loss(batch)
        for tensor in ops.inputs:
            saved.add(tensor)
        sizes = saved.sizes()
    del outputs
    weights = sum(p.nbytes for p in parameters)
    trained = sum(4 * p.numel() for p in parameters if p.requires_grad)
    # Those in half precision have gradients like them, and master copies in place of fp32 ones.
    weights += sum(p.nbytes for p in parameters if p.requires_grad and p.dtype != torch.float32)
    inputs = sum(tensor.nbytes for tensor in batch.values())
    passing = ops.largest_bytes + 2 * max(sizes, default=0)
    return weights + copies * trained + inputs + sum(sizes) + passing


def _storage(tensor: Tensor) -> int:
    """Identifies the memory that a tensor and its views share."""
    return int(tensor.untyped_storage()._cdata)
