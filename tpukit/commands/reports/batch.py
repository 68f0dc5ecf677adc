"""What `probe-batch` and `--plan` print: a table, a chart, the training command; or JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpukit.io.units import GIB
from tpukit.probe.batch.recommend import Finding, estimate
from tpukit.probe.batch.trial import Trial
from tpukit.probe.compiler.roofline import StepEstimate

CHART_WIDTH = 44
SHOWN_ALLOCATIONS = 4
EPOCHS = (1000, 5000)
"""Samples of the epochs whose time is estimated."""


def as_fields(finding: Finding, task: str, command: str) -> dict[str, Any]:
    """The fields of `--json`."""
    chosen = finding.recommended_trial
    cost = chosen.cost if chosen else None
    return {
        "task": task,
        "target": finding.target.name if finding.target else None,
        "devices": finding.devices,
        "parameters": finding.parameters,
        "largest_batch_per_device": finding.largest,
        "largest_global_batch": finding.largest * finding.devices,
        "recommended_batch_per_device": finding.recommended,
        "recommended_global_batch": finding.recommended_global_batch,
        "accumulate": finding.accumulate,
        "limit_bytes": next((t.limit_bytes for t in finding.trials if t.limit_bytes), None),
        "trials": [_trial_fields(trial) for trial in finding.trials],
        "memory": dataclasses.asdict(chosen.memory) if chosen and chosen.memory else None,
        "largest_allocations": list(chosen.largest) if chosen else [],
        "collectives": dict(chosen.collectives) if chosen else {},
        "step": {
            "flops": cost.flops if cost else None,
            "kernel_flops": cost.kernel_flops if cost else None,
            "bytes": cost.bytes_accessed if cost else None,
            "collective_bytes": chosen.collective_bytes if chosen else None,
            "estimate_seconds": _seconds(estimate(finding.target, chosen) if chosen else None),
        },
        "compiles": finding.compiles,
        "seconds": finding.seconds,
        "versions": dict(finding.versions),
        "approximate": finding.target.generation.approximate if finding.target else None,
        "note": finding.note,
        "command": command,
    }


def _seconds(step: StepEstimate | None) -> float | None:
    return step.seconds if step else None


def _trial_fields(trial: Trial) -> dict[str, Any]:
    cost = trial.cost
    return {
        "batch": trial.batch,
        "accumulate": trial.accumulate,
        "fits": trial.fits,
        "used_bytes": trial.used_bytes,
        "limit_bytes": trial.limit_bytes,
        "verdict": trial.verdict,
        "samples_per_second": trial.samples_per_second,
        "flops": cost.flops if cost else None,
        "bytes": cost.bytes_accessed if cost else None,
        "effort": trial.effort,
        "compiles": trial.compiles,
        "cached": trial.cached,
        "seconds": trial.seconds,
        "error": trial.error,
    }


def as_text(finding: Finding, task: str, command: str) -> Iterator[str]:
    """The lines for people."""
    yield ""
    yield f"{task} on {_where(finding)}"
    yield from table(finding.trials)
    yield ""
    yield from chart(finding.trials)
    yield ""
    yield from _answer(finding)
    chosen = finding.recommended_trial
    if chosen is not None:
        yield from _details(finding, chosen)
    if finding.note:
        yield f"Note: {finding.note}"
    yield f"Train with: {command}"


def _where(finding: Finding) -> str:
    count = f"{finding.devices} device{'s' * (finding.devices > 1)}"
    if finding.target is None:
        return f"{count} of this machine, measured"
    versions = finding.versions
    about = finding.target.generation.approximate
    return (
        f"{finding.target.name} ({count}), by the TPU compiler libtpu {versions.get('libtpu')}"
        + (f"; approximate: {about}" if about else "")
    )


def table(trials: tuple[Trial, ...]) -> Iterator[str]:
    """One row a trial."""
    yield f"{'batch a device':>14}  {'memory':>18}  {'verdict':<8} {'speed':>14}  {'took':>7}"
    for trial in trials:
        steps = f" x {trial.accumulate}" if trial.accumulate > 1 else ""
        speed = f"{trial.samples_per_second:.3g} samples/s" if trial.samples_per_second else "-"
        took = "known" if trial.cached else f"{trial.seconds:.0f} s"
        effort = "  full effort" if trial.effort == "full" else ""
        why = f"  {trial.error}" if trial.error and not trial.used_bytes else ""
        yield (
            f"{f'{trial.batch}{steps}':>14}  {_memory(trial):>18}  {trial.verdict:<8} {speed:>14}"
            f"  {took:>7}{effort}{why}"
        )


def _memory(trial: Trial) -> str:
    if trial.used_bytes is None:
        return "not said"
    limit = f" of {trial.limit_bytes / GIB:.2f}" if trial.limit_bytes else ""
    return f"{trial.used_bytes / GIB:.2f}{limit} GiB"


def chart(trials: tuple[Trial, ...]) -> Iterator[str]:
    """Memory against batch as bars, the limit marked."""
    known = {t.batch: t for t in trials if t.used_bytes and t.accumulate == 1}
    limit = next((t.limit_bytes for t in known.values() if t.limit_bytes), None)
    if not known or not limit:
        return
    most = max(limit, *(t.used_bytes or 0 for t in known.values()))
    mark = min(CHART_WIDTH - 1, round(CHART_WIDTH * limit / most))
    for batch in sorted(known):
        filled = max(1, round(CHART_WIDTH * (known[batch].used_bytes or 0) / most))
        bar = "█" * filled + " " * (CHART_WIDTH - filled)
        if filled <= mark:
            bar = bar[:mark] + "│" + bar[mark + 1 :]
        yield f"{batch:>6} {bar}"
    yield f"{'':>6} {'':>{mark}}└ {limit / GIB:.2f} GiB"


def _answer(finding: Finding) -> Iterator[str]:
    total = finding.largest * finding.devices
    if finding.next_failed is None:
        yield f"Largest tried: {finding.largest} a device ({total} in all); it fits, as all did."
    else:
        yield (
            f"Largest: {finding.largest} a device ({total} in all): it fits, and "
            f"{finding.next_failed} does not; both were tried."
        )
    steps = f" x {finding.accumulate} micro-steps" if finding.accumulate > 1 else ""
    yield (
        f"Recommended: {finding.recommended} a device{steps} "
        f"({finding.recommended_global_batch} a step)"
    )


def _details(finding: Finding, chosen: Trial) -> Iterator[str]:
    if finding.parameters:
        yield f"Model: {finding.parameters / 1e6:.1f} M parameters"
    if chosen.memory:
        kinds = dataclasses.asdict(chosen.memory)
        parts = [f"{name} {size / GIB:.2f}" for name, size in kinds.items() if size]
        yield f"Memory a device at {chosen.batch}, GiB: {', '.join(parts)}"
    if chosen.largest:
        yield "Largest allocations at its peak:"
        yield from _allocations(chosen.largest)
    if chosen.collectives:
        found = ", ".join(f"{count} {name}" for name, count in chosen.collectives.items())
        yield f"Collectives a step: {found} ({chosen.collective_bytes / 1e6:.0f} MB a device)"
    yield from _cost(finding, chosen)


def _allocations(largest: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line each, those alike (the same line in every layer) together."""
    alike = Counter(
        (a["size_bytes"], a["shape"][:48], a["operator"], a["place"] or "") for a in largest
    )
    here = f"{Path.cwd()}/"
    for (size, shape, operator, place), count in list(alike.items())[:SHOWN_ALLOCATIONS]:
        yield (
            f"  {size / GIB:6.2f} GiB  {shape}{f' x {count}' * (count > 1)}  {operator}  "
            f"{place.removeprefix(here)}"
        ).rstrip()


def _cost(finding: Finding, chosen: Trial) -> Iterator[str]:
    cost, step = chosen.cost, estimate(finding.target, chosen)
    if cost is None or step is None:
        return
    kernels = f" ({cost.kernel_flops / 1e12:.2f} of them in kernels)" if cost.kernel_flops else ""
    yield (
        f"A step on a device: {cost.flops / 1e12:.2f} T operations{kernels}, "
        f"{cost.bytes_accessed / 1e9:.0f} GB moved"
    )
    samples = chosen.batch * chosen.accumulate * finding.devices
    epochs = ", ".join(f"{n} samples {_duration(n / samples * step.seconds)}" for n in EPOCHS)
    yield (
        f"Estimate (roofline, bound by {step.bound_by}): at least {step.seconds:.3f} s a step; "
        f"an epoch of {epochs}"
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
