"""A run's optimizer and its EMA weights: built for a prepared model, their state."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tpukit.errors import ConfigError, UsageError
from tpukit.hardware.backend import Average, Backend, OptimizerSettings, ParameterGroup
from tpukit.hardware.modules import exchange, persistent_buffers, running_statistics
from tpukit.hardware.optimizers import require_steppable
from tpukit.train.checks import expect
from tpukit.train.config import EMAUpdates, TrainConfig
from tpukit.train.task import Task

SET_EACH_STEP = ("params", "lr")
"""Options of a group that a checkpoint leaves out."""
Plain = int | float | bool | str | None


def build_optimizer(
    task: Task, backend: Backend, model: nn.Module, config: TrainConfig
) -> Optimizer:
    """The task's own optimizer over a prepared model, or the one that the config names.

    Raises UsageError where the engine cannot step it.
    """
    betas, eps = (config.beta1, config.beta2), task.defaults.adam.eps
    settings = OptimizerSettings(betas, eps, config.optimizer, config.lr, config.momentum)
    groups = list(task.parameter_groups(backend.unwrap(model), config.weight_decay))
    for group in groups:
        expect(
            group, ParameterGroup, task.parameter_groups, "ParameterGroup(parameters, ...) objects"
        )
    own = task.build_optimizer(groups, settings)
    if own is not None:
        require_steppable(own)
    optimizer = backend.optimizer(groups, settings, own)
    known = {id(parameter) for parameter in backend.unwrap(model).parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained or not known.issuperset(map(id, trained)):
        raise UsageError(
            f"the optimizer of {type(task).__name__} trains "
            + ("no parameter." if not trained else "tensors that are not the model's parameters."),
            "Build it over the groups that `build_optimizer` is given, and leave some parameters"
            " with requires_grad.",
            id="optimizer",
        )
    return optimizer


class OptimizerState:
    """The state of one optimizer, whatever its class.

    `KEY/NAME` is the state `KEY` of the parameter `NAME`, `group/INDEX/KEY` a group's own. Of a
    group's options those are state that changed since the optimizer was made.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self._first = [dict(self._options(group)) for group in optimizer.param_groups]

    @property
    def name(self) -> str:
        """The class, by one name on all hardware."""
        return type(self.optimizer).__name__.removeprefix("Xla")

    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors by name, the parameters in their model's order."""
        return {key: value for key, value in self._entries() if isinstance(value, Tensor)}

    def values(self) -> dict[str, Any]:
        """The state without tensors. Raises UsageError for a value that JSON does not hold."""
        others = {key: value for key, value in self._entries() if not isinstance(value, Tensor)}
        odd = next((k for k, v in others.items() if not isinstance(v, Plain)), None)
        if odd is not None:
            raise UsageError(
                f"the optimizer {self.name} keeps a {type(others[odd]).__name__} as {odd}, which a"
                " checkpoint cannot hold.",
                "Use an optimizer whose state is tensors and numbers.",
                id="optimizer",
            )
        return {"class": self.name, "values": others} if others else {"class": self.name}

    def _entries(self) -> Iterator[tuple[str, Any]]:
        strays = self.optimizer.state.keys() - set(self.parameters.values())
        for name, parameter in self.parameters.items():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                yield f"{key}/{name}", value
        for stray in strays:
            yield f"state of {type(stray).__name__}", stray
        for index, group in enumerate(self.optimizer.param_groups):
            for key, value in self._options(group):
                if isinstance(value, Tensor) or value != self._first[index].get(key):
                    yield f"group/{index}/{key}", value

    def _options(self, group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        return ((key, value) for key, value in group.items() if key not in SET_EACH_STEP)

    # -- restoring --------------------------------------------------------------------------------
    def restore(
        self, backend: Backend, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        """Fills the state from a checkpoint. Raises ConfigError where another optimizer wrote it.

        values: empty in checkpoints of versions before 0.3, whose optimizer is AdamW.
        """
        saved = values.get("class", "AdamW")
        unknown = sorted(self.tensors().keys() - tensors.keys())
        if saved != self.name or unknown:
            lacks = f", whose state lacks {unknown[0]}" if saved == self.name else ""
            raise ConfigError(
                f"The run was made with the optimizer {saved}{lacks}; it is {self.name} now.",
                "Use the optimizer of before, or start anew with --no-resume.",
                id="changed-arithmetic",
            )
        self._make_room(tensors)
        backend.load(self.tensors(), tensors)
        for key, value in values.get("values", {}).items():
            self._set(key, value)

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """State that the optimizer would have made in a later step."""
        for key in tensors.keys() - self.tensors().keys():
            like = self.parameters[key.partition("/")[2]]
            fits = tensors[key].shape == like.shape
            room = torch.zeros_like(like) if fits else like.new_zeros(tensors[key].shape)
            self._set(key, room.detach())

    def _set(self, key: str, value: Any) -> None:
        kind, _, name = key.partition("/")
        if kind == "group":
            index, _, option = name.partition("/")
            self.optimizer.param_groups[int(index)][option] = value
        else:
            self.optimizer.state[self.parameters[name]][kind] = value


# -- exponential moving average (EMA) of the weights ---------------------------------------------
@dataclass(frozen=True)
class EMASchedule:
    """When the EMA weights are updated, and with which decay.

    An update is due after steps 1, 1 + `every`, 1 + 2 `every`, ... Until the last update of the
    first 1 + `warmup` steps the EMA weights are the weights; n steps after these d is
    min(decay, 1 - (1 + n)^(-2/3)), as in ema_pytorch (`update_after_step`, inv_gamma 1, power 2/3).
    Without a warm-up d is `decay`, and the EMA keeps the initial weights for about
    `every` / (1 - decay) steps.
    """

    decay: float
    every: int = 1
    warmup: int = 100
    updates: EMAUpdates = "ema_pytorch"

    def weight(self, steps_done: int) -> float:
        """1 - d of the update after step `steps_done` (from 1); 0 where none is due."""
        index = steps_done if self.updates == "multiples" else steps_done - 1
        if self.warmup == 0:
            return 1 - self.decay if index % self.every == 0 else 0.0
        last_copy = self.warmup // self.every * self.every
        if index <= last_copy and self.updates != "multiples":
            return 1.0
        if index % self.every:
            return 0.0
        if self.updates == "ema_pytorch-0.5.2" and index == last_copy + self.every:
            return 1.0
        since = max(index - self.warmup, 0)
        return 1 - min(self.decay, 1 - math.pow(1 + since, -2 / 3))


class EMA:
    """EMA weights <- d EMA weights + (1 - d) weights, by a schedule.

    `weights` mirrors by name the trained parameters, in their placement (sharded or not), and the
    persistent buffers. Averaged is what is a mean: parameters and the running statistics of
    normalisation. Every other buffer (counts, queues, singular vectors, observed ranges) is copied.
    """

    def __init__(self, model: nn.Module, schedule: EMASchedule) -> None:
        """Starts at the present values of a prepared model."""
        self.parameters: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        places = [name.rpartition(".") for name in persistent_buffers(model)]
        self._modules = [(model.get_submodule(of), of + dot, name) for of, dot, name in places]
        self._averaged = self.parameters.keys() | running_statistics(model)
        self.weights = {n: t.detach().clone() for n, t in self._trained().items()}
        self.schedule = schedule

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The present ones: a model may put another tensor in a buffer's place."""
        return {prefix + name: getattr(module, name) for module, prefix, name in self._modules}

    @property
    def copied_floats(self) -> list[str]:
        """Names of the buffers of floats that are no running statistics."""
        floats = (n for n, buffer in self.buffers.items() if buffer.is_floating_point())
        return [name for name in floats if name not in self._averaged]

    def _trained(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}

    def follow(self) -> None:
        """Takes over the buffers that have got another shape or type: an observer's first range."""
        for name, buffer in self.buffers.items():
            kept = self.weights[name]
            if (kept.shape, kept.dtype) != (buffer.shape, buffer.dtype):
                self.weights[name] = buffer.detach().clone()

    def update(self, weight: float | Tensor) -> Average:
        """An update by this weight of the schedule."""
        # What this very step has given another shape is taken over after it.
        alike = {n: t for n, t in self._trained().items() if t.shape == self.weights[n].shape}
        averaged = [name for name in alike if name in self._averaged]
        copied = [name for name in alike if name not in self._averaged]
        (averages, sources), (copies, originals) = (
            ([self.weights[name] for name in names], [alike[name] for name in names])
            for names in (averaged, copied)
        )
        return Average(averages, sources, weight, copies, originals)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Within the context the model computes with the EMA weights."""
        self.follow()
        own = self._trained()
        pairs = [*own.values()], [self.weights[name] for name in own]
        exchange(*pairs)
        try:
            yield
        finally:
            exchange(*pairs)
            self._put_back(own)

    def _put_back(self, own: Mapping[str, Tensor]) -> None:
        """Takes the tensors that the model has put in the place of buffers meanwhile."""
        for module, prefix, name in self._modules:
            if (made := getattr(module, name)) is not own[prefix + name]:
                self.weights[prefix + name] = made.detach()
                setattr(module, name, own[prefix + name])


def start_ema(config: TrainConfig, model: nn.Module) -> EMA | None:
    """The EMA weights of a prepared model; None where the config has none."""
    if config.ema_decay is None:
        return None
    schedule = EMASchedule(
        config.ema_decay, config.ema_every, config.ema_warmup, config.ema_updates
    )
    trained = (p for p in model.parameters() if p.requires_grad)
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in trained):
        raise ConfigError(
            "ema_decay: an average in half precision would stay where it is.",
            "Leave ema_decay out, or keep the weights in fp32.",
        )
    return EMA(model, schedule)
