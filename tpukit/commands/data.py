"""`tpukit data`: generates synthetic data sets."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpukit.commands.generated_sets import dialogues, images, refuse_mixing, stoppable
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError
from tpukit.io.ranges import LARGEST_BATCH, LARGEST_COUNT, SEED, Range, range_problems
from tpukit.io.units import format_bytes

if TYPE_CHECKING:
    from tpukit.tasks.eit.simulation.generate_data import DatasetPlan

RANGES = {
    "n": Range(10, LARGEST_BATCH),
    "seed": SEED,
    "start": Range(0, LARGEST_COUNT),
    "workers": Range(1, 1024),
}
app = typer.Typer(no_args_is_help=True)


@app.callback()
def data() -> None:
    """Generate synthetic data sets."""


class Labels(StrEnum):
    """Meaning of an image's values."""

    classes = "classes"
    difference = "difference"


class Contrast(StrEnum):
    """How much objects differ from the background."""

    strong = "strong"
    mild = "mild"


@app.command()
def eit(
    out: Annotated[Path, typer.Option(help="Folder for train/, valid/, test/.")] = Path("data"),
    n: Annotated[int, typer.Option(help="Samples: 80 % train, 10 % valid, 10 % test.")] = (10_000),
    seed: Annotated[
        int,
        typer.Option(help="Seed; a sample depends on it and its index."),
    ] = 0,
    start: Annotated[int, typer.Option(help="Index of the first sample.")] = 0,
    labels: Annotated[
        Labels, typer.Option(help="classes: -1 resistive, +1 conductive; difference: sigma - 1.")
    ] = Labels.classes,
    contrast: Annotated[
        Contrast, typer.Option(help="strong: plastic and metal; mild: sigma 0.01-0.9, 1.1-2.")
    ] = Contrast.strong,
    noise: Annotated[str, typer.Option(help="Signal to noise of a frame in dB: A, or A-B.")] = (
        "33-60"
    ),
    electrode_degrees: Annotated[
        float, typer.Option(help="Electrode width: 10.2 real tanks, 4 the published simulation.")
    ] = 10.2,
    recon: Annotated[
        bool, typer.Option("--recon", help="Add Tikhonov and Gauss-Newton images (TR, xs_gn).")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Worker processes (all cores).")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Simulate an EIT data set; the same command continues a stopped one."""
    from tpukit.tasks.eit.simulation.generate_data import DatasetPlan
    from tpukit.tasks.eit.simulation.simulate import SimulationSettings

    given = {"n": n, "seed": seed, "start": start, "workers": workers}
    if problems := range_problems(given, RANGES):
        raise ConfigError(" ".join(problems), "Try --n 1000.")
    settings = SimulationSettings(
        seed=seed,
        labels=labels.value,
        contrast=contrast.value,
        noise_db=parse_noise(noise),
        electrode_degrees=electrode_degrees,
    )
    _simulate(DatasetPlan(out, n, start, recon, settings), workers, Output(as_json=as_json))


def _simulate(plan: DatasetPlan, workers: int | None, output: Output) -> None:
    from tpukit.hardware.detect import detect_hardware
    from tpukit.hardware.host import RealHost
    from tpukit.io.process import allowed_cores
    from tpukit.io.progress import Progress
    from tpukit.tasks.eit.simulation.generate_data import check_plan, make_dataset, missing_chunks

    check_plan(plan)
    refuse_mixing(plan.folder, "eit")
    already = plan.samples - sum(stop - start for start, stop in missing_chunks(plan))
    output.text(
        f"{plan.samples:,} samples take about {format_bytes(plan.bytes_needed())} in {plan.folder},"
        " and half as much again once a training has packed them."
    )
    progress = Progress("simulating", plan.samples, done=already)
    with (
        stoppable(
            lambda: f"Stopped with {progress.done:,} of {plan.samples:,} samples in {plan.folder}.",
            f"The same command goes on: {shlex.join(['tpukit', *sys.argv[1:]])}",
        ),
        progress,
    ):
        made = make_dataset(plan, workers or allowed_cores(), progress.advance)
    if already:
        output.text(f"{already:,} samples were there already.")
    output.text(
        f"{made['samples']:,} samples in {plan.folder} ({made['train']:,} train, "
        f"{made['valid']:,} valid, {made['test']:,} test), {made['seconds']:.1f} s"
    )
    preset = " --preset quick" if detect_hardware(RealHost()).kind == "cpu" else ""
    output.text(f"Train on them: tpukit train{preset} --data-path {shlex.quote(str(plan.folder))}")
    output.result({"path": str(plan.folder), **made})


def parse_noise(text: str) -> tuple[float, float]:
    """`33-60` or `40`, in dB."""
    low, _, high = text.partition("-")
    try:
        return float(low), float(high or low)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not of the form 33-60 or 40", param_hint="--noise"
        ) from None


app.command()(dialogues)
app.command()(images)
