"""The programs of a step while it is traced: each is executed in a sync's place, and what it takes
and changes is found."""

import gc
import hashlib
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from tpukit.hardware.memory import is_out_of_memory_text
from tpukit.hardware.step_programs import NotOneProgramError
from tpukit.hardware.xla import cached_graphs as graphs

KEPT = "a result is kept for later"
"""Why a step is traced whose Python holds a tensor that it made and does not return."""
CONSTANTS: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Buffers that a recorded program has for itself, by id."""


class GivenPlace(NamedTuple):
    """The place of an argument among the batches' tensors."""

    place: int


class SentPlace(NamedTuple):
    """The place of an argument among what the host sends for each step."""

    place: int


class KeptPlace(NamedTuple):
    """The place of an argument, or of what takes a result, among the tensors that outlive the
    step."""

    place: int


class MadePlace(NamedTuple):
    """The place of an argument among the results of an earlier part."""

    part: int
    place: int


class SeedPlace(NamedTuple):
    """The generator's state after a number of random operators of the part."""

    draws: int


Argument = Tensor | KeptPlace | GivenPlace | SentPlace | MadePlace | SeedPlace
"""A constant, a tensor that outlives the step, or what each step brings."""


@dataclass
class StepPart:
    """One program of a step: what a sync would compile and execute."""

    graph: bytes = b""
    """Its graph's hash."""
    program: bytes = b""
    """That of its program."""
    arguments: list[Argument] = field(default_factory=list)
    results: list[KeptPlace | None] = field(default_factory=list)
    """Which tensors take them."""
    aliases: list[tuple[TensorWeakRef, TensorWeakRef]] = field(default_factory=list)
    """Pairs of tensors that outlive the step and others that shared their buffers."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of the constants."""
    draws: int = 0
    """Number of random operators."""

    def add_aliases(self, tensors: Iterable[Tensor]) -> None:
        """Takes note of tensors that share a buffer."""
        refs = [TensorWeakRef(tensor) for tensor in tensors]
        self.aliases += [(refs[0], other) for other in refs[1:]]

    @property
    def key(self) -> Any:
        """What is equal in two recordings of one step."""
        places = [a if isinstance(a, tuple) else None for a in self.arguments]
        return self.program, places, self.results, self.digests, self.draws


class GraphRecorder:
    """Executes the parts of a traced step."""

    def __init__(
        self, device: str, given: Sequence[Tensor], seed: int, known: Collection[bytes] = ()
    ) -> None:
        """seed: the generator's state at the step's start. known: graphs of an earlier
        recording: its programs are executed where the step is not to be replayed too."""
        torch_xla.sync()  # every tensor has a buffer
        graphs.wait()
        self.device = device
        self.parts: list[StepPart] = []
        self.kept: list[TensorWeakRef] = []
        """The tensors that outlive the step and that a part takes or changes."""
        self._kept_places: dict[int, KeptPlace] = {}
        """The same, by id."""
        self.seed = seed
        self.problem = ""
        """Why this step is not to be replayed."""
        self._given = {id(tensor) for tensor in given}
        self._places: dict[int, GivenPlace | SentPlace] = {}
        self._held: dict[int, list[Tensor]] = {}
        """By handle the tensors that outlive the step."""
        self._seen: dict[int, int] = {}
        """By id their order."""
        self._made: dict[int, tuple[TensorWeakRef, int, int]] = {}
        """By id the results that no tensor from before takes, with part and place."""
        self._made_values: list[tuple[Tensor, MadePlace]] = []
        """Their values, which a later part may take: held, so that none has another handle."""
        self._brought: list[Tensor] = []
        """Buffers of what each step brings: held for the same reason."""
        self._known = known
        self._held_buffers: list[Tensor] = []
        """Those of what outlives the step, in a second recording. In a first one, that is refused,
        another program would be compiled, of results that share nothing."""
        self._has_looked = False
        """Whether it has asked for `buffers` of what outlives the step."""
        self._reads = graphs.read_count()
        self.see(tensor for tensor in living_tensors() if id(tensor) not in CONSTANTS)
        self._brought += graphs.buffers(given)
        for place, handle in enumerate(graphs.handles(given)):
            if handle in self._places or any(
                id(tensor) not in self._given for tensor in self._held.get(handle, ())
            ):
                self.problem = "a tensor of its batch is another one too"
            self._places[handle] = GivenPlace(place)
        # What is there is neither looked at nor collected until the step has ended.
        gc.freeze()
        xm.set_rng_state(seed)

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Takes these for tensors that outlive the step."""
        found = list(tensors)
        waits = graphs.are_pending(found)  # views, made anew when they were looked at
        found = [tensor for tensor, waiting in zip(found, waits, strict=True) if not waiting]
        if self._known:
            self._has_looked = True
            self._held_buffers += graphs.buffers(found)
        for tensor, handle in zip(found, graphs.handles(found), strict=True):
            self._seen.setdefault(id(tensor), len(self._seen))
            holders = self._held.setdefault(handle, [])
            if not any(tensor is each for each in holders):
                holders.append(tensor)

    def send(self, sent: Tensor, place: int) -> None:
        """Takes a tensor for one that the host makes for each step."""
        self._brought += graphs.buffers([sent])
        self._places[graphs.handles([sent])[0]] = SentPlace(place)

    def refuse(self, reason: str) -> None:
        """Keeps the first reason why this step is not to be replayed: what is pending is executed
        as the traced step's program then, without another compilation."""
        self.problem = self.problem or reason

    def end_part(self, returned: Sequence[Any] | None = None) -> None:
        """In a sync's place: executes what is pending, as a part or, where that fails, as ever.

        returned: what the step returns, where it ends here.
        """
        if graphs.read_count() != self._reads:
            self.refuse("it reads values of the device")
        if not self.problem or self._known:
            self._record_part(returned)
        torch_xla.sync()  # moves the generator on; executes what is pending still
        graphs.wait()
        now = xm.get_rng_state()
        draws = graphs.draws_between(self.seed, now, synced=True)
        if draws is None:
            self.refuse("it sets the generator of random numbers")
        elif not self.problem:
            self.parts[-1].draws = draws
        self.seed, self._reads = now, graphs.read_count()
        before, self._held, self._held_buffers = self._held, {}, []
        self.see(tensor for holders in before.values() for tensor in holders)

    def _record_part(self, returned: Sequence[Any] | None) -> None:
        gc.collect()
        try:
            part, groups, values = self._compiled_part(returned)
        except Exception as error:  # whatever a private function does with a graph of its own
            if is_out_of_memory_text(str(error)):
                raise
            self.refuse(str(error).splitlines()[0] if str(error) else type(error).__name__)
            return
        graphs.wait()
        for group, value in zip(groups, graphs.execute(part.program, values), strict=True):
            if id(group[0]) in self._made:
                self._made_values.append((value, MadePlace(*self._made[id(group[0])][1:])))
            for tensor in group:
                graphs.put(tensor, value)
        self.parts.append(part)

    def _compiled_part(
        self, returned: Sequence[Any] | None
    ) -> tuple[StepPart, list[list[Tensor]], list[Tensor]]:
        """A part, its results by torch_xla's number, and the values of its arguments."""
        outliving = {id(tensor) for holders in self._held.values() for tensor in holders}
        groups = self._pending()
        results = [group[0] for group in groups]
        if returned is not None:
            known = outliving | {*map(id, returned)}
            if any(id(tensor) not in known for tensor in results):
                raise NotOneProgramError(KEPT)
        graph = graphs.graph_hash(results)
        if self.problem and graph not in self._known:
            raise NotOneProgramError(self.problem)
        part, values, donated = self._found(results, {id(t) for group in groups for t in group})
        part.graph = graph
        for place, tensor in enumerate(results):
            is_kept = id(tensor) in outliving and id(tensor) not in self._given
            part.results.append(self._keep(tensor) if is_kept else None)
            part.add_aliases(other for other in groups[place] if id(other) in outliving)
            if id(tensor) not in outliving:
                self._made[id(tensor)] = (TensorWeakRef(tensor), len(self.parts), place)
        for value in donated:
            graphs.donate(value, True)
        try:
            part.program = graphs.compiled(results)
        except Exception:
            for value in donated:
                graphs.donate(value, False)
            raise
        return part, groups, values

    def _pending(self) -> list[list[Tensor]]:
        """Results by torch_xla's number, each with its aliases."""
        alive = living_tensors(tensor for holders in self._held.values() for tensor in holders)
        groups: dict[int, list[Tensor]] = {}
        for tensor, waits in zip(alive, graphs.are_pending(alive), strict=True):
            if waits:
                groups.setdefault(graphs.number_of(tensor), []).append(tensor)
        if graphs.pending_count(self.device) != len(groups):
            raise NotOneProgramError("torch_xla holds a result that Python does not know")

        return [sorted(groups[number], key=self._order) for number in sorted(groups)]

    def _order(self, tensor: Tensor) -> Any:
        """Of aliases a parameter comes first, else what was there first."""
        place = self._seen.get(id(tensor), len(self._seen))
        return not isinstance(tensor, nn.Parameter), tensor._is_view(), place

    def _found(
        self, results: Sequence[Tensor], written: set[int]
    ) -> tuple[StepPart, list[Tensor], list[Tensor]]:
        """A part without its program, the values of its arguments, and those to donate."""
        self._has_looked = True
        values, are_seeds = graphs.graph_arguments(results)
        made = graphs.handles([value for value, _ in self._made_values])
        of_made = dict(zip(made, (place for _, place in self._made_values), strict=True))
        part, donated = StepPart(), []
        of_values = zip(values, are_seeds, graphs.handles(values), strict=True)
        for value, is_seed, handle in of_values:
            argument: Argument = value
            if handle in self._places:
                argument = self._places[handle]
            elif is_seed:
                draws = graphs.draws_between(self.seed, int(value.cpu()) % graphs.MODULO)
                if draws is None:
                    raise NotOneProgramError("it sets the generator of random numbers")
                argument = SeedPlace(draws)
            elif handle in self._held:
                holders = sorted(self._held[handle], key=self._order)
                argument = self._keep(holders[0])
                part.add_aliases(holders)
                if all(id(tensor) in written for tensor in holders):
                    donated.append(value)
            elif handle in of_made:
                argument = of_made[handle]
            else:
                CONSTANTS[id(value)] = value
                part.digests.append(_digest(value))
            part.arguments.append(argument)
        return part, values, donated

    def _keep(self, tensor: Tensor) -> KeptPlace:
        """The place of a tensor that outlives the step."""
        place = self._kept_places.setdefault(id(tensor), KeptPlace(len(self.kept)))
        if place.place == len(self.kept):
            self.kept.append(TensorWeakRef(tensor))
        return place

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """The part and the place of a result that the step returns; it is not kept then."""
        _, *place = self._made.pop(id(tensor), (None,))
        return (place[0], place[1]) if place else None

    def keeps_results(self) -> bool:
        """Whether a tensor that the step made, and does not return, lives on."""
        gc.collect()
        return any(made() is not None for made, *_ in self._made.values())

    def leave(self) -> None:
        """Leaves what outlives the step to traced ones, which overwrite it as ever: each tensor
        takes a `buffer` that was asked for it, all in the order of before, which is the graph's."""
        if not self._has_looked:
            return
        groups: list[tuple[int, list[Tensor]]] = []
        for holders in self._held.values():
            numbers = {graphs.number_of(tensor) for tensor in holders}
            if len(numbers) == 1 and not any(id(tensor) in self._given for tensor in holders):
                groups.append((numbers.pop(), holders))
        ordered = [holders for _, holders in sorted(groups, key=lambda group: group[0])]
        values = graphs.buffers([holders[0] for holders in ordered])
        for holders, value in zip(ordered, values, strict=True):
            for tensor in holders:
                graphs.put(tensor, value)

    def close(self) -> None:
        gc.unfreeze()


def living_tensors(known: Iterable[Tensor] = ()) -> list[Tensor]:
    """Tensors that Python's collector, or `known`, has; those within others, which a kernel in
    Python has seen, not."""
    kinds = {kind for kind in {*map(type, gc.get_objects())} if issubclass(kind, Tensor)}
    found = [o for o in gc.get_objects() if type(o) in kinds and o.device.type == "xla"]
    tensors = [*known, *(tensor for tensor in found if torch._is_functional_tensor(tensor))]
    grads = [t.grad for t in tensors if t.requires_grad and t.is_leaf and t.grad is not None]
    return [*{id(t): t for t in (*tensors, *grads)}.values()]


def _digest(value: Tensor) -> bytes:
    host = value.cpu()
    content = host.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{host.dtype} {host.shape}".encode() + content.tobytes()).digest()
