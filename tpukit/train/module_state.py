"""A module's state dict: what is kept of it, and its loading, with what differs named."""

import io
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tpukit.errors import CheckpointError, UsageError

LISTED = 5
"""Names of each kind of difference in an error."""
EXTRA_STATE = "_extra_state"
"""How the names of what `get_extra_state` returned end."""


# -- what is kept ------------------------------------------------------------------------------
def tensors_of(model: nn.Module, *, frozen: bool = True) -> dict[str, Tensor]:
    """The tensors of the state dict by name; tied ones once, under their first name.

    frozen: with parameters that are not trained, of which EMA weights have none of their own.
    """
    found, seen = {}, set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        if frozen or value.requires_grad or not isinstance(value, nn.Parameter):
            found[name] = value
    return found


def parameters_in(held: Any) -> Iterator[nn.Parameter]:
    """The parameters in a list, tuple or dict of modules and parameters."""
    values = held.values() if isinstance(held, dict) else held
    for value in values if isinstance(held, dict | list | tuple) else ():
        if isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, nn.Parameter):
            yield value


def others_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state dict beside tensors, with the versions of its modules."""
    others = OrderedDict((n, value) for n, value in state.items() if not isinstance(value, Tensor))
    others._metadata = getattr(state, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return others


def pack_state(state: Mapping[str, Any]) -> bytes:
    """Those entries, in host memory, as `torch.load(..., weights_only=True)` reads them.

    Raises UsageError naming one that it does not read.
    """
    others: Any = others_of(state)
    on_host = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), others)
    on_host._metadata = others._metadata
    try:
        unpack_state(packed := saved(on_host))
    except Exception as error:  # whatever a pickle, and what reads it, raises
        name = next((n for n, value in on_host.items() if not _is_readable(value)), "_metadata")
        raise UsageError(
            f"the model's state dict holds a {type(on_host.get(name)).__name__} as {name!r}, which"
            " `torch.load(..., weights_only=True)` does not read: no checkpoint can be made of it.",
            "Have `get_extra_state` return tensors, numbers, texts, lists and dicts of these.",
            id="task-value",
        ) from error
    return packed


def unpack_state(packed: bytes) -> dict[str, Any]:
    """The values again; nothing in them is executed."""
    return torch.load(io.BytesIO(packed), weights_only=True)  # type: ignore[no-any-return]


def saved(value: Any) -> bytes:
    """What `torch.save` writes of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _is_readable(value: Any) -> bool:
    try:
        unpack_state(saved(value))
    except Exception:
        return False
    return True


# -- loading -------------------------------------------------------------------------------------
def load_weights(
    model: nn.Module,
    weights: Mapping[str, Any],
    source: str,
    hint: str = "Use the task and the size it was trained with.",
) -> None:
    """Loads a whole state dict by `load_state_dict`, strictly.

    A tied weight needs one of its names. What is written without extra state (by earlier versions)
    leaves the model's own, and a line says so.

    Raises CheckpointError naming what does not fit.
    """
    state = OrderedDict(weights)
    state._metadata = getattr(weights, "_metadata", None)  # type: ignore[attr-defined]
    own = model.state_dict(keep_vars=True)
    given = {id(value): name for name, value in own.items() if name in state}
    for name, value in own.items():
        if name not in state and id(value) in given:
            state[name] = state[given[id(value)]]
    absent = [name for name in own if name.endswith(EXTRA_STATE) and name not in state]
    state.update({name: own[name] for name in absent})
    # What holds a tensor by a second name lacks it once.
    names = tensors_of(model).keys() | {n for n, v in own.items() if not isinstance(v, Tensor)}
    reason, lacking, unknown, shapes = "", set[str](), set[str](), list[str]()
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
        lacking, unknown = names & {*missing}, {*unexpected}
    except RuntimeError as error:
        first, *others = str(error).splitlines()
        if "loading state_dict" not in first:  # a module's own
            raise
        # A module that gives its buffers the shape of what is loaded has done so by now.
        known = model.state_dict(keep_vars=True)
        lacking, unknown = names - state.keys(), state.keys() - known.keys()
        shapes, reason = _other_shapes(known, state), " ".join(map(str.strip, others)).rstrip(".")
    differences = {"lacks": sorted(lacking), "has an unknown": sorted(unknown), "has": shapes}
    problems = [f"{verb} {listed(found)}" for verb, found in differences.items() if found]
    if problems:
        reason = f"it {'; '.join(problems)} ({sum(map(len, differences.values()))} differences)"
    if reason:
        raise CheckpointError(f"{source} does not fit this model: {reason}.", hint)
    if absent:
        parts = listed(
            [name.removesuffix(EXTRA_STATE).rstrip(".") or "the model" for name in absent]
        )
        print(
            f"Warning: {source} holds no extra state of {parts}: an earlier version wrote it; what"
            " a new model has is used.",
            file=sys.stderr,
            flush=True,
        )


def _other_shapes(known: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    pairs = ((name, known[name], state[name]) for name in sorted(known.keys() & state.keys()))
    return [
        f"{name} of shape {tuple(found.shape)}, not {tuple(own.shape)}"
        for name, own, found in pairs
        if isinstance(own, Tensor) and isinstance(found, Tensor) and own.shape != found.shape
    ]


def listed(found: list[str]) -> str:
    """The first of some names."""
    return ", ".join([*found[:LISTED], *(["..."] if len(found) > LISTED else [])])
