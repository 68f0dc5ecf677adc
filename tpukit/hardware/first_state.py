"""The state that an optimizer would make in its first step, made before it.

A step that is recorded or traced is one program only if its state is there. It is taken from trials
on the CPU, on drawn weights and gradients at two rates, and only where none of them decides it.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.optim.optimizer as of_torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tpukit.hardware.optimizers import trained_of, wrapped_in

TRIED_STEPS = 3
"""Number of steps that an optimizer with and without its state must agree in."""
FORMS = ("capturable", "fused", "foreach")
WEIGHTS = object()
"""Stands for a copy of the parameter."""
State = dict[str, Any]


def make_state(optimizer: Optimizer, place: Callable[[Tensor, nn.Parameter], Tensor]) -> bool:
    """Makes an optimizer's whole state, or none of it; False where its first step must make it.

    place: a state tensor, put where the parameter's own state lives.
    """
    of_groups = [(group, p) for group in optimizer.param_groups for p in trained_of(group)]
    found: dict[nn.Parameter, State] = {}
    tried: dict[Any, State | None] = {}
    for group, parameter in of_groups:
        first: State | None = optimizer.state.get(parameter)
        if not first:
            key = id(group), parameter.shape, parameter.dtype
            if key not in tried:
                tried[key] = _first_state(optimizer, group, parameter)
            first = tried[key]
        if first is None:
            return False
        found[parameter] = first
    for group, parameter in of_groups:
        on_host = {"step"} if not (group.get("capturable") or group.get("fused")) else set()
        optimizer.state[parameter] = {
            key: parameter.detach().clone()
            if value is WEIGHTS
            else place(value, parameter)
            if isinstance(value, Tensor) and key not in on_host
            else deepcopy(value)
            for key, value in found[parameter].items()
        }
    return True


def _first_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> State | None:
    """What a parameter's state is before its first step; None where a step has to make it."""
    if wrapped_in(optimizer) is not None:
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            trials = [TriedOptimizer(optimizer, group, parameter, seed) for seed in (0, 1)]
            weights = [trial.weights.detach().clone() for trial in trials]
            for trial in trials:
                trial.step()
            one, other = (trial.state.first for trial in trials)
            if one.keys() != other.keys() or one.keys() != trials[0].state.keys():
                return None
            first = {key: _of_both((one[key], other[key]), weights) for key in one}
            started = TriedOptimizer(optimizer, group, parameter, 0)
            copied = {k: weights[0].clone() if v is WEIGHTS else v for k, v in first.items()}
            started.state.update(deepcopy(copied))
            started.step()
            for _ in range(TRIED_STEPS - 1):
                trials[0].step()
                started.step()
    except Exception:  # of whatever an optimizer does with one weight on a CPU
        return None
    same = torch.equal(started.weights, trials[0].weights)
    return first if same and _is_same(dict(started.state), dict(trials[0].state)) else None


def _of_both(values: tuple[Any, Any], weights: list[Tensor]) -> Any:
    """The value that two trials began with: a constant, their weights, or perhaps zeros."""
    if _is_same(*values):
        return values[0]
    if all(_is_same(value, own) for value, own in zip(values, weights, strict=True)):
        return WEIGHTS
    return torch.zeros_like(values[0])


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)


class TriedOptimizer:
    """An optimizer like another one, over a single weight on the CPU. It calls no hook.

    send: puts the weight, and the rate, on a device, where the optimizer keeps its form.
    weights: the weight, that of the optimizer which steps this one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        like: nn.Parameter,
        seed: int,
        send: Callable[[Tensor], Tensor] | None = None,
        weights: nn.Parameter | None = None,
    ) -> None:
        self.draws = torch.Generator().manual_seed(seed)
        self.send = send or (lambda tensor: tensor)
        self.weights = nn.Parameter(self._drawn(like)) if weights is None else weights
        known: dict[int, Any] = {
            id(p): p for each in optimizer.param_groups for p in each["params"]
        }
        kept = vars(optimizer).items()
        own = {
            name: OrderedDict() if name.endswith("_hooks") else value
            for name, value in kept
            if name not in ("state", "param_groups")
        }
        plain = {form: False for form in FORMS if form in group and send is None}
        options = {key: value for key, value in group.items() if key != "params"}
        # Another rate in each, which may decide a state too: a first step is seldom at the peak.
        rate = (float(group.get("lr", 0.0)) or 1.0) / (2 + seed)
        options |= {**plain, "lr": send(torch.tensor(rate)) if send else rate}
        self.state = FirstValues()
        groups = [{**deepcopy(options), "params": [self.weights]}]
        if (inner := wrapped_in(optimizer)) is not None:
            within = TriedOptimizer(inner, group, like, seed, send, self.weights).optimizer
            known[id(inner)] = within
            if inner.param_groups is optimizer.param_groups:
                groups = within.param_groups
        self.optimizer: Any = object.__new__(type(optimizer))
        vars(self.optimizer).update(
            deepcopy(own, known),
            state=defaultdict[Tensor, State](dict, {self.weights: self.state}),
            param_groups=groups,
        )

    def _drawn(self, like: Tensor) -> Tensor:
        return self.send(torch.randn(like.shape, generator=self.draws, dtype=like.dtype))

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        self.weights.grad = self._drawn(self.weights)
        with _without_hooks_of_all():
            self.optimizer.step(*[closure] if closure else [])


@contextmanager
def _without_hooks_of_all() -> Iterator[None]:
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    hooks: list[dict[Any, Any]] = [getattr(of_torch, name) for name in names]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


class FirstValues(dict[str, Any]):
    """A dict that remembers the first value of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.first: State = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = deepcopy(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *mappings: Any, **values: Any) -> None:
        for key, value in dict(*mappings, **values).items():
            self[key] = value
