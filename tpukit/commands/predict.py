"""`tpukit predict`: the summaries of a test file, or the images of an EIT folder."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tpukit.commands.launching import in_all_processes
from tpukit.commands.options.hardware import UseHardware, hardware_options
from tpukit.commands.options.option_sets import with_option_sets
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend, prepare_environment

app = typer.Typer()
USUAL_RUN = Path("out-summarization")
USUAL_ANSWER = Path("submission.csv")


@dataclasses.dataclass(frozen=True)
class DecodingOptions:
    """Options of decoding, named as in transformers; None is not given."""

    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens of a summary (100).")] = (
        None
    )
    do_sample: Annotated[
        bool | None, typer.Option("--do-sample", help="Draw tokens instead of the likeliest.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Sharpens (under 1) or flattens; implies --do-sample.")
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Draw among so many (50); implies --do-sample.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Draw among this probability (1); implies --do-sample.")
    ] = None
    num_beams: Annotated[int | None, typer.Option(help="Beam search with so many beams.")] = None
    length_penalty: Annotated[
        float | None, typer.Option(help="Beam scores are divided by length to this power (1).")
    ] = None
    early_stopping: Annotated[
        bool | None, typer.Option("--early-stopping", help="End beams with the first full set.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seeds the draws (0).")] = None

    def given(self) -> dict[str, Any]:
        """What was given, drawing switched on by what only draws need."""
        given = {n: v for n, v in dataclasses.asdict(self).items() if v is not None}
        if {"temperature", "top_k", "top_p"} & given.keys():
            given.setdefault("do_sample", True)
        return given


@app.command()
@with_option_sets
def predict(
    *,
    run: Annotated[Path, typer.Option(help="Run folder.")] = USUAL_RUN,
    test_csv: Annotated[
        Path | None, typer.Option(help="File with id and dialogue (the data path's test.csv).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write (EIT: images.npz).")] = (USUAL_ANSWER),
    sample_submission: Annotated[
        Path | None, typer.Option(help="A file whose ids and order the answer must have.")
    ] = None,
    data_path: Annotated[Path | None, typer.Option(help="EIT: folder of .npz files.")] = None,
    decoding: DecodingOptions,
    hardware: UseHardware,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the summaries of a test file, or the images of an EIT folder.

    The same command again goes on where a killed one stopped.
    """
    output = Output(as_json=as_json)
    if task_of(run) == "eit":
        _predict_images(run, data_path, out, hardware_options(hardware), output)
        return
    options = hardware_options(hardware)
    kind = prepare_environment(options)
    request = _request(run, test_csv, out, sample_submission, decoding)
    in_all_processes(options, kind, output)
    _predict(run, request, options, output)


def task_of(run: Path) -> str:
    """The task of a run folder, or of one of its checkpoints."""
    from tpukit.train.run_folder import RunFolder, read_config

    folder = run.parent.parent if run.parent.name == "checkpoints" else run
    if not folder.is_dir():
        from tpukit.errors import CheckpointError

        raise CheckpointError(
            f"There is no run folder {run}.", "Train first, or give another one with --run DIR."
        )
    return str(read_config(RunFolder(folder)).get("task", {}).get("name", ""))


def _request(
    run: Path,
    test_csv: Path | None,
    out: Path,
    sample_submission: Path | None,
    decoding: DecodingOptions,
) -> Any:
    from tpukit.tasks.summarize.evaluation.prediction import PredictionRequest, check_request
    from tpukit.tasks.summarize.evaluation.trained import usual_test_file
    from tpukit.tasks.summarize.generation.generate import Decoding

    request = PredictionRequest(
        test_csv or usual_test_file(run), out, Decoding(**decoding.given()), sample_submission
    )
    check_request(request)
    return request


def _predict(run: Path, request: Any, options: HardwareOptions, output: Output) -> None:
    from tpukit.tasks.summarize.evaluation.prediction import predict_summaries
    from tpukit.tasks.summarize.evaluation.trained import open_summarizer

    started = time.monotonic()
    backend = open_backend(options)
    try:
        tell = output.text if backend.is_main else lambda _: None
        trained = open_summarizer(run, tell)
        rows = predict_summaries(trained, request, backend, tell)
        if backend.is_main:
            seconds = time.monotonic() - started
            output.text(f"{rows:,} summaries in {request.out}, {seconds:.1f} s")
            output.result({"rows": rows, "path": str(request.out), "seconds": seconds,
                           "compilations": backend.compilations()})  # fmt: skip
    finally:
        backend.close()


def _predict_images(
    run: Path, data_path: Path | None, out: Path, options: HardwareOptions, output: Output
) -> None:
    from tpukit.tasks.eit.evaluation.prediction import predict_images
    from tpukit.train.requests import EvaluationRequest
    from tpukit.train.run_folder import open_run

    in_all_processes(options, prepare_environment(options), output)
    backend = open_backend(options)
    try:
        tell = output.text if backend.is_main else lambda _: None
        target = None if out == USUAL_ANSWER else out
        request = EvaluationRequest(run=open_run(run, tell), data_path=data_path, out=target)
        result = predict_images(request, backend, tell)
        if backend.is_main:
            output.result(result)
    finally:
        backend.close()
