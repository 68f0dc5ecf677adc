"""The error of a step whose loss or gradient is not finite, and what to blame for it."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from tpukit.errors import NonFiniteLossError
from tpukit.hardware.backend import Ranks
from tpukit.train.data import is_stream
from tpukit.train.learner import BadStep
from tpukit.train.loader import MicroBatchData
from tpukit.train.plan import RunPlan
from tpukit.train.user_code import place_of

KINDS = ("nan", "inf", "-inf")
"""The likeliest mistake first: -inf may be meant, in the bias of an attention."""


def non_finite_step(plan: RunPlan, ranks: Ranks, bad: BadStep, saved: int) -> Exception:
    """The error of a bad step: the entry that is not finite, the parameters, the sample.

    saved: the step of the last checkpoint, 0 without one. Every rank calls it.
    """
    resumes = "the same command begins again."
    if saved:
        resumes = f"the same command resumes from step {saved}, where the state is finite."
    culprit = None
    with suppress(Exception):  # the data may not be there any more
        found = _not_finite_inputs(plan, ranks, bad)
        culprit = min(found, key=lambda found: found[0], default=None)
    of_ranks = [found for found in ranks.all_gather_objects(culprit) if found]
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
    return NonFiniteLossError(
        message,
        f"Change {place_of(plan.task.loss)} where its derivative is infinite (`sqrt` or a norm of"
        " 0, a branch of `torch.where` that is not taken): `(x + 1e-12).sqrt()`, or lower --lr;"
        f" {resumes}",
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
