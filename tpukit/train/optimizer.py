"""A run's optimizer and its EMA weights: built for a prepared model, their state."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tpukit.errors import ConfigError, TpukitError, UsageError
from tpukit.hardware.backend import Average, Backend, OptimizerSettings, ParameterGroup
from tpukit.hardware.memory import is_out_of_memory
from tpukit.hardware.modules import exchange, persistent_buffers, running_statistics
from tpukit.hardware.optimizers import has_modes, steppers
from tpukit.hardware.steppable import require_steppable
from tpukit.train.checks import expect, task_mistake
from tpukit.train.config import EMAUpdates, TrainConfig
from tpukit.train.module_state import load_weights
from tpukit.train.task import Task
from tpukit.train.user_code import cause_line, task_failure


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
    counts = Counter(parameter for group in groups for parameter in group.parameters)
    for name, parameter in backend.unwrap(model).named_parameters():
        if counts[parameter] > 1:
            raise task_mistake(
                task.parameter_groups, f"has {name!r} in {counts[parameter]} groups",
                "Leave it out of all but one: a tied weight is one parameter of several names.",
            )  # fmt: skip
    own = task.build_optimizer(groups, settings)
    if own is not None:
        require_steppable(own)
        _require_no_scheduler(task, own)
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


def _require_no_scheduler(task: Task, optimizer: Optimizer) -> None:
    """Raises UsageError for a scheduler of torch: it sets rates when it is made, and is then
    without effect."""
    held = any(isinstance(value, LRScheduler) for value in vars(task).values())
    if held or any(hasattr(each.step, "_wrapped_by_lr_sched") for each in steppers(optimizer)):
        raise UsageError(
            f"{type(task).__name__} has a scheduler of torch for {type(optimizer).__name__}, whose"
            " rates the engine sets before each step.",
            "Have the task's `learning_rate(step, total_steps, config)` return the rate of a step,"
            " or use --set schedule=cosine.",
            id="optimizer",
        )


def rates_of(optimizer: Optimizer) -> list[Any]:
    """Each group's rate where it is a number."""
    return [None if isinstance(g["lr"], Tensor) else g["lr"] for g in optimizer.param_groups]


def require_rates(optimizer: Optimizer, expected: list[Any]) -> None:
    """Raises UsageError where the task has changed a rate, which would have no effect."""
    for found, rate in zip(rates_of(optimizer), expected, strict=False):
        if found != rate and None not in (found, rate):
            raise UsageError(
                f"the task set the learning rate of {type(optimizer).__name__} to {found:g}: the"
                " engine sets it before each step.",
                "Have the task's `learning_rate(step, total_steps, config)` return it, or change"
                " the group's factor on it, `lr_scale`.",
                id="optimizer",
            )


@contextmanager
def errors_named(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Names what a step cannot use: sparse gradients, and the optimizer in what a library's own
    raises in its step."""
    try:
        yield
    except Exception as error:
        grads = ((name, parameter.grad) for name, parameter in parameters.items())
        if sparse := [name for name, grad in grads if grad is not None and grad.is_sparse]:
            raise UsageError(
                f"the gradient of {sparse[0]!r} is sparse: sparse gradients are neither reduced"
                " over devices nor clipped.",
                "Leave sparse=True out.",
                id="task-value",
            ) from error
        frames = (frame for frame, _ in walk_tb(error.__traceback__))
        within = any(frame.f_locals.get("self") is optimizer for frame in frames)
        if not within or isinstance(error, TpukitError) or is_out_of_memory(error):
            raise
        if task_failure(error) is not None:
            raise
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} raised {cause_line(error)} in its step.",
            "A step gives it gradients, and nothing else: no closure, no graph of the gradients."
            " Check its options, or use AdamW, SGD, Adafactor or Lion.",
            id="optimizer",
        ) from error


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


def start_ema(config: TrainConfig, model: nn.Module, optimizer: Optimizer) -> EMA | None:
    """The EMA weights of a prepared model; None where the config has none."""
    if config.ema_decay is None:
        return None
    if has_modes(optimizer):
        raise ConfigError(
            f"ema_decay: {type(optimizer).__name__} keeps an average of its own, which validation,"
            " `test` and `predict` use.",
            "Leave ema_decay out, also of the task's `defaults`.",
        )
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


def averages_of(model: nn.Module, read: Callable[[bool], Mapping[str, Any]]) -> dict[str, Tensor]:
    """A checkpoint's EMA weights by the names that `EMA` has for them.

    read: gives the checkpoint's state dict, with EMA weights where it is given True. What it does
        not hold of its own, frozen parameters and in early runs buffers, is the model's.
    """
    load_weights(model, read(True), "the checkpoint")
    own = {**dict(model.named_parameters()), **persistent_buffers(model)}
    averages = {name: tensor.detach().clone() for name, tensor in own.items()}
    load_weights(model, read(False), "the checkpoint")
    return averages
