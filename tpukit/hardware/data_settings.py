"""What a step may read of a data set: its settings, not its samples."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tpukit.hardware.python_values import (
    MISSING,
    PLAIN,
    entry_name,
    is_namespace,
    of_user,
    same,
)

MOST_SETTINGS = 1000
"""Maximum length of a list or dict of a data set that is looked into, and of all together."""
CONTAINERS = (dict, list, tuple)


class DataSettings:
    """Attributes of data sets, of what their short lists and dicts hold, and of their classes, as
    far as they were there: a data set adds what it has read. Arrays and tensors are samples.

    They count between steps only, and are not put back: a thread may read ahead within one.
    """

    def __init__(self, data_sets: Sequence[Any], seen: dict[int, Any]) -> None:
        """seen: by id what is looked at elsewhere, and what is found here."""
        self._held: list[tuple[str, Any, dict[Any, Any]]] = []
        """Names of containers, themselves, what they held."""
        for data in data_sets:
            del seen[id(data)]
        todo, count = deque(("", data) for data in data_sets), 0
        while todo and count < MOST_SETTINGS:
            name, value = todo.popleft()
            if isinstance(value, PLAIN) or id(value) in seen:
                continue
            seen[id(value)] = value
            found = [*self._keep(name, value)]
            count += len(found)
            todo += found

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """The names of those that are another now, with what each was and is."""
        for name, container, before in self._held:
            now = _entries(container)
            for key, value in before.items():
                if not same(value, now.get(key, MISSING)):
                    yield entry_name(name, key), value, now.get(key, MISSING)

    def remember(self) -> None:
        """Keeps what is there now."""
        for place, (name, container, before) in enumerate(self._held):
            now = _entries(container)
            self._held[place] = name, container, {key: now.get(key, MISSING) for key in before}

    def _keep(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keeps a value; yields what it holds."""
        kind: Any = type(value)
        if issubclass(kind, DataLoader):
            yield name, value.dataset
            return
        container = value
        if not issubclass(kind, CONTAINERS):
            is_known = issubclass(kind, Dataset) or is_namespace(kind) or of_user(kind.__module__)
            name, container = kind.__name__, getattr(value, "__dict__", {}) if is_known else {}
            if of_user(kind.__module__):
                self._hold(name, kind)
        if len(container) <= MOST_SETTINGS:
            kept = self._hold(name, container)
            yield from ((entry_name(name, key), each) for key, each in kept.items())

    def _hold(self, name: str, container: Any) -> dict[Any, Any]:
        found = _entries(container)
        kept = {k: each for k, each in found.items() if not isinstance(each, Tensor | np.ndarray)}
        if not isinstance(container, tuple):
            self._held.append((name, container, kept))
        return kept


def _entries(container: Any) -> Any:
    """What a list, a dict or a class holds, by place or name."""
    if isinstance(container, type):
        return vars(container)
    return container if isinstance(container, dict) else dict(enumerate(container))
