"""The process that tries batches: it may be killed, hang or crash; the one that asks does not.

Started by `tpukit.hardware.launch.child`; reads requests from standard input and writes results
to the descriptor it is given, a line of JSON each.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpukit.errors import TpukitError
from tpukit.hardware.out_of_memory import is_out_of_memory
from tpukit.io.process import die_with_parent
from tpukit.probe.batch.trial import TaskSource, Trial, first_line, wanted_and_limit
from tpukit.probe.compiler.source_map import Place
from tpukit.train.config import TrainConfig
from tpukit.train.task import PlanSettings, Task

KILLED = "Signal 9 (SIGKILL)"
"""torchrun's word for a process that the system ended."""


def main(arguments: list[str]) -> int:
    """Answers until standard input ends; as a rank of a launched trial, once."""
    faulthandler.enable()
    if arguments[0] == "--rank":
        return _answer_as_rank(Path(arguments[1]))
    descriptor, parent = int(arguments[0]), int(arguments[1])
    die_with_parent(parent)
    answerers: dict[str, Any] = {}
    for line in sys.stdin:
        answer = _answer(json.loads(line), answerers)
        os.write(descriptor, json.dumps(answer).encode() + b"\n")
    return 0


def _answer(question: dict[str, Any], answerers: dict[str, Any]) -> dict[str, Any]:
    """The trial, or what went wrong."""
    started = time.monotonic()
    try:
        if question["kind"] == "compile":
            trial, parameters, devices = _compile(question, answerers)
        elif question["processes"] > 1:
            return _launch(question)
        else:
            trial, parameters, devices = _measure(question)
    except Exception as error:
        return failure(error, question, time.monotonic() - started)
    seconds = time.monotonic() - started
    return {
        "trial": dataclasses.asdict(dataclasses.replace(trial, seconds=seconds)),
        "parameters": parameters,
        "devices": devices,
    }


def failure(error: Exception, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """An answer for an exception: a batch that does not fit, or an error to report."""
    traceback.print_exc()
    limited = question["config"].get("memory_limit") is not None
    if is_out_of_memory(error, limited=limited):
        wanted, limit = wanted_and_limit(str(error))
        trial = Trial(
            batch=question["rows"],
            fits=False,
            used_bytes=wanted,
            limit_bytes=limit or question["config"].get("memory_limit"),
            seconds=seconds,
            error=first_line(str(error) or type(error).__name__),
            accumulate=question["accumulate"],
        )
        return {"trial": dataclasses.asdict(trial), "parameters": None, "devices": None}
    if isinstance(error, TpukitError):
        return {"error": {"message": error.message, "hint": error.hint, "id": error.id,
                          "exit_code": error.exit_code}}  # fmt: skip
    return {"error": {"message": describe(error), "id": type(error).__name__}}


def describe(error: BaseException) -> str:
    """An exception in one line, with the model's own line where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Place(f.filename, f.lineno or 0).is_the_models]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {first_line(str(error))}{where}"


# -- the two kinds of trial ----------------------------------------------------------------------
def build_task(question: Mapping[str, Any]) -> tuple[Task, TrainConfig]:
    """The task and the training's settings of a question."""
    source = TaskSource(**question["task"])
    module, _, name = source.factory.partition(":")
    task: Task = getattr(importlib.import_module(module), name)(**source.arguments)
    return task.for_probing(), TrainConfig(**question["config"])


def _compile(question: Mapping[str, Any], answerers: dict[str, Any]) -> tuple[Trial, int, int]:
    from tpukit.probe.compiler.compiled_trial import CompiledTrials, CompileRequest
    from tpukit.probe.compiler.targets import find_target

    if "compiled" not in answerers:
        task, config = build_task(question)
        answerers["compiled"] = CompiledTrials(task, config, find_target(question["target"]))
    request = CompileRequest(question["rows"], question["accumulate"], question["effort"])
    trials: CompiledTrials = answerers["compiled"]
    return *trials.run(request), trials.target.devices


def _measure(question: Mapping[str, Any]) -> tuple[Trial, int, int]:
    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import open_backend
    from tpukit.probe.batch.measure import MeasureRequest, measure

    # As a run does: what the task's libraries take comes before a limit on memory.
    task, config = build_task(question)
    task.probe_batches(PlanSettings(1, 1, 1, 0))
    backend = open_backend(HardwareOptions(**question["hardware"]))
    try:
        request = MeasureRequest(question["rows"], question["accumulate"])
        return *measure(task, config, backend, request), backend.devices
    finally:
        backend.close()


# -- several processes -----------------------------------------------------------------------------
def _launch(question: Mapping[str, Any]) -> dict[str, Any]:
    """The same trial in as many processes as a run would have, under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "question.json"
        asked.write_text(json.dumps({**question, "processes": 1}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", str(question["processes"]),
                   "-m", "tpukit.probe.batch.worker", "--rank", str(asked)]  # fmt: skip
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        print(done.stderr, file=sys.stderr)
        answers: list[dict[str, Any]] = [
            json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*"))
        ]
    worst = [a for a in answers if "error" in a or not a["trial"]["fits"]]
    if worst:
        return next((a for a in worst if "trial" in a), worst[0])
    if KILLED in done.stderr:
        raise MemoryError("a process of the trial was ended by SIGKILL")
    if done.returncode or not answers:
        raise RuntimeError(f"torchrun ended with exit code {done.returncode} and said no reason")
    return answers[0]


def _answer_as_rank(asked: Path) -> int:
    """One process of a launched trial: its answer goes into a file beside the question."""
    answer = _answer(json.loads(asked.read_text()), {})
    partial = asked.with_name(f".rank-{os.environ['RANK']}")
    partial.write_text(json.dumps(answer))
    partial.rename(asked.with_name(f"rank-{os.environ['RANK']}"))
    return 0 if answer.get("trial", {}).get("fits") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
