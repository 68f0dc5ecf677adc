"""The state of any optimizer in a checkpoint: tensors by name, and what JSON can hold."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tpukit.errors import ConfigError, UsageError
from tpukit.hardware.modules import local
from tpukit.hardware.optimizers import evaluation_mode, has_modes, steppers

SET_EACH_STEP = ("params", "lr")
"""Options of a group that a checkpoint leaves out."""
Entries = Mapping[str, dict[str, Any]]
Plain = int | float | bool | str | None
HELD = (Tensor, nn.Parameter, DTensor)
REST = ""
"""Kind of what is neither state of a parameter nor an option of a group."""


class OptimizerState:
    """The state of one optimizer, whatever its class, as its own `state_dict` has it.

    `KEY/NAME` is the state `KEY` of the parameter `NAME`, `group/INDEX/KEY` a group's own. Of a
    group's options those are state that changed since the optimizer was made. Lists, tuples and
    dicts are values, which name their tensors: `KEY/NAME/0`, ... Its attributes that are
    numbers are state too, once they have changed.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._first = [self._forms(group) for group in optimizer.param_groups]
        self._first_numbers = self._numbers()

    @property
    def name(self) -> str:
        """The class, by one name on all hardware."""
        return type(self.optimizer).__name__.removeprefix("Xla")

    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors by name, the parameters in their model's order."""
        return self._packed()[0]

    def values(self) -> dict[str, Any]:
        """The state without tensors. Raises UsageError for what a checkpoint cannot hold."""
        values, pairs = self._packed()[1], zip(self._numbers(), self._first_numbers, strict=False)
        changed = [dict(now.items() - first.items()) for now, first in pairs]
        found = {"values": values, "attributes": changed if any(changed) else None}
        return {"class": self.name, **{name: each for name, each in found.items() if each}}

    def _numbers(self) -> list[dict[str, int | float]]:
        """Those that the optimizer, and each that it steps, have as attributes."""
        return [
            {name: v for name, v in vars(each).items() if type(v) in (int, float)}
            for each in steppers(self.optimizer)
        ]

    def _packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for key, value in self._entries():
            form = self._pack(value, key, tensors)
            if form != {"tensor": key, "strides": None}:
                values[key] = form
        return tensors, values

    def _entries(self) -> Iterator[tuple[str, Any]]:
        whole = self.optimizer.state_dict()
        known = self._known(whole)
        state = whole["state"] if known else {}
        of_names = {self._names[id(known[i])]: held for i, held in state.items() if i in known}
        for name in self.parameters:
            for key, value in sorted(of_names.get(name, {}).items()):
                yield f"{key}/{name}", value
        for index, group in enumerate(self.optimizer.param_groups if known else ()):
            for key, form in self._forms(group).items():
                if form != self._first[index].get(key):
                    yield f"group/{index}/{key}", group[key]
        standard = {"param_groups": None, "state": None} if known else {}
        rest = {key: value for key, value in whole.items() if key not in standard}
        if strays := {key: value for key, value in state.items() if key not in known}:
            rest["state"] = strays
        if rest:
            yield f"{REST}/", rest

    def _known(self, whole: Mapping[str, Any]) -> dict[Any, nn.Parameter]:
        """The parameters by their numbers in a state dict of torch's form, {} for another form."""
        if not {"state", "param_groups"} <= whole.keys():
            return {}
        pairs = zip(whole["param_groups"], self.optimizer.param_groups, strict=True)
        return {
            number: parameter
            for saved, group in pairs
            for number, parameter in zip(saved["params"], group["params"], strict=True)
        }

    def _forms(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's options as they are compared: of a tensor or list, its value now."""
        forms: dict[str, Any] = {}
        for key, value in group.items():
            if key not in SET_EACH_STEP:
                tensors: dict[str, Tensor] = {}
                try:
                    form = self._pack(value, "", tensors)
                except UsageError:
                    form = {"object": id(value)}
                forms[key] = form, [tensor.tolist() for tensor in tensors.values()]
        return forms

    @contextmanager
    def evaluation_mode(self) -> Iterator[Mapping[str, Tensor]]:
        """Within the context the weights of an optimizer with modes, which it yields by name, are
        those to evaluate; {} of other optimizers."""
        if not has_modes(self.optimizer):
            yield {}
            return
        with evaluation_mode(self.optimizer):
            yield {name: p for name, p in self.parameters.items() if p.requires_grad}

    # -- a value as JSON holds it ------------------------------------------------------------------
    def _pack(self, value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
        """Plain values as they are; the tensors of others go into `tensors`."""
        if isinstance(value, Plain):
            return value
        if isinstance(value, Tensor) and id(value) in self._names:
            return {"parameter": self._names[id(value)]}
        if type(value) in HELD and value.layout == torch.strided:
            tensors[key] = value
            # A product of matrices depends on them in its last bit.
            strides = None if self._are_strides_known(key, value) else list(value.stride())
            return {"tensor": key, "strides": strides}
        if isinstance(value, list | tuple):
            parts = [self._pack(v, f"{key}/{i}", tensors) for i, v in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": parts}
        if isinstance(value, dict):
            keys = [self._pack(inner, key, tensors) for inner in value]
            parts = [self._pack(v, f"{key}/{i}", tensors) for i, v in enumerate(value.values())]
            return {"dict": [list(pair) for pair in zip(keys, parts, strict=True)]}
        raise UsageError(
            f"the optimizer {self.name} keeps a {type(value).__name__} as {key}, which a checkpoint"
            " cannot hold.",
            "Use an optimizer whose state is tensors, numbers, and lists or dicts of them.",
            id="optimizer",
        )

    def _are_strides_known(self, key: str, value: Tensor) -> bool:
        """Whether a tensor lies in memory as its parameter, or in the order of its axes."""
        like = self._parameter_of(key)
        as_parameter = like is not None and (value.shape, value.stride()) == (
            like.shape,
            like.stride(),
        )
        return as_parameter or value.is_contiguous() or isinstance(value, DTensor)

    def _parameter_of(self, key: str) -> nn.Parameter | None:
        """The parameter of `KEY/NAME`, or of `KEY/NAME/0` within a list."""
        name = key.partition("/")[2]
        while name and name not in self.parameters:
            name = name.rpartition("/")[0]
        return self.parameters.get(name)

    def _unpack(self, form: Any, tensors: Mapping[str, Tensor]) -> Any:
        if not isinstance(form, dict):
            return form
        kind, content = next(iter(form.items()))
        match kind:
            case "parameter":
                return self.parameters[content]
            case "tensor":
                tensor, strides = tensors[content], form["strides"]
                if strides is None:
                    return tensor
                return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
            case "dict":
                return {self._unpack(k, tensors): self._unpack(v, tensors) for k, v in content}
        parts = (self._unpack(part, tensors) for part in content)
        return list(parts) if kind == "list" else tuple(parts)

    # -- restoring --------------------------------------------------------------------------------
    def restore(
        self,
        values: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        load: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        """Loads the state of a checkpoint. Raises ConfigError where another optimizer wrote it.

        values: empty in checkpoints of versions before 0.3, whose optimizer is AdamW.
        tensors: by name, without values; load: reads the values into tensors of these names.
        """
        present, forms = self.tensors(), values.get("values", {})
        self._require_same_kind(values.get("class", "AdamW"), present, {*tensors, *forms})
        on_device = self._counted_on_device()
        rooms = {
            key: self._room(key, value, present.get(key), on_device)
            for key, value in tensors.items()
        }
        load(rooms)
        entries = {
            key: self._unpack(forms.get(key, {"tensor": key, "strides": None}), rooms)
            for key in {**tensors, **forms}
        }
        whole = self.optimizer.state_dict()
        known = self._known(whole)
        loaded = dict(entries.get(f"{REST}/", {}))
        if known:
            state, options = self._sorted(entries)
            names = {number: self._names[id(parameter)] for number, parameter in known.items()}
            held = {n: {**whole["state"].get(n, {}), **state[name]} for n, name in names.items()}
            loaded["state"] = {**loaded.get("state", {}), **{n: s for n, s in held.items() if s}}
            loaded["param_groups"] = [
                {**group, **options[str(index)]}
                for index, group in enumerate(whole["param_groups"])
            ]
        self.optimizer.load_state_dict(loaded)
        # torch casts to the weights' dtype: what goes on is what was saved.
        state = self.optimizer.state_dict()["state"] if known else {}
        for number in known.keys() & state.keys():
            now, saved = state[number], loaded["state"].get(number, {})
            now.update({key: _as_saved(saved[key], now[key]) for key in now.keys() & saved.keys()})
        for each, kept in zip(steppers(self.optimizer), values.get("attributes", ()), strict=False):
            vars(each).update(kept)

    def _sorted(self, entries: Mapping[str, Any]) -> tuple[Entries, Entries]:
        """The state by the parameters' names, and the options by the groups' indices."""
        state, options = (
            defaultdict[str, dict[str, Any]](dict),
            defaultdict[str, dict[str, Any]](dict),
        )
        for key, value in entries.items():
            kind, _, name = key.partition("/")
            if kind == "group":
                index, _, option = name.partition("/")
                options[index][option] = value
            elif name in self.parameters:
                state[name][kind] = value
        return state, options

    def _require_same_kind(self, saved: str, present: Mapping[str, Tensor], keys: set[str]) -> None:
        begun = {key.partition("/")[2] for key in keys}
        unknown = sorted(k for k in present if k not in keys and k.partition("/")[2] in begun)
        if saved != self.name or unknown:
            lacks = f", whose state lacks {unknown[0]}" if saved == self.name else ""
            raise ConfigError(
                f"The run was made with the optimizer {saved}{lacks}; it is {self.name} now.",
                "Use the optimizer of before, or start anew with --no-resume.",
                id="changed-arithmetic",
            )

    def _room(
        self, key: str, value: Tensor, present: Tensor | None, on_device: Collection[int]
    ) -> Tensor:
        """A tensor for a checkpoint's value, where the optimizer would have made it."""
        if present is not None and (present.shape, present.dtype) == (value.shape, value.dtype):
            return present
        kind, like = key.partition("/")[0], self._parameter_of(key)
        if like is None:
            device = next(iter(self.parameters.values())).device
            return torch.zeros_like(value, device=device if value.ndim else "cpu")
        if kind == "step" and id(like) not in on_device:
            return torch.zeros_like(value, device="cpu")
        if value.shape == like.shape:
            return torch.zeros_like(like, dtype=value.dtype).detach()
        return local(like).new_zeros(value.shape, dtype=value.dtype).detach()

    def _counted_on_device(self) -> set[int]:
        """The `id` of the parameters whose steps are counted there, as torch's `load_state_dict`
        has it."""
        return {
            id(parameter)
            for group in self.optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for parameter in group["params"]
        }


def _as_saved(saved: Any, loaded: Any) -> Any:
    """What was saved; of tensors what was loaded, unless it was cast."""
    if isinstance(loaded, Tensor):
        return saved if isinstance(saved, Tensor) and saved.dtype != loaded.dtype else loaded
    if isinstance(saved, dict):
        return {key: _as_saved(value, loaded[key]) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(map(_as_saved, saved, loaded))
    return saved
