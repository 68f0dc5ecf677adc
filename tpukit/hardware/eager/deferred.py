"""Models whose large tensors are made later, one at a time: no host holds all of them at once."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tpukit.hardware.modules import is_made_later

LEAST_VALUES = 2**16
"""Number of values from which on a tensor is made later."""
DRAWING = {
    "normal_", "uniform_", "rand", "randn", "randint", "randperm", "random_", "bernoulli_",
    "exponential_", "log_normal_", "cauchy_", "geometric_",
}  # fmt: skip
"""Operators that draw as many numbers whatever the values of their tensors are."""
TRUNC_NORMAL = "_no_grad_trunc_normal_"
"""Function of `nn.init` that is kept as one call: it draws until all values lie between bounds."""
OVERWRITING = DRAWING | {"copy_", "zero_", "fill_"}
"""Operators whose result does not depend on what their first tensor held."""


class CannotDeferError(Exception):
    """The model has to be made at once."""


@dataclass(frozen=True)
class Ref:
    """A tensor that is made later: a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Ref":
        return cls(
            tensor.untyped_storage()._cdata, tensor.dtype, tuple(tensor.shape), tensor.stride(),
            int(tensor.storage_offset()),
        )  # fmt: skip

    def within(self, storage: torch.UntypedStorage) -> Tensor:
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(storage, self.offset, self.size, self.stride)

    @property
    def nbytes(self) -> int:
        """Of the storage, as far as it reaches."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class _Call:
    """An operator's call, of which `Ref` stands for the tensors that are made later."""

    function: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    state: Tensor | None
    """State of the generator that it draws from, before it."""
    results: Sequence[Ref]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: int | None
    """The storage that it fills, whatever was in it."""

    @property
    def generator(self) -> torch.Generator:
        return self.named.get("generator") or torch.default_generator


class Deferred(TorchDispatchMode):
    """Within it large tensors of the CPU have no storage, and each call on them is kept.

    Numbers are drawn from the generators as without it: `value` makes the very bits.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._writers = defaultdict[int, list[int]](list)
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Those that are made later, kept so that no other one has their address."""
        self._scratch = torch.empty(0).untyped_storage()
        self._versions: list[tuple[Tensor, int]] = []
        """Tensors that calls read, and the number of writes to each by then."""

    def holds(self, tensor: Tensor) -> bool:
        return is_made_later(tensor) and tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(map(self.holds, given)):
            return self._record(func, args, kwargs)
        if given or torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return func(*args, **kwargs)
        if not any(argument.name == "device" for argument in func._schema.arguments):
            return func(*args, **kwargs)
        shape = func(*args, **{**kwargs, "device": "meta"})
        if not isinstance(shape, Tensor) or shape.numel() < LEAST_VALUES:
            return func(*args, **kwargs)
        # The default may be another one when it is made.
        return self._record(func, args, {**kwargs, "dtype": shape.dtype})

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.partition("::")[2]
        on_meta = tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), (args, kwargs))
        if any(argument.name == "device" for argument in func._schema.arguments):
            on_meta[1]["device"] = "meta"
        known = set(self._storages)
        results = func(*on_meta[0], **on_meta[1])
        made = [each for each in tree_leaves(results) if isinstance(each, Tensor)]
        self._storages |= {t.untyped_storage()._cdata: t.untyped_storage() for t in made}
        refs = [Ref.of(tensor) for tensor in made]
        writes = {Ref.of(t).storage for t in self._written(func, args, kwargs)}
        new = {ref.storage for ref in refs} - known
        if not writes and not new:
            return results  # a view
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and name not in DRAWING:
            raise CannotDeferError(f"{name} draws as its tensors' values decide")
        kept = tree_map_only(Tensor, self._kept, (args, kwargs))
        reads = {each.storage for each in tree_leaves(kept) if isinstance(each, Ref)}
        first = kept[0][0] if kept[0] else None
        whole = isinstance(first, Ref) and name in OVERWRITING and self._is_whole(first)
        call = _Call(
            func, kept[0], kept[1], None, refs, frozenset(reads), frozenset(writes | new),
            first.storage if isinstance(first, Ref) and whole else None,
        )  # fmt: skip
        if draws:
            call = replace(call, state=call.generator.get_state())
            _run(call, self._unfilled)
        for storage in call.writes:
            self._writers[storage].append(len(self._calls))
        self._calls.append(call)
        return results

    def fill(
        self, function: Callable[..., Tensor], tensor: Tensor, *args: Any, **named: Any
    ) -> Tensor:
        """Keeps a call that draws the whole of a tensor's values."""
        ref = Ref.of(tensor)
        state = (named.get("generator") or torch.default_generator).get_state()
        whole = ref.storage if self._is_whole(ref) else None
        touched = frozenset({ref.storage})
        call = _Call(function, (ref, *args), named, state, [ref], touched, touched, whole)
        with _disable_current_modes():
            _run(call, self._unfilled)
        self._writers[ref.storage].append(len(self._calls))
        self._calls.append(call)
        return tensor

    def _unfilled(self, ref: Ref) -> Tensor:
        # One for all: new ones would leave holes between what is kept.
        if self._scratch.nbytes() < ref.nbytes:
            self._scratch = torch.empty(ref.nbytes, dtype=torch.uint8).untyped_storage()
        return ref.within(self._scratch)

    @staticmethod
    def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))

    def _kept(self, tensor: Tensor) -> Any:
        if self.holds(tensor):
            return Ref.of(tensor)
        if tensor.numel() < LEAST_VALUES:
            return tensor.detach().clone()
        self._versions.append((tensor, tensor._version))
        return tensor

    def _is_whole(self, ref: Ref) -> bool:
        size = self._storages[ref.storage].nbytes()
        return torch.Size(ref.size).numel() * ref.dtype.itemsize == size

    # -- making ------------------------------------------------------------------------------------
    def value(self, tensor: Tensor) -> Tensor:
        """What a tensor holds that has no storage; memory of its own."""
        if any(read._version != version for read, version in self._versions):
            raise CannotDeferError("a tensor that the model was made from has changed since")
        ref = Ref.of(tensor)
        storages: dict[int, torch.UntypedStorage] = {}
        calls = [self._calls[i] for i in sorted(self._needed(ref.storage, len(self._calls)))]
        generators = {call.generator for call in calls if call.state is not None}
        states = [(generator, generator.get_state()) for generator in generators]
        for call in calls:
            made = _run(call, lambda each: each.within(storages[each.storage]))
            for result, found in zip(call.results, made, strict=True):
                if found.stride() != result.stride or found.shape != result.size:
                    raise CannotDeferError(f"{call.function} laid its result out otherwise")
                storages.setdefault(result.storage, found.untyped_storage())
        for generator, state in states:
            generator.set_state(state)
        return ref.within(storages[ref.storage])

    def _needed(self, storage: int, before: int) -> set[int]:
        """The calls that decide what a storage holds before one of that number."""
        found, waiting = set[int](), [(storage, before)]
        while waiting:
            storage, before = waiting.pop()
            for index in reversed(self._writers[storage]):
                if index >= before:
                    continue
                overwrites = self._calls[index].overwrites == storage
                # An overwritten one is made by its first call.
                for each in {index, self._writers[storage][0]} if overwrites else {index}:
                    if each not in found:
                        found.add(each)
                        reads = self._calls[each].reads - {storage}
                        waiting += [(read, each) for read in reads]
                if overwrites:
                    break
        return found


class AsMade(TorchFunctionMode):
    """Answers for tensors that are made later what those that are made at once answer: functions of
    `nn.init` and peft leave one out that is on the meta device."""

    def __init__(self, mode: Deferred) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        answer = next((found for asked, found in ANSWERS if func == asked), None)
        if answer is not None and self.mode.holds(args[0]):
            return answer
        return func(*args, **(kwargs or {}))


ANSWERS: list[tuple[Any, Any]] = [
    (Tensor.is_meta.__get__, False),  # type: ignore[attr-defined]
    (Tensor.is_cpu.__get__, True),  # type: ignore[attr-defined]
    (Tensor.device.__get__, torch.device("cpu")),
]


def _run(call: _Call, real: Callable[[Ref], Tensor]) -> list[Tensor]:
    if call.state is not None:
        call.generator.set_state(call.state)
    args, kwargs = tree_map_only(Ref, real, (call.arguments, call.named))
    with torch.no_grad():
        results = call.function(*args, **kwargs)
    return [each for each in tree_leaves(results) if isinstance(each, Tensor)]


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if n not in ("_parameters", "_buffers")}


def deferred(make: Callable[[], nn.Module]) -> tuple[nn.Module, Deferred | None]:
    """A model whose large tensors are made later, and what makes them; None: it has them all.

    Raises what `make` raises without it.
    """
    mode = Deferred()

    def refuse(_: threading.Thread) -> None:
        raise CannotDeferError("another thread's calls are not seen")

    def fill(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        if mode.holds(tensor):
            return mode.fill(draw, tensor, *args, **named)
        return draw(tensor, *args, **named)  # type: ignore[no-any-return]

    try:
        draw = getattr(nn.init, TRUNC_NORMAL)  # all are made at once where a torch has none
        with (
            mode, AsMade(mode), mock.patch.object(nn.init, TRUNC_NORMAL, fill),
            mock.patch.object(threading.Thread, "start", refuse),
        ):  # fmt: skip
            model = make()
        tensors = [*model.parameters(), *model.buffers()]
        attributes = tree_leaves([_attributes(module) for module in model.modules()])
        if all(not tensor.is_meta or mode.holds(tensor) for tensor in tensors) and not any(
            isinstance(each, Tensor) and each.is_meta for each in attributes
        ):
            return model, mode
    except Exception:  # whatever a constructor does with a tensor without values
        pass
    return make(), None
