"""The child process that runs trials: it may be killed, hang or crash without ending its parent.

Started by `tpukit.hardware.launch.child`. Standard input: a line of JSON with the `TrialSetup`,
then a `TrialRequest` a line. Each result is a line of JSON on the descriptor in the first argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.errors import JobError, OutOfMemoryError, TpukitError, UsageError
from tpukit.hardware.launch.memory_watch import watched_memory
from tpukit.hardware.memory import is_out_of_memory
from tpukit.io.files import write_file
from tpukit.io.process import die_with_parent
from tpukit.probe.compiler.hlo import requested_and_limit
from tpukit.probe.compiler.source_map import model_frame
from tpukit.probe.trial import Trial, TrialRequest, TrialSetup, summary_line
from tpukit.train.user_code import task_failure

if TYPE_CHECKING:
    from tpukit.probe.compiler.compiled_trial import CompiledTrials
    from tpukit.probe.gpu_memory.traced_trial import TracedTrials
    from tpukit.train.task import Task

MODULE = "tpukit.probe.trials.worker"


def main(arguments: list[str]) -> int:
    """Runs trials until standard input ends; as a rank of a launched trial, one."""
    faulthandler.enable()
    if arguments[0] == "--rank":
        return _run_as_rank(Path(arguments[1]))
    descriptor, parent = map(int, arguments)
    die_with_parent(parent)
    runner = TrialRunner(TrialSetup.from_json(json.loads(sys.stdin.readline())))
    runner.prepare()
    for line in sys.stdin:
        result = runner.result(TrialRequest(**json.loads(line)))
        os.write(descriptor, json.dumps(result).encode() + b"\n")
    return 0


class TrialRunner:
    """Runs the trials of one setup in this process."""

    def __init__(self, setup: TrialSetup) -> None:
        self.setup = setup

    def prepare(self) -> None:
        """Imports the libraries of measured trials."""
        if self.setup.target is None:
            from tpukit.hardware.select import prepare_environment

            prepare_environment(self.setup.config)
        if self.setup.target is None and self.setup.world_size == 1:
            import tpukit.probe.trials.measure  # noqa: F401

    def result(self, request: TrialRequest) -> dict[str, Any]:
        """`{"trial": ...}`; `{"error": ...}` where it failed for another reason than memory."""
        started = time.monotonic()
        try:
            trial = self._run(request)
        except Exception as error:
            traceback.print_exc()
            # A compiler that needs more than this machine has says nothing about the TPU's memory.
            here = self.setup.target is not None and isinstance(error, OutOfMemoryError)
            limited = self.setup.config.memory_limit is not None
            after_a_fit = 0 < request.fitted < request.batch
            if here or not is_out_of_memory(error, limited=limited, after_a_fit=after_a_fit):
                return {"error": _error_fields(error, request)}
            trial = self._out_of_memory(error, request)
        seconds = time.monotonic() - started
        return {"trial": dataclasses.asdict(dataclasses.replace(trial, seconds=seconds))}

    def _run(self, request: TrialRequest) -> Trial:
        if self.setup.target is not None:
            with watched_memory(limited=False):
                trials = self._compiled[request.form]
                return _with_samples(trials.run(request), trials.task)
        if self.setup.world_size > 1:
            return _run_in_ranks(self.setup, request)
        from tpukit.hardware.select import memory_guard

        with memory_guard(self.setup.config):
            return self._measure(request)

    @cached_property
    def _compiled(self) -> Sequence[CompiledTrials | TracedTrials]:
        """Trials of each of the task's forms."""
        from tpukit.probe.targets import Target, find_any

        assert self.setup.target is not None
        target = find_any(self.setup.target)
        if isinstance(target, Target):
            from tpukit.probe.compiler.compiled_trial import CompiledTrials

            return [CompiledTrials(form, self.setup.config, target) for form in self._forms]
        from tpukit.hardware.select import EXPANDABLE, allocator_settings
        from tpukit.probe.batch.model_task import ModelTask
        from tpukit.probe.gpu_memory.traced_trial import TracedTrials

        # A run sets it; a bare model's script is its user's.
        default = "" if isinstance(self._forms[0], ModelTask) else EXPANDABLE
        expandable = EXPANDABLE in allocator_settings(default)
        return [
            TracedTrials(form, self.setup.config, target, expandable=expandable)
            for form in self._forms
        ]

    def _measure(self, request: TrialRequest) -> Trial:
        from tpukit.hardware.select import open_backend
        from tpukit.probe.trials.measure import measure_trial
        from tpukit.train.loader import import_before_limit

        task = self._forms[request.form]
        import_before_limit(task)
        backend = open_backend(self.setup.config)
        with backend.memory_meter() as read_memory:
            trial = measure_trial(task, self.setup.config, backend, request, read_memory)
        return _with_samples(trial, task)

    @cached_property
    def _forms(self) -> Sequence[Task]:
        from tpukit.train.task import for_probing, forms_of

        source = self.setup.task
        module, _, name = source.factory.partition(":")
        task: Task = getattr(importlib.import_module(module), name)(**source.arguments)
        return forms_of(for_probing(task))

    def _out_of_memory(self, error: Exception, request: TrialRequest) -> Trial:
        requested, limit = requested_and_limit(str(error))
        return Trial(
            batch=request.batch,
            fits=False,
            used_bytes=requested,
            limit_bytes=limit or self.setup.config.memory_limit,
            error=_memory_cause(error),
            accumulate=request.accumulate,
        )


def _memory_cause(error: Exception) -> str:
    """The reason why a batch does not fit, in one line."""
    text = summary_line(str(error) or type(error).__name__)
    return text.partition(",")[0] if isinstance(error, OutOfMemoryError) else text


def _with_samples(trial: Trial, task: Task) -> Trial:
    """The trial with the number of training samples, where it is known."""
    from tpukit.train.task import overrides

    try:
        samples = task.known_samples
        if overrides(task, "count_samples"):
            samples = task.count_samples()
        return dataclasses.replace(trial, samples=samples, seen=task.seen_samples)
    except TpukitError:
        return trial


def _error_fields(error: Exception, request: TrialRequest) -> dict[str, Any]:
    """An error as JSON; one that is not tpukit's own is the task's."""
    if not isinstance(error, TpukitError):
        failure = task_failure(error)
        cause = failure.message if failure else _cause(error)
        error = JobError(
            f"the task failed at batch {request.batch}, not for lack of memory: {cause}",
            (failure and failure.hint)
            or "Fix the task; --debug shows more of a training command's error.",
            id="task-failed",
        )
    return {"message": error.message, "hint": error.hint, "id": error.id,
            "exit_code": error.exit_code}  # fmt: skip


def _cause(error: Exception) -> str:
    """An exception outside of the user's code, with the model's line where it has one."""
    frame = model_frame(error)
    where = f" ({frame.filename}:{frame.lineno})" if frame else ""
    return f"{type(error).__name__}: {summary_line(str(error))}{where}"


def read_result(result: Mapping[str, Any]) -> Trial:
    """The trial of a result; raises its error."""
    if "trial" in result:
        return Trial(**result["trial"])
    error = result["error"]
    kind = UsageError if error["exit_code"] == UsageError.exit_code else JobError
    raise kind(error["message"], error["hint"], id=error["id"])


# -- several ranks -------------------------------------------------------------------------------
def _run_in_ranks(setup: TrialSetup, request: TrialRequest) -> Trial:
    """Runs the trial in as many ranks as a run has, under torchrun."""
    from tpukit.hardware.launch.launcher import launch

    message = {"setup": dataclasses.asdict(setup), "request": dataclasses.asdict(request)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "message.json"
        file.write_text(json.dumps(message))
        log, code = io.StringIO(), 1
        with contextlib.redirect_stderr(log):
            try:
                code = launch(["--rank", str(file)], setup.world_size, setup.config, module=MODULE)
            except JobError as killed:
                print(killed.message, file=log)
        print(log.getvalue(), file=sys.stderr)
        results = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*"))]
    # Other ranks' errors (a lost connection) follow from these two.
    for result in results:
        if "trial" in result and not result["trial"]["fits"]:
            return read_result(result)
    if "SIGKILL" in log.getvalue():
        raise MemoryError("a rank was killed by the system for lack of memory (SIGKILL)")
    for result in results:
        read_result(result)
    if code or not results:
        raise RuntimeError(f"torchrun ended with exit code {code} and no reason")
    return read_result(results[0])


def _run_as_rank(file: Path) -> int:
    """One rank of a launched trial: its result goes into a file beside the message."""
    message = json.loads(file.read_text())
    setup = dataclasses.replace(TrialSetup.from_json(message["setup"]), world_size=1)
    runner = TrialRunner(setup)
    runner.prepare()
    result = runner.result(TrialRequest(**message["request"]))
    path = file.with_name(f"rank-{os.environ['RANK']}")
    write_file(path, json.dumps(result).encode(), sync=False)
    return 0 if result.get("trial", {}).get("fits") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
