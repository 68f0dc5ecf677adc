"""A step on torch_tpu as one program: recorded once for each shape of its batches, then executed.

torch_tpu 0.2.0 records deferred operations and compiles them with donated arguments, through
functions that it calls private; `torch.compile` uses the same ones.
"""

import gc
import importlib
import pickle
import random
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpukit.hardware.backend import Batch
from tpukit.hardware.eager.compiling import uncompiled_passes
from tpukit.hardware.memory import is_out_of_memory_text

PACKAGE = Path(__file__).parents[2]
NOT_USERS = (
    "/site-packages/", "/lib/python3",
    *(f"{PACKAGE}/{part}/" for part in ("hardware", "probe", "train")),
)  # fmt: skip
"""Parts of the paths of code that is not the user's."""
SHARED_MEMORY = "identified a duplicate input"
"""torch_tpu's error for arguments that are one: nothing may be overwritten there."""
UNKNOWN_ARGUMENT = "identified an argument that was not provided"
"""Its error for a tensor that one of its operators used without asking Python."""
Plain = list[tuple[Any, dict[str, Any]]]
"""Objects with their attributes that are numbers or texts."""
_GENERATOR: ContextVar[Any] = ContextVar("generator", default=None)
"""The recorded form of the device's generator."""
COMPUTED = object()
"""The place of a tensor among what a step returns."""


class NotOneProgramError(Exception):
    """The reason why a step cannot be one program, with the operator and the user's line."""


@dataclass
class Kept:
    """A tensor of the device that a step takes from outside."""

    tensor: Tensor
    before: Tensor
    """Its value from before the step, in memory of its own."""
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
        if not self.is_from_before(tensor):
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
        kept = Kept(tensor, before)
        self.kept.append(kept)
        self._from_before[number] = kept
        tensor.data = before.clone()
        self._add(tensor)

    def is_from_before(self, tensor: Tensor) -> bool:
        """Whether a tensor that no recorded operator made is one from outside."""
        return is_computed(tensor)

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
        self.changed = [kept for number, kept in places.items() if number in self._written]
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


def _materialize(tensors: Sequence[Tensor]) -> None:
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
def _recording(generator: torch.Generator) -> Iterator[Any]:
    """Operations of this thread are recorded; yields the recorded form of the generator."""
    tpu = graphs()
    recorded = tpu.make_export_mode_device_generator(generator)
    tpu.set_export_mode_default_device_generator(recorded)
    token = _GENERATOR.set(recorded)
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
        _GENERATOR.reset(token)
        tpu.clear_export_mode_default_device_generators()


def in_order(tensors: Sequence[Tensor]) -> None:
    """What is recorded after this begins when all these are computed; they are replaced."""
    if tensors:
        values = torch.ops.tpu._optimization_barrier([tensor.detach() for tensor in tensors])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data = value


class Recomputation(torch.autograd.Function):
    """Activation checkpointing that the compiler keeps: it merges what is computed twice.

    The second pass begins with barriers, which also wait for the gradient; it draws the same
    random numbers.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        kind = tensors[0].device.type
        ctx.function = function
        ctx.cast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.random = graphs().get_device_state_tensor(_GENERATOR.get())
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, tpu, generator = ctx.saved_tensors, graphs(), _GENERATOR.get()
        *again, gradient = torch.ops.tpu._optimization_barrier([*given, gradient])
        pairs = zip(again, given, strict=True)
        inputs = [new.detach().requires_grad_(old.requires_grad) for new, old in pairs]
        random_after = tpu.get_device_state_tensor(generator)
        tpu.set_device_state_tensor(generator, ctx.random)
        kind, dtype, casts = ctx.cast
        with torch.set_grad_enabled(True), torch.autocast(kind, dtype, enabled=casts):
            result = ctx.function(*inputs)
        tpu.set_device_state_tensor(generator, random_after)
        torch.autograd.backward(result, gradient)
        return None, *(tensor.grad for tensor in inputs)


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)` in a program that is being recorded, computed again for its gradient."""
    if not any(tensor.requires_grad for tensor in tensors):
        return function(*tensors)
    result: Tensor = Recomputation.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return result


# -- programs ------------------------------------------------------------------------------------
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
    plain: Plain
    """Plain values of the task and of the model's modules that the step depends on."""
    is_proven: bool = False
    """Whether a second recording was the same."""

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

    The first two calls are recorded. Where the second differs, or a step cannot be recorded, its
    operations run one by one, and `say` is given the reason, once.
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
        self, function: Callable[..., Any], batches: Sequence[Batch], numbers: Sequence[float]
    ) -> Any:
        """`function(batches, *numbers)`, a bound method."""
        programs = self._known.setdefault(getattr(function, "__self__", function), {})
        shapes = [(name, t.shape, t.dtype) for batch in batches for name, t in batch.items()]
        name = getattr(function, "__name__", "step").strip("_")
        key = (name, torch.is_grad_enabled(), tuple(shapes))
        known = programs.get(key)
        if known is not None and _first_changed(known.plain) is not None:
            # The model changed between two steps: a layer that is frozen, another rate of dropout.
            del programs[key]
        if key not in programs or ((known := programs[key]) is not None and not known.is_proven):
            programs[key] = self._prepared(function, name, batches, numbers, programs.get(key))
        program, self.results = programs[key], ()
        if program is None:
            return function(batches, *numbers)
        returned, self.results = program(self.inputs(batches, numbers))
        self.executed += 1
        return returned

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
    ) -> StepProgram | None:
        """The program of a step after its first or second recording; None where it has none."""
        inputs = self.inputs(batches, numbers)
        _materialize(living(self.device))
        state = host_state()
        plain = _plain_values(getattr(function, "__self__", None))
        try:
            recording = self.recorded(function, batches, inputs)
            if (changed := _first_changed(plain)) is not None:
                raise NotOneProgramError(f"it changes {changed}, which no program does")
            if host_state() != state:
                raise NotOneProgramError("it draws from a random generator of the host")
            if known is None:
                return self._compiled(recording, name, inputs, plain)
            if recording.text != known.recording.text:
                changes = _difference(known.recording.text, recording.text)
                raise NotOneProgramError(f"its second call is another program{changes}")
            known.is_proven = True
            known.plain = plain
            return known
        except Exception as error:  # the mistake of a task is raised again, and explained
            if is_out_of_memory_text(str(error)):
                raise
            set_host_state(state)
            for thing, values in plain:
                thing.__dict__.update(values)
            self.say(why_several(error))
            return None

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
        with _recording(own.default_generators[0]) as generator:
            random_before = tpu.get_device_state_tensor(generator)
            found.take(taken)
            with found:
                leaves, structure = tree_flatten(step())
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
        self, recording: Recording, name: str, inputs: Sequence[Tensor], plain: Plain
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
        return StepProgram(runner, recording, arguments, plain)


def _plain_values(owner: Any) -> Plain:
    model = getattr(owner, "model", None)
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    things = [*filter(None, [getattr(owner, "task", None)]), *modules]
    return [
        (thing, {n: v for n, v in vars(thing).items() if type(v) in (int, float, bool, str)})
        for thing in things
    ]


def _first_changed(plain: Plain) -> str | None:
    """The first attribute that has another value now, as `Class.attribute`."""
    for thing, values in plain:
        now = vars(thing)
        for name, value in values.items():
            if now.get(name) != value:
                return f"{type(thing).__name__}.{name}"
    return None


def _difference(before: str, now: str) -> str:
    pairs = zip(before.splitlines(), now.splitlines(), strict=False)
    return next((f" ({a.strip()} -> {b.strip()})"[:200] for a, b in pairs if a != b), "")


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


def why_several(error: Exception) -> str:
    """The operator, the user's line and the reason, in one line."""
    places = traceback.extract_tb(error.__traceback__)
    users = [p for p in places if not any(part in p.filename for part in NOT_USERS)]
    where = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    operator = getattr(error, "__notes__", ["it"])[-1]
    return f"a step runs as several programs: {operator}{where}: {reason}"
