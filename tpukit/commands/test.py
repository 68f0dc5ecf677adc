"""`tpukit test`: evaluates a run."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpukit.commands.launching import in_all_processes
from tpukit.commands.options.hardware import UseHardware, hardware_options
from tpukit.commands.options.option_sets import with_option_sets
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend, prepare_environment

if TYPE_CHECKING:
    from tpukit.tasks.evaluation import Evaluate
    from tpukit.train.requests import EvaluationRequest

app = typer.Typer()

USUAL_RUN = Path("results/deit")


@dataclasses.dataclass(frozen=True)
class TestOptions:
    """What is evaluated and how: fields of `EvaluationRequest`."""

    __test__ = False

    data: Annotated[
        str | None,
        typer.Option(help="EIT: simulated, uef2017, ktc2023, or a folder of .npz (simulated)."),
    ] = None
    data_path: Annotated[
        Path | None, typer.Option(help="Folder the data lies in (the run's, else ./data).")
    ] = None
    sampling_steps: Annotated[int | None, typer.Option(help="EIT: DDIM steps (5).")] = None
    samples: Annotated[
        int, typer.Option(min=1, help="EIT: images a measurement; their mean is tested.")
    ] = 1
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N samples.")] = None
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Samples at once, over devices.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is sampled.")] = 0
    out: Annotated[
        Path | None, typer.Option(help="Folder for predictions and pictures (in the run).")
    ] = None


@app.command()
@with_option_sets
def test(
    *,
    run: Annotated[
        Path | None, typer.Option(help=f"Run folder, or one checkpoint in it ({USUAL_RUN}).")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A file of the published code (best.pt) instead of a run.")
    ] = None,
    options: TestOptions,
    hardware: UseHardware,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Evaluate a run: metrics, baselines and pictures."""
    if run is not None and checkpoint is not None:
        raise ConfigError("--run and --checkpoint exclude each other.", "Give one of them.")
    output = Output(as_json=as_json)
    chosen = hardware_options(hardware)
    kind = prepare_environment(chosen)
    request, evaluate = _request(run, checkpoint, output)
    in_all_processes(chosen, kind, output)
    _run(dataclasses.replace(request, **dataclasses.asdict(options)), evaluate, chosen, output)


def _request(
    run: Path | None, checkpoint: Path | None, output: Output
) -> tuple[EvaluationRequest, Evaluate]:
    """What is tested, and the function that tests it."""
    from tpukit.tasks.evaluation import EVALUATIONS
    from tpukit.train.requests import EvaluationRequest
    from tpukit.train.run_folder import open_run

    if checkpoint is not None:
        request, task = EvaluationRequest(checkpoint=checkpoint), "eit"
    else:
        opened = open_run(run or USUAL_RUN, output.text)
        request, task = EvaluationRequest(run=opened), opened.task
    if task not in EVALUATIONS:
        raise ConfigError(
            f"`test` does not know how to evaluate {task!r}.",
            f"It evaluates {', '.join(EVALUATIONS)}; training logs the validation loss of others.",
        )
    evaluate: Evaluate = importlib.import_module(EVALUATIONS[task]).evaluate
    return request, evaluate


def _run(
    request: EvaluationRequest,
    evaluate: Evaluate,
    hardware: HardwareOptions,
    output: Output,
) -> None:
    backend = open_backend(hardware)
    try:
        tell = output.text if backend.is_main else lambda message: None
        result = evaluate(request, backend, tell)
        if backend.is_main:
            output.result(result)
    finally:
        backend.close()
