"""Predicted against publicly measured peaks of training steps on GPUs.

    python benchmarks/gpu_memory_public.py [--only bert]

`gpu_memory_measurements.toml` names each measurement: its settings, its source and what was
measured there. With `--only` the other results are kept. A loop that keeps
its gradients through the forward pass (`zero_grad` after it, or zeros instead of None) holds what a
second micro-batch of an accumulation holds: `gradients_stay`.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_memory_models
from recorded import RESULTS, write_result

MEASUREMENTS = Path(__file__).with_name("gpu_memory_measurements.toml")
RESULT = RESULTS / "gpu_memory_public.json"
UNITS = {"GB": 1e9, "GiB": 2**30, "MB": 1e6, "MiB": 2**20}


@dataclass(frozen=True)
class Measurement:
    """One measured peak and the settings of its run."""

    name: str
    source: str
    """Address."""
    versions: str
    target: str
    model: str
    """A name of `gpu_memory_models.py`."""
    inputs: list[str]
    rows: int
    counts: str
    """allocated, reserved (torch.cuda's peaks) or driver (nvidia-smi)."""
    measured: float
    unit: str
    predicted_first: bool
    """Whether the prediction was written down before the figure was looked at."""
    first_predicted: int | None = None
    """Bytes that were predicted then."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model's function."""
    train: dict[str, Any] = field(default_factory=dict)
    """Settings of training that differ from the defaults below."""
    accumulate: int = 1
    gradients_stay: bool = False
    one_batch: bool = False
    """Whether no batch waits on the GPU while another is at work."""
    fitted: bool = True
    """Whether it ran; `measured` is 0 where it did not."""
    context: float | None = None
    """What the source found before training, in `unit`; else the target's."""
    then: list[str] = field(default_factory=list)
    """What that version of torch did otherwise: names of `THEN`."""
    note: str = ""
    blind_set: int = 1
    """Which set of measurements it came with."""


@dataclass(frozen=True)
class Fit:
    """The largest batch of a ladder that fitted, and the next one, which did not."""

    name: str
    """A model of timm."""
    image: int
    fits: int = 0
    """0: not looked at."""


LADDER = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Batches that timm's benchmark tries, from the largest on."""
LADDER_GPU = "rtx3090"
LADDER_SOURCE = (
    "https://github.com/huggingface/pytorch-image-models/blob/main/results/"
    "benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"
)
LADDER_CONTEXT = 1343 * 2**20
"""Bytes that a context took before CUDA 11.7, which loads kernels when they are used: a V100's with
torch 1.10, from `bert-large-v100`'s source. An RTX 3090's is not published for torch 1.12; with 1.7
it was 1488 MiB (https://github.com/pytorch/pytorch/issues/49877, less its tensor)."""


# -- what earlier versions of torch did ----------------------------------------------------------
@contextlib.contextmanager
def softmax_keeps_its_input() -> Iterator[None]:
    """Before 1.11 the formula of its gradient named the input, for its type: it was saved.

    Under autocast an attention mask in fp32 had made the scores fp32 before.
    """
    import torch

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, shares: Any, scores: Any) -> Any:
            ctx.save_for_backward(scores)
            return shares.view_as(shares)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0], None

    plain = torch.nn.functional.softmax

    def softmax(scores: Any, *args: Any, **kwargs: Any) -> Any:
        return Keep.apply(plain(scores, *args, **kwargs), scores.detach().float())

    with mock.patch.object(torch.nn.functional, "softmax", softmax):
        yield


@contextlib.contextmanager
def adam_has_two_temporaries() -> Iterator[None]:
    """Until July 2023 its form for lists added epsilon to a copy of the root."""
    import torch

    plain = torch._foreach_addcdiv_

    def addcdiv(values: Any, first: Any, second: Any, *args: Any) -> None:
        copies = [torch.empty_like(t) for t in second]
        plain(values, first, copies, *args)

    with mock.patch.object(torch, "_foreach_addcdiv_", addcdiv):
        yield


@contextlib.contextmanager
def one_batch_is_held() -> Iterator[None]:
    """No batch is sent ahead, and both micro-batches that stand for gradients which stay are the
    same one."""
    from tpukit.probe.gpu_memory import traced_step, traced_trial

    plain = traced_trial.trace_fake_step

    def without_copies(*arguments: Any) -> Any:
        trace = plain(*arguments)
        held = [i for i, s in enumerate(trace.storages) if s.kind == "batch"]
        shapes = [trace.storages[i].shape for i in held]
        # A batch's tensors come one after the other, and then the next batch's.
        copies = held[next(n for n in range(1, len(held) + 1) if shapes == shapes[:n] *
                           (len(held) // n)) :]  # fmt: skip
        start = trace.marks["step"]
        before, step = (
            [e for e in part if max(e, ~e) not in copies]
            for part in (trace.events[:start], trace.events[start:])
        )
        return dataclasses.replace(trace, events=[*before, *step], marks={"step": len(before)})

    with (
        mock.patch.object(traced_step, "BATCHES_AHEAD", 0),
        mock.patch.object(traced_trial, "trace_fake_step", without_copies),
    ):
        yield


THEN = {"softmax": softmax_keeps_its_input, "adam": adam_has_two_temporaries}


# -- the comparison ------------------------------------------------------------------------------
def predict(measurement: Measurement) -> dict[str, Any]:
    """The prediction of `probe-batch --model` for the settings of a measurement."""
    from tpukit.probe.batch.model_task import ModelTask
    from tpukit.probe.gpu_memory.traced_trial import TracedTrials
    from tpukit.probe.targets import find_gpu
    from tpukit.probe.trial import TrialRequest
    from tpukit.train.config import TrainConfig

    factory: Callable[..., Any] = getattr(gpu_memory_models, measurement.model)
    task = ModelTask(functools.partial(factory, **measurement.settings), measurement.inputs, {})
    config = TrainConfig(**{"precision": "fp32", "clip_norm": 0.0, **measurement.train})
    accumulate = max(measurement.accumulate, 2 if measurement.gradients_stay else 1)
    target = find_gpu(measurement.target)
    assert target is not None
    with one_batch_is_held() if measurement.one_batch else contextlib.nullcontext():
        trial = TracedTrials(task, config, target).run(TrialRequest(measurement.rows, accumulate))
    context = trial.memory["context"]
    if measurement.context is not None:
        context = int(measurement.context * UNITS[measurement.unit])
    reserved = trial.used_bytes - trial.memory["context"] - trial.memory["nccl"]
    peaks = {"allocated": trial.allocated_bytes, "reserved": reserved, "driver": reserved + context}
    return {
        "bytes": peaks[measurement.counts], "fits": trial.fits, "memory": dict(trial.memory),
        "range": trial.used_range,
    }  # fmt: skip


def compare(measurement: Measurement) -> dict[str, Any]:
    """A measurement's row: by torch of now and, where it did otherwise, by torch of then."""
    now = predict(measurement)
    row = {
        **{name: getattr(measurement, name) for name in ("name", "source", "versions", "target",
           "counts", "predicted_first", "then", "fitted")},
        "predicted_bytes": now["bytes"], "memory": now["memory"], "fits": now["fits"],
        "range_bytes": now["range"],
    }  # fmt: skip
    if measurement.then:
        with contextlib.ExitStack() as stack:
            for name in measurement.then:
                stack.enter_context(THEN[name]())
            row["predicted_bytes_as_then"] = predict(measurement)["bytes"]
    return row


def with_errors(row: dict[str, Any], measurement: Measurement) -> dict[str, Any]:
    """The row beside what was measured, where that was looked at."""
    row = {**row, "first_predicted": measurement.first_predicted,
           "blind_set": measurement.blind_set, "note": measurement.note}  # fmt: skip
    if not measurement.measured:
        return row
    real = int(measurement.measured * UNITS[measurement.unit])
    predicted = row["predicted_bytes"]
    return {
        **row, "measured_bytes": real, "error": predicted / real - 1,
        "error_as_then": row.get("predicted_bytes_as_then", predicted) / real - 1,
        "error_first": (measurement.first_predicted or predicted) / real - 1,
    }  # fmt: skip


def find_fit(fit: Fit) -> dict[str, Any]:
    """The largest batch of the ladder by the predictions, beside the one that fitted.

    As then: with that context, one batch, and gradients that are zeros instead of None.
    """
    from tpukit.probe.targets import find_gpu

    target = find_gpu(LADDER_GPU)
    assert target is not None
    then = dataclasses.replace(target, context_bytes=(LADDER_CONTEXT, LADDER_CONTEXT))
    now = largest_of_ladder(fit, target, accumulate=1)
    with one_batch_is_held():
        as_then = largest_of_ladder(fit, then, accumulate=2)
    row = {"name": fit.name, "image": fit.image, "predicted": now, "predicted_as_then": as_then}
    if fit.fits:
        right = {"right": now == fit.fits, "right_as_then": as_then == fit.fits}
        row |= {"fits": fit.fits, **right}
    return row


def largest_of_ladder(fit: Fit, target: Any, accumulate: int) -> int:
    """The largest batch of the ladder that is predicted to fit."""
    from tpukit.probe.batch.model_task import ModelTask
    from tpukit.probe.gpu_memory.traced_trial import TracedTrials
    from tpukit.probe.trial import TrialRequest
    from tpukit.train.config import TrainConfig

    size = fit.image
    task = ModelTask(
        functools.partial(gpu_memory_models.plain_attention, fit.name), [f"x=3x{size}x{size}"], {}
    )
    config = TrainConfig(precision="fp16", optimizer="sgd", clip_norm=0.0)
    trials = TracedTrials(task, config, target)
    asked = (LADDER[0], LADDER[3], *LADDER)
    found = [trials.run(TrialRequest(rows, accumulate)) for rows in asked][2:]
    return max((t.batch for t in found if t.fits), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a name; other results are kept")
    options = parser.parse_args()
    os.environ.update(USE_TORCH_XLA="0", PJRT_DEVICE="CPU")
    asked = tomllib.loads(MEASUREMENTS.read_text())
    kept = json.loads(RESULT.read_text()) if options.only and RESULT.is_file() else {}
    known = {r["name"]: r for key in ("measurements", "fits") for r in kept.get(key, [])}
    for key, kind, run in (("measurements", Measurement, compare), ("fits", Fit, find_fit)):
        for settings in asked[key]:
            if options.only not in settings["name"]:
                continue
            known[settings["name"]] = run(kind(**settings))
            found = {
                "measurements": [with_errors(known[m["name"]], Measurement(**m))
                                 for m in asked["measurements"] if m["name"] in known],
                "fits": [known[f["name"]] for f in asked["fits"] if f["name"] in known],
            }  # fmt: skip
            [row] = [row for row in found[key] if row["name"] == settings["name"]]
            print(settings["name"], summary(row), flush=True)
            write_result(RESULT, {**found, **totals(found)})


def totals(found: dict[str, Any]) -> dict[str, Any]:
    """Medians and largest errors, and how many of the fits are right."""
    looked = [row for row in found["measurements"] if "error" in row]
    result = {}
    for name in ("error", "error_as_then"):
        result |= spread(name, looked, name)
    for number in (1, 2):
        first = [row for row in looked
                 if row["first_predicted"] and row["blind_set"] == number]  # fmt: skip
        result |= spread("error_first", first, f"error_first_{number}")
        result[f"predicted_blind_{number}"] = len(first)
        result[f"beyond_12_{number}"] = sum(abs(row["error_first"]) > 0.12 for row in first)
    result["runs_right"] = sum(row["fits"] == row["fitted"] for row in found["measurements"])
    result["runs"] = len(found["measurements"])
    fits = [row for row in found["fits"] if "right" in row]
    for name in ("right", "right_as_then"):
        result[f"fits_{name}"] = sum(row[name] for row in fits)
    return result | {"fits_asked": len(fits)}


def spread(field: str, rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Median and largest of a field, without its sign."""
    errors = [abs(row[field]) for row in rows] or [0.0]
    return {f"median_{name}": statistics.median(errors), f"largest_{name}": max(errors)}


def summary(row: dict[str, Any]) -> str:
    """A row in a line."""
    if "image" in row:
        predicted = f"predicted {row['predicted']}, as then {row['predicted_as_then']}"
        return f"{predicted}, fitted {row.get('fits', 'not looked at')}"
    errors = [f"{row[name]:+.1%}" for name in ("error", "error_as_then") if name in row]
    return f"{row['predicted_bytes'] / 2**30:.2f} GiB {' '.join(errors)}"


if __name__ == "__main__":
    main()
