"""Models without drop-out and stochastic depth."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Drop-out and stochastic depth are off inside."""
    changed = []
    for module in model.modules():
        for key, value in list(vars(module).items()):
            named = "drop" in key or (
                key == "p" and isinstance(module, nn.modules.dropout._DropoutNd)
            )
            if named and isinstance(value, float) and value:
                changed.append((module, key, value))
                setattr(module, key, 0.0)
    try:
        yield
    finally:
        for module, key, value in changed:
            setattr(module, key, value)
