"""What a task's methods return, checked on the host: types, shapes and keys; no value is read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tpukit.errors import DataError, UsageError
from tpukit.io.code_owner import is_users
from tpukit.train.user_code import place_of

Kind = TypeVar("Kind")
Method = Callable[..., Any]
ARRAYS = (Tensor, np.ndarray, np.generic, bool, int, float)
"""What a sample's entries may be for `stack_samples`."""


def task_mistake(method: Method, problem: str, hint: str) -> UsageError:
    """A wrong value of a task's method, which is named with its place."""
    return UsageError(f"{place_of(method)} {problem}.", hint, id="task-value")


def expect(value: object, kind: type[Kind], method: Method, wanted: str) -> Kind:
    """`value` where it is of the kind. Raises UsageError naming the method that returned it."""
    if not isinstance(value, kind):
        raise task_mistake(method, f"returned {described(value)}", f"Return {wanted}.")
    return value


def described(value: object) -> str:
    """A value in words: its type, and a tensor's shape."""
    if value is None:
        return "None"
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "NumPy array"
        return f"a {kind} of shape {tuple(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# -- the loss ------------------------------------------------------------------------------------
def check_loss(outputs: object, method: Method, rows: int) -> dict[str, Tensor]:
    """What `loss` returned for a batch of `rows` rows. Raises UsageError where it cannot be used.

    Types and shapes are the host's: nothing waits for the device.
    """
    wanted = '{"loss": loss}: one value a row, shape (rows,), or the batch\'s mean (0-d)'
    entries = expect(outputs, Mapping, method, wanted)  # type: ignore[type-abstract]
    if "loss" not in entries:
        names = ", ".join(map(repr, entries)) or "nothing"
        raise task_mistake(
            method, f"returned a dict without 'loss' (it has {names})", f"Return {wanted}."
        )
    for name, value in entries.items():
        _check_entry(name, value, method, rows)
    loss, weight = entries["loss"], entries.get("weight")
    if weight is not None and weight.shape != loss.shape:
        raise task_mistake(
            method, f"returned a 'weight' of shape {tuple(weight.shape)} for a 'loss' of shape"
            f" {tuple(loss.shape)}", "Give both the same shape: (rows,), or 0-d.",
        )  # fmt: skip
    if not loss.is_floating_point():
        raise task_mistake(
            method, f"returned a 'loss' of {loss.dtype}", "Return a float tensor as the loss."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise task_mistake(
            method, "returned a 'loss' without a gradient",
            "Compute it from the model's output without `.item()`, `.detach()`, `torch.tensor(...)`"
            " or `no_grad`, and leave some parameters trainable.",
        )  # fmt: skip
    return dict(entries)


def _check_entry(name: str, value: object, method: Method, rows: int) -> None:
    if not isinstance(value, Tensor):
        raise task_mistake(
            method, f"returned {name!r} as {described(value)}",
            "Return a tensor, without `.item()` or `float()`: it is read when it is logged.",
        )  # fmt: skip
    if value.ndim and tuple(value.shape) != (rows,):
        raise task_mistake(
            method,
            f"returned {name!r} of shape {tuple(value.shape)} for a batch of {rows} rows",
            f"Return one value a row, shape ({rows},): `reduction='none'`, then `.flatten(1)"
            ".mean(1)`; or the batch's mean (0-d).",
        )


# -- batches and samples -------------------------------------------------------------------------
def check_entries(batch: object, method: Method) -> dict[str, Tensor]:
    """A host batch as `collate` or `probe_batches` returned it: tensors by name."""
    entries = expect(batch, Mapping, method, "a dict of tensors")  # type: ignore[type-abstract]
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            raise task_mistake(
                method, f"returned a batch whose {name!r} is {described(value)}",
                "Give every entry as a tensor (`torch.as_tensor`); text must be tokenized before.",
            )  # fmt: skip
    return dict(entries)


def check_rows(batch: Mapping[str, Tensor], method: Method, rows: int) -> None:
    """Raises UsageError where a filled batch has another number of rows than the plan's."""
    mask = tuple(batch["mask"].shape)
    if mask != (rows,):
        raise task_mistake(
            method, f"returned a 'mask' of shape {mask} for a batch of {rows} rows",
            "Leave 'mask' out: one row a sample, and what fills up the batch is added to it.",
        )  # fmt: skip
    if len(batch) > 1 and not any(t.shape[:1] == (rows,) for n, t in batch.items() if n != "mask"):
        shapes = ", ".join(f"{n!r} {tuple(t.shape)}" for n, t in batch.items() if n != "mask")
        raise task_mistake(
            method, f"returned a batch without an entry of {rows} rows (it has {shapes})",
            "Return one row a sample; what fills up the batch is added to it.",
        )  # fmt: skip


def place_of_samples(data: object, method: Method) -> str:
    """Place of the user's code that makes samples: `__getitem__`, else `datasets`."""
    getitem = getattr(type(data), "__getitem__", None)
    code = getattr(getitem, "__code__", None)
    return place_of(getitem if getitem and code and is_users(code.co_filename) else method)


def check_examples(batches: object, method: Method) -> list[dict[str, Tensor]]:
    """What `probe_batches` returned: at least one batch."""
    found = expect(batches, list, method, "a list of batches, the costliest first")
    if not found:
        raise task_mistake(method, "returned no batch", "Return a list of at least one batch.")
    batches = [check_entries(batch, method) for batch in found]
    for batch in batches:
        if "mask" not in batch:
            raise task_mistake(
                method, f"returned a batch without 'mask' (it has {', '.join(map(repr, batch))})",
                'Add batch["mask"], shape (rows,): 1.0 for each sample;'
                " `stack_samples(samples, rows)` makes it.",
            )  # fmt: skip
    return batches


def check_sample(sample: object, index: int, place: Callable[[], str]) -> None:
    """Raises DataError where `stack_samples` cannot stack a sample, which `place` made."""
    if not isinstance(sample, Mapping):
        raise DataError(
            f"{place()} gave sample {index} as {described(sample)}, not a dict.",
            'Return {"image": image, "label": label}, or name the values of a data set of tuples:'
            ' `named(data, "image", "label")`.',
        )
    for name, value in sample.items():
        if not isinstance(value, ARRAYS):
            raise DataError(
                f"{place()} gave sample {index} with {name!r} as {described(value)}.",
                "Return numbers or arrays (tokenize text, decode bytes in `draw`), or turn them"
                " into tensors in the task's own `collate`.",
            )


def why_not_stacked(samples: Sequence[Mapping[str, Any]]) -> str:
    """Which entry of which samples keeps them from being stacked."""
    if not all(isinstance(sample, Mapping) for sample in samples):
        return f"a sample is {described(samples[0])}, not a dict"
    first = samples[0]
    for number, sample in enumerate(samples):
        if sample.keys() != first.keys():
            return f"samples 0 and {number} of a batch have the entries {[*first]} and {[*sample]}"
        for name, value in sample.items():
            if not isinstance(value, ARRAYS):
                return f"sample {number} of a batch has {name!r} as {described(value)}"
            shapes = np.shape(first[name]), np.shape(value)
            if shapes[0] != shapes[1]:
                return (
                    f"samples 0 and {number} of a batch differ in {name!r}: shapes {shapes[0]} and"
                    f" {shapes[1]}"
                )
    return "the samples of a batch cannot be stacked"


# -- data sets and plans -------------------------------------------------------------------------
def sample_count(data: object, split: str, method: Method) -> int:
    """The length of a split. Raises DataError where it is empty, or not a map-style data set."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(
            f"{place_of(method)} returned {described(data)} as the {split} data.",
            "Give a map-style data set, with `__len__` and `__getitem__`.",
        )
    samples = len(data)
    if samples == 0:
        raise DataError(
            f"{place_of(method)} returned {split} data without samples (an empty"
            f" {type(data).__name__}).",
            "Check --data-path and the names of the files in it."
            + (" `Datasets(train, None)` trains without validation." * (split != "training")),
        )
    return samples


def check_batch_plan(plan: Any, method: Method, devices: int) -> Any:
    """A `BatchPlan` whose first step can be cut over the devices; raises UsageError otherwise."""
    if not (hasattr(plan, "step") and hasattr(plan, "steps_per_epoch")):
        raise task_mistake(
            method, f"returned {described(plan)}",
            "Return an object with `steps_per_epoch()` and `step(step)`, as ShuffledPlan has.",
        )  # fmt: skip
    first = plan.step(0)
    if not (isinstance(first, Sequence) and first and all(hasattr(m, "keys") for m in first)):
        raise task_mistake(
            plan.step, f"returned {described(first)} for step 0",
            "Return the step's list of MicroBatch(keys, rows, shape), at least one.",
        )  # fmt: skip
    used = [len(micro.keys if micro.counts is None else micro.counts) for micro in first]
    uneven = [m.rows for m, n in zip(first, used, strict=True) if m.rows % devices or m.rows < n]
    if uneven:
        raise task_mistake(
            plan.step,
            f"returned a micro-batch of {uneven[0]} rows for {devices} devices",
            "Give every micro-batch at least as many rows as keys, a multiple of"
            " `settings.devices`: filled rows are masked.",
        )
    return plan
