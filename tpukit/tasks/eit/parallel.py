"""Chunks of work over all cores: child processes that read chunk numbers and write results.

Plain subprocesses instead of a pool: they start without the parent's main module, with one thread
of linear algebra each, and end when their parent does, however it ends.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tpukit
from tpukit.errors import DataError, JobError, TpukitError
from tpukit.io.process import die_with_parent

Json = Any
ChunkFunction = Callable[[dict[str, Json], Json], Json]
"""`function(arguments, chunk) -> result`, all of them JSON values; a module-level function."""


def run_chunks(
    function: ChunkFunction, arguments: dict[str, Json], chunks: Sequence[Json], workers: int
) -> Iterator[tuple[int, Json]]:
    """(position in `chunks`, result) in the order they are done.

    Raises what the function raised (a `TpukitError` as a `DataError` or `JobError` of the same
    text), `JobError` where a worker died.
    """
    workers = min(workers, len(chunks))
    job = {
        "function": f"{function.__module__}:{function.__name__}",
        "arguments": arguments,
        "parent": os.getpid(),
    }
    processes = [_start_worker(job) for _ in range(workers)]
    try:
        yield from _hand_out(processes, chunks)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()


def _start_worker(job: dict[str, Json]) -> subprocess.Popen[bytes]:
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    root = str(Path(tpukit.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "tpukit.tasks.eit.parallel"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, **threads, "PYTHONPATH": path},
        # Ctrl-C reaches the parent alone, which ends its workers.
        start_new_session=True,
    )
    _send(process, job)
    return process


def _send(process: subprocess.Popen[bytes], message: Json) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        raise _died(process) from None


def _hand_out(
    processes: list[subprocess.Popen[bytes]], chunks: Sequence[Json]
) -> Iterator[tuple[int, Json]]:
    waiting = iter(enumerate(chunks))
    with selectors.DefaultSelector() as selector:
        for process in processes:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, (process, bytearray()))
            _send_next(process, waiting)
        for _ in range(len(chunks)):
            process, answer = _next_answer(selector)
            # The worker goes on while its result is looked at.
            _send_next(process, waiting)
            yield answer["position"], _result(answer)


def _send_next(process: subprocess.Popen[bytes], waiting: Iterator[tuple[int, Json]]) -> None:
    following = next(waiting, None)
    if following is not None:
        _send(process, {"position": following[0], "chunk": following[1]})


def _next_answer(selector: selectors.BaseSelector) -> tuple[subprocess.Popen[bytes], Json]:
    while True:
        for key, _ in selector.select():
            process, buffer = key.data
            received = os.read(key.fd, 1 << 16)
            if not received:
                raise _died(process)
            buffer += received
            # One chunk a worker at a time: a line's end is the end of what it has to say.
            if buffer.endswith(b"\n"):
                answer = json.loads(buffer)
                buffer.clear()
                return process, answer


def _died(process: subprocess.Popen[bytes]) -> JobError:
    code = process.wait()
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    hint = "Out of memory, perhaps: try fewer --workers." if code == -9 else None
    return JobError(f"A worker process ended before its work was done ({how}).", hint)


def _result(answer: Json) -> Json:
    if "error" not in answer:
        return answer["result"]
    error = answer["error"]
    kind = DataError if error["exit_code"] == DataError.exit_code else JobError
    raise kind(error["message"], error["hint"], id=error["id"])


def _work() -> None:
    """A worker: the job on the first line of standard input, then a chunk a line."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    die_with_parent(job["parent"])
    module, name = job["function"].split(":")
    function: ChunkFunction = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        message = json.loads(line)
        answer = _attempt(function, job["arguments"], message["chunk"])
        try:
            answers.write(json.dumps({"position": message["position"], **answer}).encode() + b"\n")
        except BrokenPipeError:
            return


def _attempt(function: ChunkFunction, arguments: dict[str, Json], chunk: Json) -> dict[str, Json]:
    try:
        return {"result": function(arguments, chunk)}
    except TpukitError as error:
        named = {"message": error.message, "hint": error.hint, "id": error.id}
        return {"error": {**named, "exit_code": error.exit_code}}
    except Exception as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        named = {"message": message, "hint": None, "id": "unexpected"}
        return {"error": {**named, "exit_code": JobError.exit_code}}


if __name__ == "__main__":
    _work()
