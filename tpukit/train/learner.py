"""One optimizer step: what the engine repeats and what a trial measures."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpukit.errors import UsageError
from tpukit.hardware.backend import Average, Backend, Batch, StepDroppedError, StepSums
from tpukit.train.checks import check_loss
from tpukit.train.config import TrainConfig
from tpukit.train.loss_inputs import LossInputs
from tpukit.train.module_state import parameters_in, tensors_of
from tpukit.train.optimizer import (
    EMA,
    build_optimizer,
    errors_named,
    rates_of,
    require_rates,
    start_ema,
)
from tpukit.train.optimizer_state import OptimizerState
from tpukit.train.passes import BeforePasses, Passes
from tpukit.train.task import Task, overrides
from tpukit.train.user_code import place_of

MOST_SUMS = 16
"""Length of the device's vector of sums: fixed, so that the first step's graph is every step's."""


class BatchSums:
    """The forward pass, and weighted sums over a data set that stay on the device until read."""

    def __init__(self, task: Task, backend: Backend, model: nn.Module) -> None:
        self.task = task
        self.backend = backend
        self.model = model
        self.inputs = LossInputs(task, backend, model)
        self._names: list[str] = []
        self._totals = torch.zeros(MOST_SUMS, device=backend.device)

    def forward(self, batch: Batch, known: list[str]) -> tuple[list[str], Tensor]:
        """Names of the metrics, and [total weight, weighted sum of each metric, 0 ...]."""
        with self.backend.autocast(), self.inputs.watching(batch):
            returned = self.backend.call(self.model, self.task.loss, batch)
        outputs = check_loss(returned, self.task.loss, len(batch["mask"]))
        self.inputs.look_at(outputs)
        names = metric_names(outputs, known, self.task.loss)
        return names, weighted_sums(outputs, names, batch["mask"])

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Adds one batch's weighted sums, with the model's present weights."""
        self.backend.run(self._add, [batch], 0.0)
        self.backend.finish()

    def _add(self, batches: Sequence[Batch], _: float | Tensor) -> None:
        self._names, part = self.forward(batches[0], self._names)
        self._totals += part

    def read(self) -> dict[str, float]:
        """The weighted means over all ranks, NaN of nothing; starts the sums anew."""
        totals = self.backend.all_reduce_sum(self._totals)
        weight, *sums = self.backend.to_host({"totals": totals})["totals"].tolist()
        self._totals.zero_()
        self.backend.finish()
        weight = weight or math.nan
        return {name: total / weight for name, total in zip(self._names, sums, strict=False)}


def metric_names(
    outputs: Mapping[str, Tensor], known: list[str], method: Callable[..., object]
) -> list[str]:
    """`loss` and the task's other entries, in the order of `known` where it is not empty.

    Raises UsageError where these are other entries than those of the micro-batch before: the sums
    are added up by position.
    """
    names = ["loss", *(name for name in outputs if name not in ("loss", "weight"))]
    if known and set(names) != set(known):
        raise UsageError(
            f"{place_of(method)} returned {', '.join(known)} for one micro-batch and"
            f" {', '.join(names)} for another.",
            "Return the same keys from `loss` for every batch.",
            id="metric-names",
        )
    return known or names


def weighted_sums(outputs: dict[str, Tensor], names: Sequence[str], mask: Tensor) -> Tensor:
    """(MOST_SUMS,): sum(weight), then sum(weight value) of each entry, then zeros.

    Without a `weight` each unmasked row counts 1; a 0-d value is a mean over all that counts. What
    weighs nothing may be of any value, NaN too: the mean of a rank without samples, say.
    """
    mask = mask.float()
    weight = outputs.get("weight")
    if outputs["loss"].ndim == 1:
        weight = mask if weight is None else weight.float() * mask
    else:
        weight = mask.sum() if weight is None else weight.float()
    total = weight.sum()
    sums = []
    for name in names:
        value = outputs[name].float()
        if value.ndim > weight.ndim:  # each row's value beside a mean
            value = _weighted_sum(value, mask) / mask.sum().clamp(min=1)
        sums.append(_weighted_sum(value, weight if value.ndim == weight.ndim else total))
    if len(sums) >= MOST_SUMS:
        raise UsageError(
            f"the task's loss gave {len(sums)} entries.", f"Return at most {MOST_SUMS - 1}."
        )
    return torch.nn.functional.pad(
        torch.stack([total.detach(), *sums]), (0, MOST_SUMS - 1 - len(sums))
    )


def _weighted_sum(value: Tensor, weight: Tensor) -> Tensor:
    return (torch.where(weight != 0, value, 0.0) * weight).sum()


# -- a step --------------------------------------------------------------------------------------
MASK_63 = 2**63 - 1


@dataclass(frozen=True)
class BadStep:
    """The first step whose loss or gradient was not finite: the state after it is lost."""

    number: int
    """From 1."""
    of_loss: bool
    parameters: Sequence[str] = ()
    """Whose gradients were not finite, at a finite loss; none where their norm overflowed."""


@dataclass(frozen=True)
class StepMetrics:
    """Means over the steps since the metrics were last read."""

    means: dict[str, float]
    """`loss` and the task's other entries."""
    steps: int
    gradient_norm: float
    """Before clipping, of the last step that was not skipped; NaN where all were."""
    largest_gradient_norm: float
    smallest_gradient_norm: float
    skipped: int
    """Steps that fp16's scaler left out, as their gradients were not finite."""
    bad: BadStep | None


class _Asked:
    """A step's question after each forward pass whether to drop it."""

    def __init__(self, interrupt: Callable[[int], bool], before: BeforePasses) -> None:
        self.interrupt = interrupt
        self.before = before
        self.passes = 0

    def drops(self, passes: Passes) -> bool:
        """Whether it is dropped, and its passes are undone."""
        self.passes += 1
        if self.interrupt(self.passes) and passes.undo(self.before):
            return True
        passes.note(self.before)  # now: the optimizer moves all that is trained
        return False


class Learner:
    """A task's model on a backend, with its optimizer and EMA weights.

    All metrics stay on the device until `read_metrics`: reading one is a stop of the pipeline.
    """

    def __init__(
        self,
        task: Task,
        backend: Backend,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: EMA | None,
        clip_norm: float | None,
        seed: int = 0,
    ) -> None:
        self.task = task
        self.backend = backend
        self.model = model
        self.sums = BatchSums(task, backend, model)
        self.optimizer = optimizer
        names = dict(backend.unwrap(model).named_parameters())
        self.optimizer_state = OptimizerState(optimizer, names)
        by_parameter = {parameter: name for name, parameter in names.items()}
        self.trained = [
            by_parameter.get(p, "") for group in optimizer.param_groups for p in group["params"]
        ]
        """Names of the optimizer's parameters, in its order."""
        self._frozen = [parameter for parameter in names.values() if not parameter.requires_grad]
        self.not_finite_at_start: list[str] = []
        """Parameters and buffers that may stay so (a mask, a value that is not set yet)."""
        self.ema = ema
        self.clip_norm = clip_norm or None
        self.seed = seed
        self.steps_done = 0
        self._asked: _Asked | None = None
        self._rates: list[Any] = []
        """Those of the last step."""
        self._passes = Passes(backend.unwrap(model))
        self._names: list[str] = []
        device = backend.device
        self.window = torch.zeros(MOST_SUMS, device=device)
        self.step_sums = StepSums(MOST_SUMS, device)
        self._norms = _fresh_norms(device)
        self._latch = torch.zeros(3, device=device)
        """[steps made, the first of these with a loss that is not finite, with such a gradient]."""
        self.finite = torch.ones(len(self.trained), device=device)
        """0 for each trained parameter whose gradient was not finite in the last step."""
        self._finite_then = torch.ones(len(self.trained), device=device)
        """The same of the first step with such a gradient."""
        self._skips = backend.precision == "fp16"
        """Whether a step whose gradient is not finite is skipped: its state stays finite."""

    # -- training ---------------------------------------------------------------------------------
    def train_step(
        self, batches: Sequence[Batch], lr: float, interrupt: Callable[[int], bool] | None = None
    ) -> bool:
        """One optimizer step over its micro-batches (device batches of this rank).

        interrupt: asked after each forward pass, with their number; where it says so the step is
            dropped, and its state is that from before. Returns whether the step was made.
        """
        self._asked = None if interrupt is None else _Asked(interrupt, self._passes.before())
        require_rates(self.optimizer, self._rates)
        if self.ema:
            self.ema.follow()
        self.seed_draws()
        weight = self.ema.schedule.weight(self.steps_done + 1) if self.ema else 0.0
        try:
            with errors_named(self.optimizer, self.optimizer_state.parameters):
                if not self.backend.train_step(self, batches, lr, weight):
                    return False
        finally:
            self._asked = None
        self._rates = rates_of(self.optimizer)
        self.steps_done += 1
        if any(parameter.requires_grad for parameter in self._frozen):
            self.require_known_parameters()
        return True

    def require_known_parameters(self) -> None:
        """Raises UsageError for what was frozen, or no parameter of the model, when training began,
        and is to be trained now: optimizer, EMA weights and other ranks do not know it."""
        known, frozen = self.optimizer_state.parameters, set(map(id, self._frozen))
        for name, parameter in self.backend.unwrap(self.model).named_parameters():
            is_known = known.get(name) is parameter
            if parameter.requires_grad and (id(parameter) in frozen or not is_known):
                what = "was frozen" if is_known else "was not a parameter of the model"
                raise UsageError(
                    f"{name!r} {what} when training began, and is to be trained after step"
                    f" {self.steps_done}: no optimizer trains it.",
                    "Have `build_model` return it with requires_grad, and set that to False in"
                    " `loss` until then; write new values into it in place.",
                    id="task-value",
                )

    def seed_draws(self) -> None:
        """Has the next step's passes draw what seed and step decide, whatever drew before: a
        validation, a callback, the run that was resumed."""
        seed_loss(self.backend, self.seed, self.steps_done)

    # -- what a step is made of: see `Trained` ----------------------------------------------------
    def forward(self, batch: Batch) -> Tensor:
        """(MOST_SUMS,): see `weighted_sums`."""
        self._names, part = self.sums.forward(batch, self._names)
        if self._asked is not None and self._asked.drops(self._passes):
            raise StepDroppedError
        return part

    @property
    def after_step(self) -> Callable[[nn.Module], object] | None:
        """The task's own, where it has one."""
        return self._after_optimizer if overrides(self.task, "after_step") else None

    def _after_optimizer(self, model: nn.Module) -> None:
        rates = rates_of(self.optimizer)
        self.task.after_step(model)
        require_rates(self.optimizer, rates)

    def average(self, weight: float | Tensor) -> Average | None:
        return self.ema.update(weight) if self.ema else None

    @torch.no_grad()
    def record(self, totals: Tensor, weight: Tensor, norm: Tensor) -> None:
        """Updates the latch and the sums for the log in the step's own graph."""
        self.window += totals / weight
        norm = norm.detach().float()
        self._update_latch(totals[1], norm)
        self._update_norms(norm)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the context the model is in eval mode; what its passes move there too (observed
        ranges of quantization, a count) is put back: no validation changes the training."""
        before = self._passes.before(outside_of_step=True)
        self.backend.finish()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.set_grad_enabled(True):  # a metric's code may switch gradients off for good
                yield
        finally:
            self.model.train()
            for module, mode in modes:  # a part that the task has put into eval mode stays in it
                module.training = mode
            self._passes.put_back(before)
            self.backend.finish()

    def _update_latch(self, loss: Tensor, norm: Tensor) -> None:
        steps, bad_loss, bad_gradient = self._latch.unbind()
        steps = steps + 1
        is_first = ~torch.isfinite(norm) & (bad_gradient == 0)
        self._finite_then.copy_(torch.where(is_first, self.finite, self._finite_then))
        bad_gradient = torch.where(is_first, steps, bad_gradient)
        bad_loss = torch.where(~torch.isfinite(loss) & (bad_loss == 0), steps, bad_loss)
        self._latch.copy_(torch.stack([steps, bad_loss, bad_gradient]))

    def _update_norms(self, norm: Tensor) -> None:
        counts = torch.isfinite(norm) if self._skips else torch.ones_like(norm) > 0
        last, largest, smallest, skipped = self._norms.unbind()
        self._norms.copy_(
            torch.stack([
                torch.where(counts, norm, last),
                torch.where(counts, torch.maximum(norm, largest), largest),
                torch.where(counts, torch.minimum(norm, smallest), smallest),
                skipped + (~counts).float(),
            ])
        )  # fmt: skip

    def read_metrics(self) -> StepMetrics:
        """Reads the metrics and starts them anew. Every rank must call it."""
        host = self.backend.to_host(
            {"window": self.window, "norms": self._norms, **self._latched()}
        )
        steps, *sums = host["window"].tolist()
        last, largest, smallest, skipped = host["norms"].tolist()
        self.window.zero_()
        self._norms.copy_(_fresh_norms(self._norms.device))
        self.backend.finish()
        # Two reads in a row have no step between them; a step may count nothing.
        count = steps or float("nan")
        means = {name: total / count for name, total in zip(self._names, sums, strict=False)}
        largest = math.nan if largest == -math.inf else largest
        bad = self._bad_step(host)
        return StepMetrics(means, int(steps), last, largest, smallest, int(skipped), bad)

    def bad_step(self) -> BadStep | None:
        """The latch alone: the first step whose loss or gradient was not finite, if there is one.

        A gradient of a step that was skipped does not count.
        """
        return self._bad_step(self.backend.to_host(self._latched()))

    def forget_bad_step(self) -> None:
        """Lets what follows count as the first steps."""
        self._latch.zero_()
        self.backend.finish()

    def _latched(self) -> dict[str, Tensor]:
        return {"latch": self._latch, "finite": self._finite_then}

    def _bad_step(self, host: Mapping[str, Tensor]) -> BadStep | None:
        made, bad_loss, bad_gradient = map(int, host["latch"].tolist())
        places = [place for place in (bad_loss, 0 if self._skips else bad_gradient) if place]
        if not places:
            return None
        number = self.steps_done - made + min(places)
        if min(places) == bad_loss:
            return BadStep(number, of_loss=True)
        pairs = zip(self.trained, host["finite"].tolist(), strict=True)
        return BadStep(number, of_loss=False, parameters=[name for name, one in pairs if not one])

    # -- state ------------------------------------------------------------------------------------
    @contextmanager
    def evaluation_weights(self) -> Iterator[Mapping[str, Tensor]]:
        """Within the context the model computes with the weights that are validated: those of the
        EMA, or of the optimizer's evaluation mode. Yields its tensors, {} where it has neither."""
        with (
            self.ema.in_place_of_weights() if self.ema else nullcontext(),
            self.optimizer_state.evaluation_mode() as own,
        ):
            yield self.model_tensors(frozen=False) if self.ema or own else {}

    def untrained(self) -> list[str]:
        """Parameters that a step gave a gradient, and that no group of the optimizer has."""
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        parameters = self.optimizer_state.parameters.items()
        return [name for name, p in parameters if p.grad is not None and id(p) not in known]

    def outside_of_model(self) -> list[str]:
        """Attributes of the task with parameters that a step gave a gradient, and that are none of
        the model's: a criterion's own."""
        known = set(map(id, self.optimizer_state.parameters.values()))
        return [
            f"{type(self.task).__name__}.{name}"
            for name, held in vars(self.task).items()
            if any(
                p.grad is not None and id(p) not in known
                for p in (*parameters_in([held]), *parameters_in(held))
            )
        ]

    def model_tensors(self, *, frozen: bool = True) -> dict[str, Tensor]:
        """The tensors of the module's state dict."""
        return tensors_of(self.backend.unwrap(self.model), frozen=frozen)


def _fresh_norms(device: torch.device) -> Tensor:
    """[last, largest, smallest gradient norm of the steps that were made, skipped steps]."""
    # Computed on the device: an upload would differ, in the compiled graph, from a step's result.
    place, found = torch.arange(4, device=device), torch.zeros(4, device=device)
    for index, value in enumerate((math.nan, -math.inf, math.inf)):
        found = torch.where(place == index, value, found)
    return found


def seed_everything(seed: int) -> None:
    """Seeds the host's generators: the weights of a new model come from torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed & MASK_63)


def seed_loss(backend: Backend, *key: int) -> None:
    """Has all generators draw what the key decides, and not what its data draw.

    Python's and NumPy's draw alike in each rank, torch's another number in each.
    """
    python, numpy, of_torch = np.random.SeedSequence((*key, 1)).generate_state(3).tolist()
    random.seed(python)
    np.random.seed(numpy)
    backend.load_state({"seed": of_torch})


def build_learner(
    task: Task, backend: Backend, model: nn.Module | Callable[[], nn.Module], config: TrainConfig
) -> Learner:
    """The learner of a model whose weights are loaded and which is on the CPU still, or of what
    makes one: see `Backend.prepare`."""
    prepared = backend.prepare(model)
    prepared.train()
    optimizer = build_optimizer(task, backend, prepared, config)
    ema = start_ema(config, backend.unwrap(prepared), optimizer)
    learner = Learner(task, backend, prepared, optimizer, ema, config.clip_norm, config.global_seed)
    # What was just made must not become part of the first step's graph.
    backend.finish()
    return learner
