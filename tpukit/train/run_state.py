"""All that a run goes on with after a step."""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from tpukit.hardware.backend import Backend
from tpukit.train.checkpoint import (
    Checkpoint,
    PlainState,
    StateDict,
    is_finite,
    pack_state,
    tensors_of,
)
from tpukit.train.learner import Learner, build_learner, seed_everything
from tpukit.train.optimizer import averages_of
from tpukit.train.plan import RunPlan
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

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return self.learner.steps_done

    def state_dict(self) -> StateDict:
        """Copies on the main rank's host. Every rank calls it."""
        learner, backend = self.learner, self.learner.backend
        model = learner.model_tensors()
        kept = {"model": model, "optimizer": learner.optimizer_state.tensors()}
        copies = {name: backend.to_host(each, main_only=True) for name, each in kept.items()}
        with learner.evaluation_weights() as averaged:
            if averaged:
                copies["ema"] = backend.to_host(averaged, main_only=True)
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a checkpoint's state, but for the weights: a model is placed with them."""
        plain, learner, backend = state_dict["plain"], self.learner, self.learner.backend
        learner.optimizer_state.restore(backend, plain.optimizer, state_dict["optimizer"])
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
    config = plan.config
    seed_everything(config.global_seed)
    model = initial_model(plan.task, backend, config, checkpoint, plan.datasets)
    if checkpoint is None:
        start = _not_finite(model)
        state = RunState(plan, build_learner(plan.task, backend, model, config))
        state.learner.not_finite_at_start = start
        return state
    averages = {} if config.ema_decay is None else averages_of(model, checkpoint)
    state = RunState(plan, build_learner(plan.task, backend, model, config))
    state.load_state_dict({**checkpoint.state_dict(), "ema": averages})
    return state


def _not_finite(model: nn.Module) -> list[str]:
    tensors = {**dict(model.named_parameters()), **tensors_of(model)}
    return [name for name, tensor in tensors.items() if not is_finite(tensor)]
