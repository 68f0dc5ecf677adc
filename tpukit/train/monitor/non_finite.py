"""A loss that is no longer finite: whether its step's samples were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from tpukit.errors import NonFiniteLossError
from tpukit.train.data.stream import is_stream
from tpukit.train.loader import MicroBatchData
from tpukit.train.mistakes.raised import place_of

if TYPE_CHECKING:
    from tpukit.train.plan import RunPlan

KINDS = ("nan", "inf", "-inf")
"""The likeliest mistake first: -inf may be meant, in the bias of an attention."""


def non_finite_loss(plan: RunPlan, step: int) -> NonFiniteLossError:
    """The error of step `step` (from 1), with the entry and the sample that are not finite."""
    culprit = None
    with suppress(Exception):  # the data may not be there any more
        culprit = min(_not_finite_inputs(plan, step), key=lambda found: found[0], default=None)
    message = f"The loss stopped being finite in step {step}; no checkpoint was written after it."
    resumes = "the same command resumes from the last checkpoint."
    if culprit is None:
        return NonFiniteLossError(
            message, f"Lower --lr or clip_norm, or use bf16 or fp32 instead of fp16; {resumes}"
        )
    return NonFiniteLossError(
        f"{message} In that step {culprit[1]} holds {KINDS[culprit[0] % len(KINDS)]}.",
        f"Leave such samples out, or make them finite (`np.nan_to_num`); {resumes}",
    )


def _not_finite_inputs(plan: RunPlan, step: int) -> Iterator[tuple[int, str]]:
    """(index of its kind, where) of each entry of the step's samples that is not finite."""
    data, task = plan.datasets.train, plan.task
    if is_stream(data):
        return
    made = MicroBatchData(task, data, plan.loading.seed)
    # The step's samples are a function of its number: they are read again.
    micro_batches = plan.batches.step(step - 1)
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
