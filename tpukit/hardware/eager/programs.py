"""A step on torch_tpu as one program: recorded once for each shape of its batches, then executed
with donated arguments."""

import hashlib
import pickle
import random
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpukit.hardware.backend import Batch
from tpukit.hardware.eager.devices import Gather
from tpukit.hardware.eager.recorder import (
    NotOneProgramError,
    Recorder,
    graphs,
    living,
    materialize,
    recorded_operations,
    recording_mode,
)
from tpukit.hardware.memory import is_out_of_memory_text
from tpukit.hardware.python_state import PythonState
from tpukit.hardware.python_values import NOT_USERS

SHARED_MEMORY = "identified a duplicate input"
"""torch_tpu's error for arguments that are one: nothing may be overwritten there."""
UNKNOWN_ARGUMENT = "identified an argument that was not provided"
"""Its error for a tensor that one of its operators used without asking Python."""
MOST_CHANGES = 2
"""Maximum number of calls in a row before which what a step reads has changed."""
COMPUTED = object()
"""The place of a tensor among what a step returns."""


@dataclass
class Recording:
    """A step's operations, and where its arguments come from."""

    arguments: list[Tensor]
    results: list[Tensor]
    text: str
    """StableHLO, by which two recordings are compared."""
    module: Any
    recorder: Recorder
    """The first results are the new values of what it found to be changed."""
    returned: tuple[list[Any], Any]
    """What the function returned, flattened: `COMPUTED` stands for a tensor of the other
    results."""
    is_random: bool
    """Whether the device's random state is the last argument and result."""


@dataclass
class StepProgram:
    """A compiled step."""

    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    recording: Recording
    arguments: list[Tensor | int]
    """Tensors that outlive the step, or places among its inputs."""
    state: PythonState
    """What the step read when it was recorded."""
    is_proven: bool = False
    """Whether a second recording was the same."""
    changes: int = 0
    """Number of calls in a row before which that had changed."""

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor]]:
        """What the function returns, and the tensors that the program computed."""
        given = [inputs[a] if isinstance(a, int) else a for a in self.arguments]
        outputs = list(self.run(given))
        changed = self.recording.recorder.changed
        for kept, value in zip(changed, outputs, strict=False):
            kept.set(value)
        rest = iter(outputs[len(changed) :])
        leaves, structure = self.recording.returned
        filled = [next(rest) if leaf is COMPUTED else leaf for leaf in leaves]
        return tree_unflatten(filled, structure), outputs


class StepPrograms:
    """The steps of a process, each recorded and compiled for every shape of its batches.

    The first two calls are recorded, and each before which a setting or a counter that the step
    may read has changed. Where the second differs, or a step cannot be recorded, its operations
    run one by one, and `say` is given the reason, once.
    """

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device = device
        self.say = say
        self.results: Sequence[Tensor] = ()
        """What the last program computed."""
        self.executed = 0
        """Number of programs that were run."""
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, StepProgram | None]]
        self._known = weakref.WeakKeyDictionary()

    def run(
        self, function: Callable[..., Any], batches: Sequence[Batch], numbers: Sequence[float],
        gather: Gather,
    ) -> Any:  # fmt: skip
        """`function(batches, *numbers)`, a bound method; gather: `all_gather_objects`."""
        programs = self._known.setdefault(getattr(function, "__self__", function), {})
        shapes = [(name, t.shape, t.dtype) for batch in batches for name, t in batch.items()]
        name = getattr(function, "__name__", "step").strip("_")
        key = (name, torch.is_grad_enabled(), tuple(shapes))
        known = programs.get(key)
        change = known.state.change() if known else None
        if known is not None:
            # A layer that is frozen, another rate of dropout: perhaps another program.
            known.changes = known.changes + 1 if change else 0
        if key not in programs or (known is not None and (change or not known.is_proven)):
            was_agreed = known is not None and known.is_proven
            made = self._prepared(function, name, batches, numbers, known, change)
            is_same = was_agreed and made is known
            programs[key] = made if is_same else self._agreed(made, gather)
        program, self.results = programs[key], ()
        if program is None:
            return function(batches, *numbers)
        returned, self.results = program(self.inputs(batches, numbers))
        self.executed += 1
        return returned

    def _agreed(self, made: StepProgram | None, gather: Gather) -> StepProgram | None:
        """A training step's program, where all ranks have that one: they wait for each other."""
        if not torch.is_grad_enabled():
            return made
        texts = gather(hashlib.sha256(made.recording.text.encode()).digest() if made else None)
        if len({*texts}) == 1:
            return made
        if made:
            self.say("a step runs as several programs: that of another rank is not this one")
        return None

    def new_recorder(self) -> Recorder:
        return Recorder(self.device)

    def inputs(self, batches: Sequence[Batch], numbers: Sequence[float]) -> list[Tensor]:
        """What a program is given: the batches' tensors, then the numbers."""
        sent = torch.tensor(numbers, dtype=torch.float32).to(self.device)
        return [*(tensor for batch in batches for tensor in batch.values()), sent]

    def _prepared(
        self,
        function: Callable[..., Any],
        name: str,
        batches: Sequence[Batch],
        numbers: Sequence[float],
        known: StepProgram | None,
        change: str | None,
    ) -> StepProgram | None:
        """The program of a step after a recording; None where it has none.

        known: the one until now; change: what has changed since its recording.
        """
        inputs = self.inputs(batches, numbers)
        materialize(living(self.device))
        drawn, before = host_state(), PythonState(getattr(function, "__self__", None))
        try:
            changes = known.changes if known else 0
            if changes > MOST_CHANGES:
                raise NotOneProgramError(f"{change} changes before each call")
            recording, state = self._repeatable(function, batches, inputs, before)
            if host_state() != drawn:
                raise NotOneProgramError("it draws from a random generator of the host")
            if known is None or (change and recording.text != known.recording.text):
                return self._compiled(recording, name, inputs, state, changes)
            if recording.text != known.recording.text:
                lines = _difference(known.recording.text, recording.text)
                raise NotOneProgramError(f"its second call is another program{lines}")
            known.is_proven = True
            known.state = state
            return known
        except Exception as error:  # the mistake of a task is raised again, and explained
            if is_out_of_memory_text(str(error)):
                raise
            set_host_state(drawn)
            before.restore()
            self.say(why_several(error))
            return None

    def _repeatable(
        self,
        function: Callable[..., Any],
        batches: Sequence[Batch],
        inputs: Sequence[Tensor],
        before: PythonState,
    ) -> tuple[Recording, PythonState]:
        """A recording that changed nothing on the host, and what is there."""
        recording, state = self.recorded(function, batches, inputs), before
        if before.change(within=True):  # a cache that is filled once, perhaps
            state = PythonState(getattr(function, "__self__", None))
            recording = self.recorded(function, batches, inputs)
        if change := state.change(within=True):
            raise NotOneProgramError(f"it changes {change}, which no program does")
        return recording, state

    def recorded(
        self, function: Callable[..., Any], batches: Sequence[Batch], inputs: Sequence[Tensor]
    ) -> Recording:
        """The operations of a step on `inputs`."""
        taken = list(inputs)
        for attempt in range(3):
            found = self.new_recorder()
            try:
                return self._trace(found, lambda: function(batches, *inputs[-1].unbind()), taken)
            except Exception as error:
                reason = str(error)
                if SHARED_MEMORY in reason:
                    for kept in found.changed:
                        kept.send_again()
                if attempt == 2 or not (SHARED_MEMORY in reason or UNKNOWN_ARGUMENT in reason):
                    error.add_note(found.operator)
                    raise
            finally:
                found.restore()
            if UNKNOWN_ARGUMENT in reason:
                taken = [*inputs, *filter(Tensor.is_contiguous, living(self.device))]
        raise AssertionError

    def _trace(
        self, found: Recorder, step: Callable[[], Any], taken: Sequence[Tensor]
    ) -> Recording:
        """taken: arguments, whether the recorder sees that they are used or not."""
        own: Any = torch.get_device_module(self.device.type)
        tpu = graphs()
        with recorded_operations(own.default_generators[0]) as generator:
            random_before = tpu.get_device_state_tensor(generator)
            found.take(taken)
            with found:
                leaves, structure = tree_flatten(step())
                # An outer context keeps casts of weights for its next pass.
                torch.clear_autocast_cache()
                returned = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
            leaves = [COMPUTED if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            found.end(returned)
            results = [kept.tensor.detach() for kept in found.changed] + returned
            arguments = [kept.before for kept in found.kept]
            random_after = tpu.get_device_state_tensor(generator)
            is_random = random_after.data_ptr() != random_before.data_ptr()
            if is_random:
                arguments.append(random_before)
                results.append(random_after)
            module = tpu.build_mlir(results, arguments)
            text = tpu.serialize_mlir_text(module)
        return Recording(arguments, results, text, module, found, (leaves, structure), is_random)

    def _compiled(
        self,
        recording: Recording,
        name: str,
        inputs: Sequence[Tensor],
        state: PythonState,
        changes: int,
    ) -> StepProgram:
        found = recording.recorder
        changed = set(map(id, found.changed))
        with recording_mode():
            compiled = graphs().traverse_and_compile(
                result_tensors=recording.results,
                argument_tensors=recording.arguments,
                donated_inputs=[i for i, kept in enumerate(found.kept) if id(kept) in changed],
                module_name=f"tpukit_{name}",
            )
        runner = graphs().make_compiled_runner(compiled.executable, (), None, recording.is_random)
        # The operations are not needed any more.
        recording.results, recording.arguments, recording.module = [], [], None
        places = {id(tensor): place for place, tensor in enumerate(inputs)}
        arguments = [places.get(id(kept.tensor), kept.tensor) for kept in found.kept]
        return StepProgram(runner, recording, arguments, state, changes=changes)


def host_state() -> bytes:
    """The host's random generators."""
    of_torch = torch.get_rng_state().numpy()
    return pickle.dumps((random.getstate(), np.random.get_state(), of_torch))


def set_host_state(state: bytes) -> None:
    """Sets them as they were."""
    own, of_numpy, of_torch = pickle.loads(state)
    random.setstate(own)
    np.random.set_state(of_numpy)
    torch.set_rng_state(torch.from_numpy(of_torch))


def _difference(before: str, now: str) -> str:
    pairs = zip(before.splitlines(), now.splitlines(), strict=False)
    return next((f" ({a.strip()} -> {b.strip()})"[:200] for a, b in pairs if a != b), "")


def why_several(error: Exception) -> str:
    """The operator, the user's line and the reason, in one line."""
    places = traceback.extract_tb(error.__traceback__)
    users = [p for p in places if not any(part in p.filename for part in NOT_USERS)]
    where = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    operator = getattr(error, "__notes__", ["it"])[-1]
    return f"a step runs as several programs: {operator}{where}: {reason}"
