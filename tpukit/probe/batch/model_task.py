"""Any `nn.Module` as a task of the batch search: synthetic inputs, its outputs' sum as the loss."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Batch, ModelOps
from tpukit.probe.trials.carried import copied
from tpukit.train.task import Datasets, PlanSettings, Task
from tpukit.train.user_code import import_user_file, import_user_module

Factory = Callable[..., nn.Module]
FLOATS = ("float32", "bfloat16", "float16")
WHOLE = ("int64", "int32", "uint8", "bool")
INPUT = re.compile(
    r"(?P<name>[A-Za-z_]\w*)=(?P<shape>scalar|[1-9]\d*(?:x[1-9]\d*)*)"
    rf"(?::(?P<dtype>{'|'.join((*FLOATS, *WHOLE))}))?(?:<(?P<limit>[1-9]\d*))?"
)
INPUT_HINT = (
    "Write NAME=SHAPE without the batch, then :DTYPE, then <N for whole numbers from 0 to N - 1:"
    " image=3x224x224, 'input_ids=128:int64<1000', t=scalar."
)


@dataclass(frozen=True)
class InputSpec:
    """One input of a model: the shape of one sample."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    limit: int
    """Whole numbers lie in 0..limit - 1."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `NAME=SHAPE[:DTYPE[<N]]`. Raises ConfigError that says what was expected."""
        match = INPUT.fullmatch(text.strip())
        dtype = (match["dtype"] or FLOATS[0]) if match else ""
        if match is None or (match["limit"] and dtype not in WHOLE[:-1]):
            raise ConfigError(f"--input {text!r} cannot be read.", INPUT_HINT)
        shape = () if match["shape"] == "scalar" else map(int, match["shape"].split("x"))
        return cls(match["name"], tuple(shape), dtype, int(match["limit"] or 2))

    def batch(self, rows: int, generator: torch.Generator) -> Tensor:
        """Synthetic values (rows, *shape)."""
        shape, dtype = (rows, *self.shape), getattr(torch, self.dtype)
        if self.dtype in FLOATS:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(self.limit, shape, generator=generator).to(dtype)


class ModelTask(Task):
    """A model without a task: its inputs are synthetic, and its loss is its own or a sum."""

    name = "model"

    def __init__(
        self, model: str | Factory | nn.Module, inputs: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        """model: `FILE:FUNCTION`, `package.module:function`, a function that takes `settings`, or
        a module."""
        if not inputs:
            raise ConfigError(f"the model {model_label(model)} has no input.", INPUT_HINT)
        self.model = absolute(model) if isinstance(model, str) else model
        self.label = model_label(model)
        self.inputs = [InputSpec.parse(text) for text in inputs]
        self.settings = dict(settings)
        self.keywords: set[str] = set()

    def build_model(self, ops: ModelOps) -> nn.Module:
        model = self._built()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{self.label} returns {type(model).__name__}, not a module.",
                "Return a torch.nn.Module.",
            )
        named = inspect.signature(model.forward).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.keywords = {parameter.name for parameter in named if parameter.kind in kinds}
        return model

    def _built(self) -> Any:
        if isinstance(self.model, nn.Module):
            return copied(self.model)
        factory = load_factory(self.model) if isinstance(self.model, str) else self.model
        return factory(**self.settings)

    def datasets(self) -> Datasets:
        raise ConfigError(f"{self.label} has no data: it can be sized, not trained.")

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        rows = settings.micro_rows
        generator = torch.Generator().manual_seed(0)
        batch = {input_key(spec.name): spec.batch(rows, generator) for spec in self.inputs}
        return [{**batch, "mask": torch.ones(rows)}]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The model's own `loss`, else the sum of its floating-point outputs."""
        given = {spec.name: batch[input_key(spec.name)] for spec in self.inputs}
        positional = [value for name, value in given.items() if name not in self.keywords]
        named = {name: value for name, value in given.items() if name in self.keywords}
        outputs = model(*positional, **named)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is not None:
            return {"loss": loss.float().mean()}
        trains = torch.is_grad_enabled()
        found = [t for t in tensors_in(outputs) if t.requires_grad or not trains]
        if not found:
            raise ConfigError(
                f"{self.label} returns {type(outputs).__name__} without a tensor to learn from.",
                "Return tensors that depend on its parameters, alone or in a tuple or a dict.",
            )
        # Summed in fp32 without a copy in fp32.
        return {"loss": torch.stack([t.sum(dtype=torch.float32) for t in found]).sum()}


def input_key(name: str) -> str:
    """The name of an input in a batch, where `mask` belongs to the engine."""
    return f"input_{name}"


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Every floating-point tensor in a model's outputs: tuples, dicts and dataclasses of them."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from tensors_in(value)
    elif is_dataclass(outputs):
        for field in fields(outputs):
            yield from tensors_in(getattr(outputs, field.name))


# -- the function that builds a model ------------------------------------------------------------
def model_label(model: str | Factory | nn.Module) -> str:
    """A model in messages."""
    if isinstance(model, str):
        return model
    return getattr(model, "__name__", None) or type(model).__name__


def absolute(spec: str) -> str:
    """The specification with its file's whole path. Raises ConfigError where there is no file."""
    place, _, name = spec.rpartition(":")
    if not place.endswith(".py"):
        return spec
    if not Path(place).is_file():
        raise ConfigError(f"--model: there is no file {place}.", "Check the path before the colon.")
    return f"{Path(place).resolve()}:{name}"


def load_factory(spec: str) -> Factory:
    """The function that `FILE:FUNCTION` or `package.module:function` names.

    Raises ConfigError naming what there is instead.
    """
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        found = vars(import_user_file(Path(place), "--model"))
    else:
        found = vars(import_user_module(place, Path(), "--model"))
    factory = found.get(name)
    if not callable(factory):
        own = [n for n, v in found.items() if inspect.isfunction(v) and not n.startswith("_")][:8]
        raise ConfigError(
            f"--model: {place} has no function {name!r}.",
            f"It has {', '.join(own)}." if own else "Define one there that returns the model.",
        )
    made: Factory = factory
    return made
