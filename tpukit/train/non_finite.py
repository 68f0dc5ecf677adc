"""The error of a step whose loss or gradient is not finite, and what to blame for it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tpukit.errors import NonFiniteLossError, TpukitError
from tpukit.hardware.backend import Ranks
from tpukit.train.checkpoint import newest_good
from tpukit.train.data import MicroBatch, is_stream
from tpukit.train.learner import BadStep, Learner, seed_everything
from tpukit.train.loader import MicroBatchData
from tpukit.train.module_state import tensors_of
from tpukit.train.plan import RunPlan
from tpukit.train.user_code import place_of
from tpukit.train.weights import initial_model

SEARCH_SECONDS = 120.0
"""Time in seconds after which no further part of a step is tried."""
KINDS = ("nan", "inf", "-inf")
"""The likeliest mistake first: -inf may be meant, in the bias of an attention."""


def non_finite_step(plan: RunPlan, learner: Learner, bad: BadStep, saved: int) -> Exception:
    """The error of a bad step: the entry that is not finite, the parameters, the sample.

    saved: the step of the last checkpoint, 0 without one. The learner cannot go on afterwards.
    """
    resumes = "the same command begins again."
    if saved:
        resumes = f"the same command resumes from step {saved}, where the state is finite."
    culprit = None
    with suppress(Exception):  # the data may not be there any more
        found = _not_finite_inputs(plan, learner.backend, bad)
        culprit = min(found, key=lambda found: found[0], default=None)
    of_ranks = [found for found in learner.backend.all_gather_objects(culprit) if found]
    culprit = min(of_ranks, key=lambda found: found[0], default=None)
    message = f"{_what(bad)}; no checkpoint was written after it."
    if culprit is not None:
        return NonFiniteLossError(
            f"{message} In that step {culprit[1]} holds {KINDS[culprit[0] % len(KINDS)]}.",
            f"Leave such samples out, or make them finite (`np.nan_to_num`); {resumes}",
        )
    if not bad.parameters:
        return NonFiniteLossError(
            message, f"Lower --lr or clip_norm, or use bf16 or fp32 instead of fp16; {resumes}"
        )
    sample = None
    with suppress(Exception):
        sample = _sample_to_blame(plan, learner, bad.number)
    if sample is not None:
        message += f" Training sample {sample} causes it by itself."
    place, or_else = place_of(plan.task.loss), "" if sample is not None else ", or lower --lr"
    return NonFiniteLossError(
        message,
        f"Change {place} where its derivative is infinite (`sqrt` or a norm of 0, a branch of"
        f" `torch.where` that is not taken): `(x + 1e-12).sqrt()`{or_else}; {resumes}",
    )


def _what(bad: BadStep) -> str:
    if bad.of_loss:
        return f"The loss stopped being finite in step {bad.number}"
    if not bad.parameters:
        return f"The norm of the gradient overflowed in step {bad.number}"
    first, *others = bad.parameters
    more = f" and {len(others)} more parameter(s)" if others else ""
    return f"The gradient of {first!r}{more} was not finite in step {bad.number}, at a finite loss"


# -- samples that are not finite -----------------------------------------------------------------
def _not_finite_inputs(plan: RunPlan, ranks: Ranks, bad: BadStep) -> Iterator[tuple[int, str]]:
    """(index of its kind, where) of each entry of this rank's samples that is not finite."""
    data, task = plan.datasets.train, plan.task
    if is_stream(data):
        return
    made = MicroBatchData(task, data, plan.loading.seed)
    # The step's samples are a function of its number: they are read again.
    step = (m.share(ranks.rank, ranks.world_size) for m in plan.batches.step(bad.number - 1))
    micro_batches = [micro for micro in step if micro.keys]
    for key in (key for micro in micro_batches for key in micro.keys):
        for kind, name in _not_finite(made.sample(key)):
            yield kind, f"{name!r} of training sample {key.sample}"
    for micro in micro_batches:
        for kind, name in _not_finite(made.batch(micro)):
            if KINDS[kind] != "-inf":
                yield kind + len(KINDS), f"{name!r} of a batch of {place_of(task.collate)}"


def _not_finite(entries: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for name, entry in entries.items():
        with suppress(TypeError, ValueError, RuntimeError):  # text
            values = torch.as_tensor(entry)
            if values.is_floating_point() and not values.isfinite().all():
                kinds = values.isnan(), values.isposinf(), values.isneginf()
                yield next(kind for kind, found in enumerate(kinds) if found.any()), name


# -- a sample whose gradient is not finite -------------------------------------------------------
def _sample_to_blame(plan: RunPlan, learner: Learner, number: int) -> int | None:
    """A sample of the step that makes its gradient not finite, by itself.

    The step is made again with parts of its samples, at the weights of the last checkpoint. None
    where these weights show nothing, samples do so only together, or other ranks would be needed.
    """
    micro_batches = plan.batches.step(number - 1)
    several = learner.backend.world_size > 1
    if several or is_stream(plan.datasets.train) or any(m.counts for m in micro_batches):
        return None
    weights = _last_weights(plan, learner)

    end = time.monotonic() + SEARCH_SECONDS

    def is_bad(places: Sequence[int]) -> bool:
        if time.monotonic() > end:
            raise TimeoutError
        step = _only(micro_batches, places)
        return _makes_bad_step(plan, learner, weights, step, number)

    keys = [key for micro in micro_batches for key in micro.keys]
    places = range(len(keys))
    if not is_bad(places):
        return None
    while len(places) > 1:
        half = len(places) // 2
        part = next((part for part in (places[:half], places[half:]) if is_bad(part)), None)
        if part is None:
            return None
        places = part
    return keys[places[0]].sample


def _only(micro_batches: Sequence[MicroBatch], places: Sequence[int]) -> list[MicroBatch]:
    """The step with these of its samples alone, in batches of the same shapes."""
    numbered = enumerate(key for micro in micro_batches for key in micro.keys)
    kept = [key for place, key in numbered if place in places]
    return [
        replace(micro, keys=tuple(k for k in micro.keys if k in kept), filler=kept[0])
        for micro in micro_batches
    ]


def _last_weights(plan: RunPlan, learner: Learner) -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint, or those that the run began with."""
    checkpoint = newest_good(plan.folder.checkpoints, lambda _: None)
    seed_everything(plan.config.global_seed)
    model: nn.Module = initial_model(
        plan.task, learner.backend, plan.config, checkpoint, plan.datasets
    )
    return {name: tensor.detach() for name, tensor in tensors_of(model).items()}


def _makes_bad_step(
    plan: RunPlan,
    learner: Learner,
    weights: Mapping[str, torch.Tensor],
    step: Sequence[MicroBatch],
    number: int,
) -> bool:
    made = MicroBatchData(plan.task, plan.datasets.train, plan.loading.seed)
    host = [made[micro] for micro in step]
    if failed := next((batch for batch in host if isinstance(batch, TpukitError)), None):
        raise failed
    learner.backend.load(learner.model_tensors(), weights)
    learner.forget_bad_step()
    learner.steps_done = number - 1  # its draws
    learner.train_step([*learner.backend.batches(host)], plan.rate(number - 1))  # type: ignore[arg-type]
    return learner.bad_step() is not None
