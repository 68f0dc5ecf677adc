"""A step on torch_xla: traced and recorded twice for each shape, then executed without tracing."""

import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import TensorWeakRef

from tpukit.hardware.python_state import PythonState
from tpukit.hardware.step_programs import (
    MOST_CHANGES,
    StepCall,
    StepPrograms,
    host_state,
    place_in,
)
from tpukit.hardware.xla import cached_graphs as graphs
from tpukit.hardware.xla.recorder import (
    KEPT,
    Argument,
    GivenPlace,
    GraphRecorder,
    KeptPlace,
    MadePlace,
    SeedPlace,
    StepPart,
)

MOST_FAILURES = 2
"""Number of recordings in a row that may find that the step cannot be replayed: a cache may be
filled in the first."""
MOST_RECORDINGS = 12
"""Maximum number of recordings, and one more for each `STEPS_A_RECORDING` steps that ran: each
costs about as much as tracing two."""
STEPS_A_RECORDING = 20


class Number(float):
    """A number of a step, with its place among them: what is computed from it has none."""

    place: int


@dataclass
class RecordedStep:
    """A step as it was recorded."""

    state: PythonState
    """What its Python read then."""
    parts: list[StepPart] = field(default_factory=list)
    kept: list[TensorWeakRef] = field(default_factory=list)
    """The tensors that outlive the step, each once."""
    sent: list[tuple[int, Callable[[float], Tensor]]] = field(default_factory=list)
    """What the host computes for each step, and from which number."""
    actions: list[Callable[[], None]] = field(default_factory=list)
    """What it does after each."""
    returned: tuple[list[Any], Any] = ((), None)  # type: ignore[assignment]
    """What the step returns, flattened: a part and a place among its results for a tensor."""
    problem: str = ""
    """Why it is not to be replayed."""
    last_problem: str = ""
    """The same of the last recording."""
    stale: str = ""
    """What was found to have changed when it was about to run."""
    is_proven: bool = False
    changes: int = 0
    failures: int = 0
    recordings: int = 1
    executed: int = 0
    forms: list[Any] = field(default_factory=list)
    """Shapes, types and shardings of the tensors that outlive it."""

    def __post_init__(self) -> None:
        # The step has run: what it removed is found before the next one.
        self.forms = _forms([tensor for ref in self.kept if (tensor := ref()) is not None])

    @property
    def key(self) -> Any:
        leaves, structure = self.returned
        numbers = [place for place, _ in self.sent]
        kept = [id(ref()) for ref in self.kept]
        return [part.key for part in self.parts], kept, numbers, leaves, structure

    def change(self) -> str | None:
        """What has changed since it was recorded; None where it can run."""
        if self.problem or self.stale:
            return self.stale or None
        try:
            if _forms(self.tensors()) != self.forms:
                return "the shape, type or sharding of a tensor"
        except graphs.StaleProgramError as error:
            return str(error)
        return self.state.change()

    def tensors(self) -> list[Tensor]:
        """`kept` themselves. Raises StaleProgramError where one was removed."""
        found = [tensor for ref in self.kept if (tensor := ref.ref()) is not None]
        if len(found) < len(self.kept):
            raise graphs.StaleProgramError("a tensor that it used was removed")
        for tensor in found:
            tensor._fix_weakref()  # type: ignore[attr-defined]  # as a call of each reference does
        return found

    def require_own_buffers(self, tensors: Sequence[Tensor]) -> None:
        """Raises StaleProgramError where tensors share a buffer that had their own, or no longer
        do: one of them may be written. Views that are to be made anew have none."""
        pairs = [(first(), other()) for part in self.parts for first, other in part.aliases]
        sharing = [t for one, other in pairs if one is not None and other is not None
                   for t in (one, other)]  # fmt: skip
        found = [*tensors, *sharing]
        if not any(graphs.are_pending(found)):
            numbers = graphs.handles(found)
            own, shared = numbers[: len(tensors)], numbers[len(tensors) :]
            if len({*own}) == len(own) and shared[::2] == shared[1::2]:
                return
        raise graphs.StaleProgramError("what shares a buffer")


def _forms(tensors: Sequence[Tensor]) -> list[Any]:
    return [[*map(attrgetter("shape", "dtype"), tensors)], graphs.shardings(tensors)]


class XlaPrograms(StepPrograms[RecordedStep]):
    """The steps of a backend. What is traced is executed as the same program, so that a recorded
    step and a traced one are equal bit for bit."""

    def __init__(
        self, device: str, send: Callable[[Tensor], Tensor], say: Callable[[str], None]
    ) -> None:
        super().__init__(say)
        self.device = device
        self.send = send
        self.recorder: GraphRecorder | None = None
        self.has_executed = False
        """Whether the last step has run: the others wait for a sync."""
        self._seed = 0
        """The generator's state at its start."""
        self._sent: list[tuple[int, Callable[[float], Tensor]]] = []
        self._actions: list[Callable[[], None]] = []

    def run(self, step: StepCall) -> Any:
        self.has_executed = False
        self._seed = xm.get_rng_state()
        if graphs.pending_count(self.device):
            # From buffers that are about to be overwritten; and a traced step's graph is its own.
            torch_xla.sync()
            xm.set_rng_state(self._seed)
        try:
            return super().run(step)
        except graphs.StaleProgramError as error:
            self.executed -= 1
            known = self._known[step.owner][self.key_of(step)]
            assert known is not None
            known.stale = str(error)
            return super().run(step)

    def key_of(self, step: StepCall) -> Any:
        # A result that a step is given may be split over the devices, or not.
        return step.key, tuple(graphs.shardings(step.given))

    def host_value(self, make: Callable[[float], Tensor], number: float) -> Tensor:
        """`make(number)` on the device; of a recorded step anew in each."""
        sent = self.send(make(number))
        if self.recorder is not None and isinstance(number, Number):
            self.recorder.send(sent, len(self._sent))
            self._sent.append((number.place, make))
        return sent

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that outlive the step that is being recorded, and were made in it."""
        if self.recorder is not None:
            graphs.wait()
            self.recorder.see(tensors)

    def refuse(self, reason: str) -> None:
        """Says why the step that is being recorded is not to be replayed."""
        if self.recorder is not None:
            self.recorder.refuse(reason)

    def on_host(self, action: Callable[[], None]) -> None:
        """Does what the host does after each step of this kind."""
        action()
        self._actions.append(action)

    def record(
        self, step: StepCall, known: RecordedStep | None, change: str | None
    ) -> tuple[RecordedStep | None, Any]:
        if known is not None and (reason := _reason_to_trace(known, change)):
            self.say(f"a step is traced each time: {reason}")
            xm.set_rng_state(self._seed)
            return None, step()
        numbered = replace(step, numbers=_numbered(step.numbers))
        before, drawn, modules = PythonState(step.owner), host_state(), len(sys.modules)
        self._sent, self._actions = [], []
        compiled = {part.graph for part in known.parts} if known else set()
        found = self.recorder = GraphRecorder(self.device, step.given, self._seed, compiled)
        watch = ReadWatch() if known is not None and known.problem else None
        try:
            with watch or nullcontext():
                returned = numbered()
            torch.clear_autocast_cache()
            problem = _problem_in_python(before, drawn)
            # A module may draw when it is imported, as jax does where a sharding has a gradient.
            draws_once = host_state() == drawn or len(sys.modules) > modules
            is_once = known is None and draws_once and before.changes_once()
            if problem and not is_once:
                found.refuse(problem)
            leaves, structure = tree_flatten(returned)
            found.end_part(leaves)
            if problem:
                found.refuse(problem)
            places = self._places(found, leaves)
            found.leave()
        finally:
            self.recorder = None
            found.close()
        self.has_executed = True
        if found.problem and watch is not None:
            found.problem += watch.place
        parts, kept = ([], []) if found.problem else (found.parts, found.kept)
        returns = places, structure
        made = RecordedStep(before, parts, kept, self._sent, self._actions, returns, found.problem)
        return self._after(made, known, change), returned

    def _places(self, found: GraphRecorder, leaves: Sequence[Any]) -> list[Any]:
        """What a step returns as `RecordedStep.returned` has it."""
        places = [found.place_of(x) if isinstance(x, Tensor) else x for x in leaves]
        if any(isinstance(x, Tensor) and p is None for x, p in zip(leaves, places, strict=True)):
            found.refuse("it returns a tensor that it did not compute")
        if not found.problem and found.keeps_results():
            found.refuse(KEPT)
        return places

    def _after(
        self, made: RecordedStep, known: RecordedStep | None, change: str | None
    ) -> RecordedStep:
        """The program to keep after a recording."""
        if known is None:
            made.failures = int(bool(made.problem))
            return made
        if known.is_proven and made.problem:
            # The step has perhaps put back itself what was changed before it.
            known.failures, known.recordings = known.failures + 1, known.recordings + 1
            known.last_problem = made.problem
            return known
        made.changes, made.executed = known.changes, known.executed
        made.recordings = known.recordings + 1
        both = not made.problem and not known.problem
        made.is_proven = both and made.key == known.key
        differs = both and not made.is_proven and not change
        made.failures = known.failures + 1 if made.problem or differs else 0
        return made

    def execute(self, program: RecordedStep, step: StepCall) -> Any:
        seed = self._seed
        kept = program.tensors()
        sent = [self.send(make(float(step.numbers[place]))) for place, make in program.sent]
        results: list[list[Tensor]] = []

        def brought(argument: Argument) -> Tensor:
            if isinstance(argument, Tensor):
                return argument
            if isinstance(argument, SeedPlace):
                return graphs.seed_on(self.device, graphs.after_draws(seed, argument.draws))
            if isinstance(argument, MadePlace):
                return results[argument.part][argument.place]
            return (step.given if isinstance(argument, GivenPlace) else sent)[argument.place]

        for part in program.parts:
            # Nearly all are kept: hundreds, looked at in each step.
            arguments = [kept[each.place] if type(each) is KeptPlace else brought(each)
                         for each in part.arguments]  # fmt: skip
            graphs.wait()
            if not results:
                program.require_own_buffers(kept)
            results.append(graphs.execute(part.program, arguments))
            for result, value in zip(part.results, results[-1], strict=True):
                if result is not None:
                    graphs.put(kept[result.place], value)
            seed = graphs.after_sync(graphs.after_draws(seed, part.draws))
        xm.set_rng_state(seed)
        for action in program.actions:
            action()
        self.has_executed = True
        program.executed, program.failures = program.executed + 1, 0
        places, structure = program.returned
        leaves = [results[p[0]][p[1]] if isinstance(p, tuple) else p for p in places]
        return tree_unflatten(leaves, structure)


def _problem_in_python(before: PythonState, drawn: bytes) -> str:
    """Why a step is not to be replayed by what its Python did; empty where it may be."""
    if host_state() != drawn:
        return "it draws from a random generator of the host"
    changed = before.change(within=True)
    return f"it changes {changed}, which no program does" if changed else ""


def _reason_to_trace(known: RecordedStep, change: str | None) -> str | None:
    """Why a step is not recorded once more."""
    if known.failures >= MOST_FAILURES:
        return known.problem or known.last_problem or "it is another program each time"
    if known.changes > MOST_CHANGES:
        return f"{change} changes before each call"
    if known.recordings >= MOST_RECORDINGS + known.executed // STEPS_A_RECORDING:
        return f"{change or 'what it computes'} changes too often"
    return None


def _numbered(numbers: Sequence[float | Tensor]) -> list[Number]:
    found = [Number(number) for number in numbers]
    for place, number in enumerate(found):
        number.place = place
    return found


class ReadWatch(TorchFunctionMode):
    """Finds the first line that reads a value of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = graphs.read_count()
        result = function(*args, **(kwargs or {}))
        if not self.place and graphs.read_count() != before:
            self.place = place_in(traceback.extract_stack())
        return result
