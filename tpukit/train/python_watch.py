"""State in Python that moves in each step, and that no checkpoint holds."""

import re
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tpukit.hardware.optimizers import steppers
from tpukit.hardware.python_state import PythonState
from tpukit.train.module_state import listed
from tpukit.train.task import Task

WATCHED_STEPS = (1, 2)
"""Steps of a process, from 0, that are looked at: what the first one alone fills is a cache."""
ENTRY = re.compile(r"(\.\d+)+$")


class PythonWatch:
    """Compares a task, its model and its optimizer before and after some of a process' first
    steps."""

    def __init__(self, task: Task, model: nn.Module, optimizer: Any = None) -> None:
        self._owner = SimpleNamespace(task=task, model=model, optimizer=optimizer)
        self._before: PythonState | None = None
        self._changed: list[list[str]] = []

    def step_begins(self, made: int) -> None:
        """made: steps of this process."""
        self._before = None
        if made in WATCHED_STEPS:
            model, optimizer = self._owner.model, self._owner.optimizer
            saved = _saved_tensors(model) | _tensors_of_states(optimizer)
            self._before = PythonState(
                self._owner,
                {**_saved_entries(model), **_entries_of_states(optimizer)},
                lambda tensor: id(tensor) in saved or tensor.grad_fn is not None,
            )

    def step_done(self) -> str | None:
        """A warning after the last of these steps, if there is anything to say."""
        if self._before is None:
            return None
        # An entry of a list is the list's: another one is appended in each step.
        changes = (ENTRY.sub("", name) for name in self._before.changes(within=True))
        # torch's own globals are caches: that of `parametrize.cached()` is another one each time.
        found = [name for name in changes if not name.startswith("torch.")]
        self._changed.append(list(dict.fromkeys(found)))
        self._before = None
        if len(self._changed) < len(WATCHED_STEPS):
            return None
        first, *others = self._changed
        names = [name for name in first if all(name in more for more in others)]
        if not names:
            return None
        shown = listed([name.replace("._buffers.", ".") for name in names])
        return (
            f"Warning: each step changes {shown}, which no checkpoint holds: a resumed run begins"
            " with what a new one has. Where steps depend on it, keep it in the model"
            " (`register_buffer`, `get_extra_state`) or in an optimizer's `state`, or compute it"
            " from a buffer that counts in `after_step`."
        )


def _saved_tensors(model: nn.Module) -> set[int]:
    passing = {
        id(module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
    }
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())} - passing


def _saved_entries(model: nn.Module) -> dict[int, set[str]]:
    """By id of a dict of a module the names in it that its state dict stands for."""
    hidden = {}
    for module in model.modules():
        hidden[id(module._parameters)] = set(module._parameters)
        hidden[id(module._buffers)] = set(module._buffers) - module._non_persistent_buffers_set
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            hidden[id(vars(module))] = set(vars(module)) - {"_modules", "_buffers", "_parameters"}
    return hidden


def _tensors_of_states(optimizer: Any) -> set[int]:
    states = (state for each in steppers(optimizer) for state in each.state.values())
    values = (value for state in states for value in state.values())
    return {id(value) for value in values if isinstance(value, Tensor)}


def _entries_of_states(optimizer: Any) -> dict[int, set[str]]:
    """The attributes of an optimizer that a checkpoint holds: see `OptimizerState`."""
    hidden = {}
    for each in steppers(optimizer):
        own = getattr(type(each), "state_dict", None) is not Optimizer.state_dict
        hidden[id(vars(each))] = {
            name
            for name, value in vars(each).items()
            if name in ("state", "param_groups")
            or type(value) in (int, float)
            or (own and not hasattr(value, "param_groups"))
        }
    return hidden
