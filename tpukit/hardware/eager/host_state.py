"""What a step depends on beside tensors of the device: plain values, and the host's generators."""

import pickle
import random
from typing import Any

import numpy as np
import torch

Plain = list[tuple[Any, dict[str, Any]]]
"""Objects with their attributes that are numbers or texts."""


def plain_values(owner: Any) -> Plain:
    model = getattr(owner, "model", None)
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    things = [*filter(None, [getattr(owner, "task", None)]), *modules]
    return [
        (thing, {n: v for n, v in vars(thing).items() if type(v) in (int, float, bool, str)})
        for thing in things
    ]


def first_changed(plain: Plain) -> str | None:
    """The first attribute that has another value now, as `Class.attribute`."""
    for thing, values in plain:
        now = vars(thing)
        for name, value in values.items():
            if now.get(name) != value:
                return f"{type(thing).__name__}.{name}"
    return None


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
