"""Steps that run without their Python: recorded for each shape of their batches, until something
that their Python reads has changed.

Both stacks of TPUs have them: torch_tpu records operations and compiles them, torch_xla executes
what it traced through a recorder.
"""

import pickle
import random
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tpukit.hardware.backend import Batch
from tpukit.io.code_owner import is_model_code

MOST_CHANGES = 2
"""Maximum number of calls in a row before which what a step reads has changed."""


class NotOneProgramError(Exception):
    """The reason why a step cannot be one program, with the operator and the user's line."""


@dataclass(frozen=True)
class StepCall:
    """A call `function(batches, *numbers)`.

    owner: what programs are kept for; they read what its `task`, `model` and `optimizer` hold.
    """

    name: str
    function: Callable[..., Any]
    batches: Sequence[Batch]
    numbers: Sequence[float | Tensor]
    owner: Any

    @classmethod
    def of_method(
        cls, method: Callable[..., Any], batches: Sequence[Batch], numbers: Sequence[float]
    ) -> "StepCall":
        """Of a bound method, whose object is the owner."""
        bound: Any = method
        return cls(bound.__name__.strip("_"), method, batches, numbers, bound.__self__)

    def __call__(self) -> Any:
        return self.function(self.batches, *self.numbers)

    @property
    def given(self) -> list[Tensor]:
        """The batches' tensors."""
        return [tensor for batch in self.batches for tensor in batch.values()]

    @property
    def key(self) -> Any:
        """The name and what is compared of the batches."""
        shapes = [(name, t.shape, t.dtype) for batch in self.batches for name, t in batch.items()]
        return self.name, torch.is_grad_enabled(), tuple(shapes)


class KnownProgram(Protocol):
    """A step's program."""

    is_proven: bool
    """Whether a second recording was the same."""
    changes: int
    """Number of calls in a row before which what its Python reads had changed."""

    def change(self) -> str | None:
        """What has changed since it was recorded; None where it can run."""


P = TypeVar("P", bound=KnownProgram)


class StepPrograms(ABC, Generic[P]):
    """The steps of a process.

    The first two calls are recorded, and each before which something has changed that the step may
    read. Where the second differs, or a step cannot be recorded, its Python runs each time, and
    `say` is given the reason, once.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.executed = 0
        """Number of programs that ran without their step's Python."""
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, P | None]]
        self._known = weakref.WeakKeyDictionary()

    def run(self, step: StepCall) -> Any:
        """What the step returns."""
        programs, key = self._known.setdefault(step.owner, {}), self.key_of(step)
        known = programs.get(key)
        if known is None and key in programs:
            return step()
        change = known.change() if known else None
        if known is not None:
            # A layer that is frozen, another rate of dropout: perhaps another program.
            known.changes = known.changes + 1 if change else 0
            if known.is_proven and not change:
                self.executed += 1
                return self.execute(known, step)
        programs[key], returned = self.record(step, known, change)
        return returned

    def key_of(self, step: StepCall) -> Any:
        """What one program is for."""
        return step.key

    @abstractmethod
    def record(self, step: StepCall, known: P | None, change: str | None) -> tuple[P | None, Any]:
        """The step's program, None where its Python is to run each time, and what it returns.

        known: the one until now; change: what has changed since its recording.
        """

    @abstractmethod
    def execute(self, program: P, step: StepCall) -> Any:
        """Runs a program; what the step returns."""


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


def place_in(frames: traceback.StackSummary) -> str:
    """The innermost line of the user's: ` at FILE:LINE`; empty where there is none."""
    users = [f for f in frames if is_model_code(f.filename)]
    return f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
