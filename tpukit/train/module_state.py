"""Weights into a module: by its `load_state_dict`, with what differs named."""

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tpukit.errors import CheckpointError
from tpukit.train.checkpoint import tensors_of

LISTED = 5
"""Names of each kind of difference in an error."""
EXTRA_STATE = "_extra_state"
"""How the names of what `get_extra_state` returned end."""


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
