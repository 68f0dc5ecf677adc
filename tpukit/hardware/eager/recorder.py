"""What a step on torch_tpu takes and changes, found while its operations are recorded.

torch_tpu 0.2.0 records deferred operations through functions that it calls private;
`torch.compile` uses the same ones.
"""

import gc
import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tpukit.hardware.eager.compiling import uncompiled_passes
from tpukit.hardware.step_programs import NotOneProgramError

GENERATOR: ContextVar[Any] = ContextVar("generator", default=None)
"""The recorded form of the device's generator."""


@dataclass
class Kept:
    """A tensor of the device that a step takes from outside."""

    tensor: Tensor
    before: Tensor
    """Its value from before the step, in memory of its own."""
    number: int
    """The storage that the step finds in it."""
    shared: list[Tensor] = field(default_factory=list)
    """Other tensors over the same memory."""

    def set(self, value: Tensor) -> None:
        for tensor in (self.tensor, *self.shared):
            tensor.data = value

    def send_again(self) -> None:
        """Gives it memory of its own: on the device a clone shares it until one is written."""
        self.before = self.before.cpu().to(self.before.device)
        self.set(self.before)


class Recorder(TorchDispatchMode):
    """Finds what a step takes from outside, and what it changes there, while it is recorded."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.kept: list[Kept] = []
        self.changed: list[Kept] = []
        """Those that the step has written, once it has ended."""
        self.operator = ""
        """The last one."""
        self._own: dict[int, tuple[Any, str]] = {}
        """Storages that the step made, and where; a weak reference keeps its number in use."""
        self._from_before: dict[int, Kept] = {}
        self._written: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operator = str(function)
        args = self._with_constants(function, args, kwargs)
        self.take(t for t in _tensors((args, kwargs)) if t.device.type == self.device.type)
        for tensor in _written_by(function, args, kwargs):
            if not self._is_own(tensor):
                raise NotOneProgramError("it changes a tensor on the host")
            self._written.add(tensor.untyped_storage()._cdata)
        result = function(*args, **kwargs)
        for tensor in _tensors(result):
            self._add(tensor)
        return result

    def _with_constants(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Values that come from the host within the step become constants of the program."""
        aten = torch.ops.aten
        kind, index = self.device.type, int(function is aten.copy_.default)
        if function is aten.lift_fresh.default:
            is_constant = args[0].device.type == kind and not self._is_own(args[0])
        elif function in (aten._to_copy.default, aten.copy_.default):
            target = args[0].device if index else kwargs.get("device") or args[0].device
            is_constant = args[index].device.type == "cpu" and torch.device(target).type == kind
        else:
            return args
        if is_constant:
            constant = _constant(args[index])
            self._add(constant)
            args = (*args[:index], constant, *args[index + 1 :])
        return args

    def _is_own(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._own

    def _add(self, tensor: Tensor) -> None:
        reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        if reference.cdata not in self._own:
            self._own[reference.cdata] = (reference, self.operator)

    def _take(self, tensor: Tensor) -> None:
        """Makes a tensor from outside an argument, in place: what is written is a copy of it."""
        number = tensor.untyped_storage()._cdata
        if number in self._own:
            return
        if not is_computed(tensor):
            # The result of an operator that torch_tpu runs without asking Python.
            self._add(tensor)
            return
        if (known := self._from_before.get(number)) is not None:
            if known.before.shape != tensor.shape or known.before.stride() != tensor.stride():
                raise NotOneProgramError("tensors that outlive it share a part of their memory")
            tensor.data = known.tensor.data
            known.shared.append(tensor)
            return
        if not tensor.is_contiguous():
            raise NotOneProgramError("a tensor that outlives it is not contiguous")
        before = tensor.data
        tensor.data = before.clone()
        self._add(tensor)
        kept = Kept(tensor, before, tensor.untyped_storage()._cdata)
        self.kept.append(kept)
        self._from_before[number] = kept

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Makes arguments of those that are from outside."""
        for tensor in tensors:
            self._take(tensor)

    def restore(self) -> None:
        """Leaves everything as it was."""
        for kept in self.kept:
            kept.set(kept.before)
            kept.tensor.grad = None

    def end(self, returned: Sequence[Tensor]) -> None:
        """Raises where a tensor that the step made lives on: no later step would renew it."""
        gc.collect()
        places = {kept.tensor.untyped_storage()._cdata: kept for kept in self.kept}
        # `tensor.data = ...` is an operation of Python's alone.
        self.changed = [
            kept
            for number, kept in places.items()
            if number in self._written or number != kept.number
        ]
        allowed = places.keys() | {tensor.untyped_storage()._cdata for tensor in returned}
        for number, (reference, operator) in self._own.items():
            if number not in allowed and not reference.expired():
                self.operator = operator
                raise NotOneProgramError("its result is kept for later")


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_flatten(values)[0] if isinstance(value, Tensor))


def _written_by(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[index] if index < len(args) else kwargs.get(argument.name))


# -- torch_tpu's private functions ---------------------------------------------------------------
def _constant(tensor: Tensor) -> Tensor:
    """A host value as a constant of the program that is being recorded."""
    with _executing():
        host = tensor.detach().cpu().contiguous()
    made: Tensor = graphs().make_constant_tensor(host)
    return made


def materialize(tensors: Sequence[Tensor]) -> None:
    """Has values computed: zeros and other constants are made when they are used."""
    synchronize = private("sync").synchronize
    with _executing():
        for tensor in tensors:
            # Of a recording that failed an error may hold results, which nothing can compute.
            with suppress(RuntimeError):
                synchronize([tensor])


def is_computed(tensor: Tensor) -> bool:
    sync = private("sync")
    return bool(sync.is_materialized(tensor) or sync.is_materializing(tensor))


def living(device: torch.device) -> list[Tensor]:
    """Every tensor of the device that Python knows."""
    tensors = (o for o in gc.get_objects() if issubclass(type(o), Tensor))
    return [tensor for tensor in tensors if tensor.device.type == device.type]


def recording_mode() -> Any:
    modes = private("execution_mode")
    return modes.set_eager_mode(modes.EagerMode._INTERNAL_COMPILE_FX_GRAPH)


def _executing() -> Any:
    modes = private("execution_mode")
    return modes.set_eager_mode(modes.EagerMode.DEFER_NEVER)


def graphs() -> Any:
    return private("compile.tpu_torch_compile")


def private(module: str) -> Any:
    return importlib.import_module(f"torch_tpu._internal.{module}")


@contextmanager
def recorded_operations(generator: torch.Generator) -> Iterator[Any]:
    """Operations of this thread are recorded; yields the recorded form of the generator."""
    tpu = graphs()
    recorded = tpu.make_export_mode_device_generator(generator)
    tpu.set_export_mode_default_device_generator(recorded)
    token = GENERATOR.set(recorded)
    # As under `torch.compile`, code that would read values leaves that out.
    torch.compiler._is_compiling_flag = True
    try:
        # The mode is that of one thread; the backward pass has its own.
        with (
            recording_mode(),
            torch.autograd.set_multithreading_enabled(False),
            uncompiled_passes(),
        ):
            yield recorded
    finally:
        torch.compiler._is_compiling_flag = False
        GENERATOR.reset(token)
        tpu.clear_export_mode_default_device_generators()
