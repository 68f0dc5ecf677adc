"""A step on torch_tpu as one program: recorded once for each shape of its batches, then executed
with donated arguments."""

import hashlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpukit.hardware.eager.devices import Gather
from tpukit.hardware.eager.recorder import (
    Recorder,
    graphs,
    living,
    materialize,
    recorded_operations,
    recording_mode,
)
from tpukit.hardware.memory import is_out_of_memory_text
from tpukit.hardware.python_state import PythonState
from tpukit.hardware.step_programs import (
    MOST_CHANGES,
    NotOneProgramError,
    StepCall,
    StepPrograms,
    host_state,
    place_in,
    set_host_state,
)

SHARED_MEMORY = "identified a duplicate input"
"""torch_tpu's error for arguments that are one: nothing may be overwritten there."""
UNKNOWN_ARGUMENT = "identified an argument that was not provided"
"""Its error for a tensor that one of its operators used without asking Python."""
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
    changes: int = 0

    def change(self) -> str | None:
        """The first attribute that the step may read, and that has changed since."""
        return self.state.change()

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


class RecordedPrograms(StepPrograms[StepProgram]):
    """Steps on torch_tpu: their operations are recorded, undone, and compiled.

    Where a step has no program, its operations run one by one.
    """

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        super().__init__(say)
        self.device = device
        self.gather: Gather = lambda value: [value]
        """`all_gather_objects` of the run's ranks."""
        self.results: Sequence[Tensor] = ()
        """What the last program computed."""

    def run(self, step: StepCall) -> Any:
        self.results = ()
        return super().run(step)

    def record(
        self, step: StepCall, known: StepProgram | None, change: str | None
    ) -> tuple[StepProgram | None, Any]:
        was_agreed = known is not None and known.is_proven
        made = self._prepared(step, known, change)
        if not was_agreed or made is not known:
            made = self._agreed(made)
        if made is None:
            return None, step()
        self.executed += 1
        return made, self.execute(made, step)

    def execute(self, program: StepProgram, step: StepCall) -> Any:
        returned, self.results = program(self.inputs(step))
        return returned

    def _agreed(self, made: StepProgram | None) -> StepProgram | None:
        """A training step's program, where all ranks have that one: they wait for each other."""
        if not torch.is_grad_enabled():
            return made
        texts = self.gather(hashlib.sha256(made.recording.text.encode()).digest() if made else None)
        if len({*texts}) == 1:
            return made
        if made:
            self.say("a step runs as several programs: that of another rank is not this one")
        return None

    def inputs(self, step: StepCall) -> list[Tensor]:
        """What a program is given: the batches' tensors, then the numbers."""
        return [*step.given, torch.tensor(step.numbers, dtype=torch.float32).to(self.device)]

    def _prepared(
        self, step: StepCall, known: StepProgram | None, change: str | None
    ) -> StepProgram | None:
        """The program of a step after a recording; None where it has none."""
        inputs = self.inputs(step)
        materialize(living(self.device))
        drawn, before = host_state(), PythonState(step.owner)
        try:
            changes = known.changes if known else 0
            if changes > MOST_CHANGES:
                raise NotOneProgramError(f"{change} changes before each call")
            recording, state = self._repeatable(step, inputs, before, drawn)
            if known is None or (change and recording.text != known.recording.text):
                return self._compiled(recording, step.name, inputs, state, changes)
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
        self, step: StepCall, inputs: Sequence[Tensor], before: PythonState, drawn: bytes
    ) -> tuple[Recording, PythonState]:
        """A recording that changed nothing on the host, and what is there.

        drawn: the host's random generators at the step's start.
        """
        recording, state = self.recorded(step, inputs), before
        if before.change(within=True) or host_state() != drawn:
            # A cache that is filled once, perhaps, or a module that draws when it is imported.
            drawn, state = host_state(), PythonState(step.owner)
            recording = self.recorded(step, inputs)
        if host_state() != drawn:
            raise NotOneProgramError("it draws from a random generator of the host")
        if change := state.change(within=True):
            raise NotOneProgramError(f"it changes {change}, which no program does")
        return recording, state

    def recorded(self, step: StepCall, inputs: Sequence[Tensor]) -> Recording:
        """The operations of a step on `inputs`."""
        taken = list(inputs)
        for attempt in range(3):
            found = Recorder(self.device)
            try:
                return self._trace(found, lambda: step.function(step.batches, *inputs[-1]), taken)
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


def _difference(before: str, now: str) -> str:
    pairs = zip(before.splitlines(), now.splitlines(), strict=False)
    return next((f" ({a.strip()} -> {b.strip()})"[:200] for a, b in pairs if a != b), "")


def why_several(error: Exception) -> str:
    """The operator, the user's line and the reason, in one line."""
    where = place_in(traceback.extract_tb(error.__traceback__))
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    operator = getattr(error, "__notes__", ["it"])[-1]
    return f"a step runs as several programs: {operator}{where}: {reason}"
