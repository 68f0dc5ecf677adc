"""Follows every storage of a traced step from its birth to its death.

A dispatch mode above FakeTensorMode sees each operator once, and a weak reference reports when a
storage dies. Nothing is executed: a fake tensor has a shape and a storage without memory.
"""

import math
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tpukit.hardware.modules import local
from tpukit.io.code_owner import is_model_code

Phase = Literal["build", "forward", "backward", "step", "evaluate"]
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
SCALAR = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default
TO_COPY = torch.ops.aten._to_copy.default
SPARSE = {torch.ops.aten.embedding.default: 4, torch.ops.aten._embedding_bag.default: 5}
"""Operators with a sparse gradient -> the place of the argument that asks for it."""
MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
CUDNN = "cudnn"
CUDNN_BYTES = 256 * 2**20
"""Largest workspace of a convolution that is expected; cuDNN's benchmark may choose more."""
SORTED_BYTES = 48
"""Bytes an index of a gradient that adds up at indices (`index_put_with_sort_kernel`): CUDA sorts
four int64 tensors, and cub takes two more."""
FEW_INDICES, PARTIAL_ROWS = 3072, 10
"""Indices up to which an embedding's gradient is added up in place; of more, how many rows at most
go into a partial sum in fp32 (`embedding_backward_cuda_kernel`)."""
CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})


class SparseGradientError(Exception):
    """A gradient is going to be sparse: the text names its module."""


@dataclass
class Storage:
    """One storage of a trace."""

    size_bytes: int
    kind: str
    """parameters, optimizer, ema, batch, gradients, buckets, gathered, casts, activations,
    temporaries or workspaces."""
    operator: str
    dtype: str
    shape: tuple[int, ...]
    module: str
    """Path of the module whose forward pass made it, layers' numbers as `*`; empty outside."""
    place: str | None
    """`path:line` of the user's code."""


@dataclass
class Trace:
    """Births (the index of a storage) and deaths (its complement, `~index`), in their order."""

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    """Names of moments -> number of events before them."""
    flops: float = 0.0
    bytes_accessed: float = 0.0
    operators: set[str] = field(default_factory=set)
    parameters: int = 0
    """Number of weights of the model."""
    reduced_bytes: int = 0
    """Bytes of gradients that GPUs exchange a step, counted as an all-reduce's."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage."""
        return [min(s.size_bytes, CUDNN_BYTES) if s.operator == CUDNN else s.size_bytes
                for s in self.storages]  # fmt: skip

    def alive_at_peak(self) -> list[int]:
        """The storages that live when their sizes add up to most, in a step or an evaluation."""
        sizes, start = self.sizes, self.marks["step"]
        totals = [*accumulate(sizes[e] if e >= 0 else -sizes[~e] for e in self.events)]
        fullest = totals.index(max(totals[start:]), start)
        return list(alive_after(self.events[: fullest + 1]))


def embedding_workspace(indices: int, rows: int, width: int) -> int:
    """Bytes that the gradient of an embedding (rows, width) takes while it is added up."""
    if indices <= FEW_INDICES:
        return 0
    partial_sums = indices // PARTIAL_ROWS + min(indices, rows)
    return SORTED_BYTES * indices + 4 * width * partial_sums


def alive_after(events: Iterable[int]) -> dict[int, None]:
    """The storages that these events leave alive, in the order of their births."""
    alive: dict[int, None] = {}
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    return alive


class StorageRecorder(TorchDispatchMode):
    """Records the trace of what runs inside."""

    def __init__(self, *, workspaces: bool) -> None:
        """workspaces: of CUDA's libraries too: cuDNN's while a convolution runs, cuBLAS' two."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.workspaces = workspaces
        self.trace = Trace()
        self.phase: Phase = "build"
        self.kind: str | None = None
        """The kind of storages made now; None: by the phase."""
        self.module = ""
        self.operator: Any = None
        """The last one that was called."""
        self.waits = False
        """Whether nothing is recorded now."""
        self._index: dict[int, int] = {}
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on shards come next
        if func is DEVICE:
            return args[0].fake_device  # two of three calls, which make nothing
        self.operator = func
        if func is SCALAR and self.phase in ("build", "step"):
            # An optimizer reads its step's number (at a first one NAdam divides by zero); a scaler
            # whether the gradients are finite.
            return 2.0 if args[0].is_floating_point() else 1
        if self.phase == "forward" and func in SPARSE and any(args[SPARSE[func] :][:1]):
            raise SparseGradientError(f"of `{self.module}`" if self.module else "of a weight")
        result = func(*args, **(kwargs or {}))
        if not self.waits:
            self._see(func, args, kwargs or {}, result)
        return result

    def _see(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        inputs, outputs = list(_tensors((*args, *kwargs.values()))), list(_tensors((result,)))
        if func.namespace in ("c10d", "fsdp"):
            passing = [t for t in inputs if self.kind_of(t) in ("activations", "temporaries")]
            self.claim(passing, "gathered")
        if func.namespace == "c10d" and self.phase in ("forward", "backward") and inputs:
            # An all-reduce is a scatter and a gather.
            moved = max(tensor.nbytes for tensor in inputs)
            is_both = "allreduce" in func._schema.name
            self.trace.reduced_bytes += moved if is_both else moved // 2
        if not outputs:
            return
        name = func._schema.name.partition("::")[2]
        kind = self._kind(func, inputs)
        is_new = [self.add(tensor, name, kind) for tensor in outputs]
        if self.workspaces:
            self._work(name, args, inputs, outputs)
        if self.phase in ("build", "evaluate") or not (any(is_new) or name.endswith("_")):
            return
        self.trace.operators.add(name)
        self.trace.bytes_accessed += sum(t.nbytes for t in (*inputs, *outputs))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.trace.flops += formula(*args, out_val=result)

    def _work(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """What an operator takes while it runs, beside its result."""
        library = "cub"
        if name in CONVOLUTIONS:
            library, size = CUDNN, sum(t.nbytes for t in (*inputs, *outputs))
        elif name.startswith("index_put") and any(args[3:4]):
            size = SORTED_BYTES * max(t.numel() for t in _tensors(args[1]))
        elif name == "gemm_4bit":
            # bitsandbytes unpacks a matrix for the product of many rows.
            library, size = "bitsandbytes", math.prod(args[2]) * args[0].itemsize
        elif name == "embedding_dense_backward":
            size = embedding_workspace(args[1].numel(), *outputs[0].shape)
        else:
            return
        index = self._workspace(library, size)
        self.trace.events += [index, ~index]

    def _workspace(self, library: str, size: int) -> int:
        shape = (min(size, CUDNN_BYTES) if library == CUDNN else size,)
        self.trace.storages.append(Storage(size, "workspaces", library, "uint8", shape, "", None))
        return len(self.trace.storages) - 1

    def _kind(self, func: Any, inputs: list[Tensor]) -> str:
        if self.kind is not None:
            return self.kind
        if func is TO_COPY and self.kind_of(inputs[0]) == "parameters":
            return "casts"
        return "activations" if self.phase == "forward" else "temporaries"

    def add(self, tensor: Tensor, operator: str, kind: str) -> bool:
        """Whether the tensor's storage was not known yet; it is from now on."""
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), storage._cdata
        if not size or key in self._index:
            return False
        index = self._index[key] = len(self.trace.storages)
        place = self._place() if size >= 2**16 else None
        self.trace.storages.append(
            Storage(
                size, kind, operator, str(tensor.dtype)[6:], tuple(tensor.shape), self.module, place
            )
        )
        self.trace.events.append(index)

        def died(reference: Any) -> None:
            del self._alive[id(reference)]
            self._index.pop(key, None)
            self.trace.events.append(~index)

        reference = weakref.ref(storage, died)
        self._alive[id(reference)] = (reference, index)
        return True

    @contextmanager
    def sharding(self) -> Iterator[None]:
        """Follows storages that FSDP empties and fills again, not DTensor's own fake tensors."""
        resize_plainly = torch.UntypedStorage.resize_
        propagate_plainly = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            index = self._index.get(storage._cdata)
            if index is not None and bool(size) != bool(storage.nbytes()):
                self.trace.events.append(index if size else ~index)
            return resize_plainly(storage, size)

        def propagate(propagator: ShardingPropagator, *args: Any) -> Any:
            self.waits = True
            try:
                return propagate_plainly(propagator, *args)
            finally:
                self.waits = False

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize),
            mock.patch.object(ShardingPropagator, propagate_plainly.__name__, propagate),
        ):
            yield

    def claim(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Makes the storages of these tensors of this kind, known or not."""
        for tensor in (local(tensor) for tensor in tensors if tensor is not None):
            if not self.add(tensor, "", kind):
                index = self._index.get(tensor.untyped_storage()._cdata)
                if index is not None:
                    self.trace.storages[index].kind = kind

    def kind_of(self, tensor: Tensor) -> str | None:
        """The kind of a tensor's storage; None where it is not known."""
        index = self._index.get(tensor.untyped_storage()._cdata)
        return None if index is None else self.trace.storages[index].kind

    def mark(self, name: str) -> None:
        """Names this moment."""
        self.trace.marks[name] = len(self.trace.events)

    def end(self, cublas: int) -> None:
        """Orders the deaths between two births: autocast's cache dies in the order of addresses.

        cublas: bytes of its workspace in a thread: the forward's and the backward's have one each.
        """
        events, start = self.trace.events, 0
        for place, event in enumerate([*events, 0]):
            if event >= 0:
                events[start:place] = sorted(events[start:place], reverse=True)
                start = place + 1
        if self.workspaces and MATMULS & self.trace.operators:
            first, second = (self._workspace("cublas", cublas) for _ in range(2))
            start = self.trace.marks["step"]
            events[start:start] = [second, first]

    def of_kind(self, kind: str) -> AbstractContextManager[Any]:
        """Storages made inside are of this kind."""
        return mock.patch.object(self, "kind", kind)

    def _place(self) -> str | None:
        """The innermost line of the user's code that is running."""
        if self.phase in ("build", "step"):
            return None
        frame = sys._getframe(2)
        while frame is not None:
            path = frame.f_code.co_filename
            if is_model_code(path):
                return f"{path}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return None

    @contextmanager
    def modules_of(self, model: nn.Module) -> Iterator[None]:
        """Storages made inside know the module of the model whose forward pass makes them."""
        names = {module: LAYER.sub("*", name) for name, module in model.named_modules()}
        above: list[str] = []

        def enters(module: nn.Module, _: Any) -> None:
            above.append(self.module)
            self.module = names.get(module, self.module)

        def leaves(module: nn.Module, *_: Any) -> None:
            self.module = above.pop()

        hooks = nn.modules.module
        with (
            hooks.register_module_forward_pre_hook(enters),
            hooks.register_module_forward_hook(leaves, always_call=True),
        ):
            yield


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
