"""All that a run goes on with after a step."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tpukit.hardware.backend import Backend
from tpukit.hardware.modules import is_made_later, local
from tpukit.train.checkpoint import Checkpoint, PlainState, StateDict
from tpukit.train.config import TrainConfig
from tpukit.train.finite import is_finite
from tpukit.train.learner import Learner, build_learner, seed_everything
from tpukit.train.module_state import load_weights, pack_state, tensors_of
from tpukit.train.optimizer import averages_of
from tpukit.train.plan import RunPlan
from tpukit.train.task import Task
from tpukit.train.weights import initial_model


class RunState(Stateful):
    """A plan's learner, and what else a resumed run needs; no generator is in it, as draws are a
    function of seed and step."""

    def __init__(self, plan: RunPlan, learner: Learner) -> None:
        self.plan = plan
        self.learner = learner
        self.resumed_from: int | None = None
        """The step of the checkpoint that was loaded."""
        self.stream: bytes | None = None
        """Position of the training stream."""
        self.best: dict[str, float] = {}
        """The best validation so far: its metric, and `step`."""
        self.since_best = 0
        """Validations since the last improvement."""
        self._copies: dict[str, dict[str, Tensor]] = {}
        """Room for a save's copies, of a state in shards: new memory takes four times as long to
        fill."""

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return self.learner.steps_done

    @property
    def is_in_shards(self) -> bool:
        """Whether ranks hold parts of tensors."""
        return any(isinstance(each, DTensor) for each in self.learner.model.parameters())

    def make_room(self) -> Callable[[], list[Tensor]]:
        """Takes memory for the copies that the saves of a state in shards make, once its optimizer
        has a state. Returns what fills it, on any thread: the system hands out a page when it is
        first written to."""
        for name, tensors in self._tensors():
            shards = {key: t.detach() for key, t in tensors.items() if isinstance(t, DTensor)}
            self._copies[name] = {k: torch.empty_like(t, device="cpu") for k, t in shards.items()}
        rooms = [local(room) for named in self._copies.values() for room in named.values()]
        return lambda: [room.zero_() for room in rooms]

    def _tensors(self) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """What a checkpoint holds on devices."""
        yield "model", self.learner.model_tensors()
        yield "optimizer", self.learner.optimizer_state.tensors()
        with self.learner.evaluation_weights() as averaged:
            if averaged:
                yield "ema", averaged

    def state_dict(self) -> StateDict:
        """Copies on the host: of shards on each rank's, else on the main rank's. Every rank calls
        it; those of shards are written over by the next call."""
        learner, backend = self.learner, self.learner.backend
        model = learner.model_tensors()
        copies = {name: self._copy(name, each) for name, each in self._tensors()}
        plain = PlainState(
            step=self.step,
            task=self.plan.task.name,
            identity=self.plan.identity,
            scaler=dict(backend.state()["scaler"]),
            optimizer=learner.optimizer_state.values(),
            best=self.best,
            since_best=self.since_best,
            window=backend.to_host({"window": learner.window})["window"].tolist(),
            not_finite=learner.not_finite_at_start,
        )
        return {
            **copies,
            "plain": plain,
            "extra": pack_state(backend.unwrap(learner.model).state_dict()),
            "artifacts": self.plan.datasets.artifacts,
            "stream": self.stream,
            "trained": {name for name, tensor in model.items() if tensor.requires_grad},
        }

    def _copy(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = self.learner.backend.to_host(tensors, to_save=True, into=self._copies.get(name))
        if self.is_in_shards:
            self._copies[name] = copies
        return copies

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a checkpoint's state, but for the weights: a model is placed with them."""
        plain, learner, backend = state_dict["plain"], self.learner, self.learner.backend
        stored: Checkpoint = state_dict["stored"]
        learner.optimizer_state.restore(
            plain.optimizer,
            stored.shapes("optimizer"),
            lambda rooms: stored.load("optimizer", rooms, backend),
        )
        if learner.ema:
            backend.load(learner.ema.weights, state_dict["ema"])
        backend.load({"window": learner.window}, {"window": torch.tensor(plain.window)})
        learner.steps_done = self.resumed_from = plain.step
        learner.not_finite_at_start = plain.not_finite
        backend.load_state({"scaler": plain.scaler})
        self.best, self.since_best = dict(plain.best), plain.since_best
        self.stream = state_dict["stream"]


def load_run_state(
    plan: RunPlan, backend: Backend, checkpoint: Checkpoint | None = None
) -> RunState:
    """The state as a checkpoint left it, or as the seed and the data initialise it."""
    start = _Start(plan, backend, checkpoint)
    state = RunState(plan, build_learner(plan.task, backend, start.make, plan.config))
    if start.is_unfilled:
        start.finish(backend.unwrap(state.learner.model))
    state.learner.not_finite_at_start = start.not_finite
    if checkpoint is not None:
        state.load_state_dict({**checkpoint.state_dict(), "ema": start.averages})
    return state


def load_learner(task: Task, config: TrainConfig, backend: Backend) -> Learner:
    """The learner of a memory trial, of which only shapes matter."""
    seed_everything(config.global_seed)
    return build_learner(task, backend, initial_model(task, backend, config), config)


class _Start:
    """A run's model, on the host or, where no host holds it, once it is placed."""

    def __init__(self, plan: RunPlan, backend: Backend, checkpoint: Checkpoint | None) -> None:
        self.plan, self.backend, self.checkpoint = plan, backend, checkpoint
        self.is_unfilled = False
        """Whether tensors of the model were made after it."""
        self.averages: dict[str, Tensor] = {}
        self.not_finite: list[str] = []

    def make(self) -> nn.Module:
        plan = self.plan
        seed_everything(plan.config.global_seed)
        model = initial_model(plan.task, self.backend, plan.config, self.checkpoint, plan.datasets)
        self.is_unfilled = any(map(is_made_later, model.parameters()))
        if not self.is_unfilled:
            self.finish(model)
        return model

    def finish(self, model: nn.Module) -> None:
        """Reads a checkpoint's weights into a model that is placed, and its EMA weights; of a new
        run, what is not finite."""
        stored, unfilled = self.checkpoint, self.is_unfilled
        if stored is None:
            named = {**dict(model.named_parameters()), **tensors_of(model)}
            found = [name for name, tensor in named.items() if not is_finite(local(tensor))]
            of_ranks = self.backend.all_gather_objects(found) if unfilled else [found]
            self.not_finite = [name for name in named if any(name in each for each in of_ranks)]
            return

        def read(averaged: bool) -> dict[str, Any]:
            if unfilled:
                return stored.weights_of(model, self.backend, averaged=averaged)
            return stored.weights(averaged=averaged)

        if self.plan.config.ema_decay is not None:
            self.averages = averages_of(model, read)
        elif unfilled:
            load_weights(model, read(averaged=False), str(stored.path))
