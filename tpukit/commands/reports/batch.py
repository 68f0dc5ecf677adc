"""Report of `probe-batch` and `--plan`: a table, a chart, the training command; or JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpukit.commands.output import shown_in_cell
from tpukit.io.units import GIB, format_bytes, format_duration, three_digits
from tpukit.probe.batch.recommend import Recommendation
from tpukit.probe.roofline import estimate_step
from tpukit.probe.targets import GpuTarget
from tpukit.probe.trial import Trial

CHART_WIDTH = 44
SHOWN_ALLOCATIONS, SHOWN_MODULES = 4, 6
EPOCHS = (1000, 5000)
"""Numbers of samples of the epochs whose time is estimated."""


def as_fields(found: Recommendation, task: str, command: str | None) -> dict[str, Any]:
    """The fields of `--json`."""
    chosen, target = found.recommended_trial, found.target
    step = estimate_step(target, chosen) if chosen else None
    counted = chosen if chosen and not chosen.unread else None
    return {
        "task": task,
        "target": target.name if target else None,
        "devices": found.devices,
        "parameters": found.parameters,
        "largest_batch_per_device": found.largest,
        "largest_global_batch": found.largest * found.devices,
        "smallest_failed_batch_per_device": found.smallest_failed,
        "exact": found.exact,
        "stopped_by": found.ended,
        "slow_batch_per_device": found.too_slow,
        "estimated_largest_batch_per_device": found.estimated_largest,
        "recommended_batch_per_device": found.recommended,
        "recommended_global_batch": found.recommended_global_batch,
        "accumulate": found.accumulate,
        "limit_bytes": found.limit_bytes,
        "trials": [_trial_fields(trial) for trial in found.trials],
        "memory": chosen.memory if chosen else None,
        "largest_allocations": list(chosen.largest) if chosen else [],
        "memory_range": chosen.used_range if chosen else None,
        "allocated_bytes": chosen.allocated_bytes if chosen else None,
        "modules": dict(chosen.modules) if chosen else {},
        "collectives": dict(counted.collectives) if counted else None,
        "step": {
            "flops": chosen.flops if chosen else None,
            "kernel_flops": chosen.kernel_flops if chosen else None,
            "bytes": chosen.bytes_accessed if chosen else None,
            "collective_bytes": counted.collective_bytes if counted else None,
            "estimate_seconds": step.seconds if step else None,
        },
        "compiles": found.compiles,
        "seconds": found.seconds,
        "versions": dict(found.versions),
        "approximate": target.generation.approximate if target else None,
        "samples_per_second": found.samples_per_second,
        "form": found.form or None,
        "forms": {n: form and as_fields(form, task, None) for n, form in found.forms.items()},
        "note": found.note,
        "command": command,
    }


def comparison(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The results for several targets as one table."""
    yield f"{'target':<10} {'largest':>9} {'recommended':>12} {'memory':>18} {'samples/s <=':>13}"
    for row in rows:
        if "error" in row:
            yield f"{row['target']:<10} {row['error']}"
            continue
        batch, largest = row["recommended_batch_per_device"], row["largest_batch_per_device"]
        rate = three_digits(row["samples_per_second"]) if row["samples_per_second"] else "-"
        used = sum((row["memory"] or {}).values())
        memory = f"{used / GIB:.2f} of {(row['limit_bytes'] or 0) / GIB:.2f} GiB"
        yield f"{row['target']:<10} {largest:>9} {batch:>12} {memory:>18} {rate:>13}"


def _trial_fields(trial: Trial) -> dict[str, Any]:
    same = ("batch", "accumulate", "fits", "used_bytes", "limit_bytes", "verdict",
            "samples_per_second", "flops")  # fmt: skip
    more = ("effort", "compiles", "cached", "seconds", "error")
    return {
        **{name: getattr(trial, name) for name in same},
        "fits": None if trial.slow else trial.fits,
        "bytes": trial.bytes_accessed,
        "step_seconds": trial.step_seconds,
        "predicted": asdict(trial.predicted) if trial.predicted else None,
        **{name: getattr(trial, name) for name in more},
    }


def as_text(found: Recommendation, task: str, command: str | None) -> Iterator[str]:
    """The lines for people."""
    yield ""
    yield f"{task} on {_where(found)}"
    if not shown_in_cell():
        yield from table(found.trials)
        yield ""
        yield from chart(found)
        yield ""
    yield from _summary(found)
    if found.recommended_trial is not None:
        yield from _details(found, found.recommended_trial)
    if found.note:
        yield f"Note: {found.note}"
    if command:
        yield f"Train with: {command}"


def _where(found: Recommendation) -> str:
    count = f"{found.devices} device{'s' * (found.devices > 1)}"
    if found.target is None:
        return f"{count} of this machine, measured"
    about = found.target.generation.approximate
    if isinstance(found.target, GpuTarget):
        return f"{found.target.name} ({count}), {about}"
    compiler = f"by the TPU compiler libtpu {found.versions.get('libtpu')}"
    return f"{found.target.name} ({count}), {compiler}{f'; approximate: {about}' if about else ''}"


def table(trials: tuple[Trial, ...]) -> Iterator[str]:
    """One row a trial; of a batch that was predicted more than once, the last prediction."""
    yield f"{'batch a device':>14}  {'memory':>18}  {'verdict':<8} {'speed':>14}  {'took':>7}"
    last = {(trial.batch, trial.accumulate): trial for trial in trials}
    for trial in trials:
        if trial.used_range and trial is not last[trial.batch, trial.accumulate]:
            continue
        steps = f" x {trial.accumulate}" if trial.accumulate > 1 else ""
        speed = f"{three_digits(rate)} samples/s" if (rate := trial.samples_per_second) else "-"
        took = "cached" if trial.cached else f"{trial.seconds:.0f} s"
        effort = "  full effort" if trial.effort == "full" and not trial.used_range else ""
        why = f"  {trial.error}" if trial.error and not trial.used_bytes else ""
        why += f"  predicted {trial.predicted.describe()}" if trial.predicted else ""
        batch, memory = f"{trial.batch}{steps}", trial.memory_usage
        yield (f"{batch:>14}  {memory:>18}  {trial.verdict:<8} {speed:>14}  {took:>7}{effort}{why}")


def chart(found: Recommendation) -> Iterator[str]:
    """Memory against batch as bars, the limit marked."""
    used = {t.batch: t.used_bytes for t in found.trials if t.used_bytes and t.accumulate == 1}
    limit = found.limit_bytes
    if not used or not limit:
        return
    most = max(limit, *used.values())
    mark = min(CHART_WIDTH - 1, round(CHART_WIDTH * limit / most))
    for batch in sorted(used):
        filled = max(1, round(CHART_WIDTH * used[batch] / most))
        bar = "█" * filled + " " * (CHART_WIDTH - filled)
        if filled <= mark:
            bar = bar[:mark] + "│" + bar[mark + 1 :]
        yield f"{batch:>6} {bar}"
    yield f"{'':>6} {'':>{mark}}└ {format_bytes(limit)}"


def _summary(found: Recommendation) -> Iterator[str]:
    total = found.largest * found.devices
    largest = f"{found.largest} a device ({total} in all)"
    if found.exact:
        done = "predicted" if isinstance(found.target, GpuTarget) else "tried"
        failed = found.smallest_failed
        yield f"Largest: {largest}: it fits, and {failed} does not; both were {done}."
    elif found.smallest_failed is not None:
        is_tpu = found.target is not None and not isinstance(found.target, GpuTarget)
        exactly = " --exact finds the last sample." if is_tpu else ""
        yield (
            f"Largest tried that fits: {largest}{_filled(found)}; {found.smallest_failed} does not "
            f"fit.{exactly}"
        )
    elif any(trial.slow for trial in found.trials):
        yield f"Largest tried that fits: {largest}{_filled(found)}."
    else:
        yield f"Largest tried: {largest}; all that were tried fit{_filled(found)}."
    if ending := _ending(found):
        yield ending
    yield from _not_tried(found)
    yield from _differences(found)
    yield from _forms(found)
    steps = f" x {found.accumulate} accumulation steps" if found.accumulate > 1 else ""
    yield (
        f"Recommended: {found.recommended} a device{steps} "
        f"(global batch size {found.recommended_global_batch})"
    )


def _differences(found: Recommendation) -> Iterator[str]:
    beside = [t.predicted for t in found.trials if t.fits and t.predicted]
    pairs = [(p.used_bytes, p.measured_bytes) for p in beside]
    errors = [used / measured - 1 for used, measured in pairs if used and measured]
    if errors:
        yield f"Predicted memory beside measured: {min(errors):+.1%} to {max(errors):+.1%}."


def _forms(found: Recommendation) -> Iterator[str]:
    """A line for each of the task's forms, where it has several."""
    for name, each in found.forms.items():
        what = f"largest {each.largest} a device, best {each.recommended}" if each else "none fits"
        if each and each.samples_per_second:
            estimated = "estimated at most " if found.target else ""
            what += f", {estimated}{three_digits(each.samples_per_second)} samples/s"
        yield f"With {name}: {what}{'; recommended' if name == found.form else ''}"


ENDINGS = {
    "speed": "A larger batch is hardly faster on a CPU.",
    "data": "A larger batch would be more than all training samples.",
    "max": "--max tries more.",
}


def _ending(found: Recommendation) -> str | None:
    """Reason why nothing larger was tried, where it is not memory."""
    if found.ended != "time":
        return ENDINGS.get(found.ended)
    batch, known = found.too_slow or 0, found.trial_of(found.largest)
    if slow := found.trial_of(batch):
        return f"Too slow to try: {batch}: {slow.error}."
    about = format_duration(known.expected_seconds(batch)) if known else "too long"
    return (
        f"Too slow to try: {batch}: its trial would take about {about} (--trial-time, --max-time)."
    )


def _not_tried(found: Recommendation) -> Iterator[str]:
    """The largest batch by the line through the trials."""
    known, batch = found.trial_of(found.largest), found.estimated_largest
    if batch is None or known is None:
        return
    takes = ""
    if known.step_seconds:
        step = format_duration(known.step_seconds * batch / found.largest)
        takes = f": a step of it takes about {step} here"
    yield f"Largest by the line through what was tried: about {batch}, not tried{takes}."


def _filled(found: Recommendation) -> str:
    trial = found.trial_of(found.largest)
    share = trial.memory_share if trial else 0.0
    return f", with {share:.0%} of the memory" if share else ""


def _details(found: Recommendation, chosen: Trial) -> Iterator[str]:
    if found.parameters:
        yield f"Model: {found.parameters / 1e6:.1f} M parameters"
    if chosen.memory:
        parts = [f"{name} {size / GIB:.2f}" for name, size in chosen.memory.items() if size]
        yield f"Memory a device at {chosen.batch}, GiB: {', '.join(parts)}"
    if chosen.used_range:
        least, most = (format_bytes(size) for size in chosen.used_range)
        tensors = format_bytes(chosen.allocated_bytes or 0)
        yield f"In all between {least} and {most}; tensors {tensors}"
    if chosen.modules:
        parts = [f"{name or 'the loss'} {size / GIB:.2f}" for name, size in chosen.modules.items()]
        yield f"Activations at the peak by module, GiB: {', '.join(parts[:SHOWN_MODULES])}"
    if chosen.largest:
        yield "Largest allocations at its peak:"
        yield from _allocations(chosen.largest)
    if chosen.collectives:
        names = ", ".join(f"{count} {name}" for name, count in chosen.collectives.items())
        size = format_bytes(chosen.collective_bytes)
        yield f"Collectives a step: {names} ({size} a device)"
    yield from _step(found, chosen)


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


def _step(found: Recommendation, chosen: Trial) -> Iterator[str]:
    step = estimate_step(found.target, chosen)
    if step is None:
        return
    kernels = chosen.kernel_flops or 0.0
    yield (
        f"A step on a device: {(chosen.flops or 0.0) / 1e12:.2f} TFLOP"
        f"{f' ({kernels / 1e12:.2f} in kernels)' if kernels else ''}, "
        f"{format_bytes(chosen.bytes_accessed or 0)} moved"
    )
    samples = chosen.batch * chosen.accumulate * found.devices
    epochs = ", ".join(f"{n} samples {format_duration(n / samples * step.seconds)}" for n in EPOCHS)
    yield (
        f"Estimate (roofline, bound by {step.bound_by}): at least {step.seconds:.3f} s a step; "
        f"an epoch of {epochs}"
    )
