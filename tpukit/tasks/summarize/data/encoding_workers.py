"""Rows to tokens in child processes.

Plain subprocesses instead of a pool: they start without the parent's main module (which need not be
guarded, and may be a notebook), and end when their parent does, however it ends.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import tpukit
from tpukit.errors import JobError
from tpukit.tasks.summarize.data.csv_file import Row
from tpukit.tasks.summarize.data.prompt import Example, PromptFormat
from tpukit.tasks.summarize.data.tokenizer import Tokenizer

EncodedRow = tuple[int, Example | None]


def encode_rows(prompts: PromptFormat, rows: list[Row]) -> list[EncodedRow]:
    """Each row's number and example."""
    return [(row.number, prompts.example(row.dialogue, row.summary)) for row in rows]


class EncodingWorkers:
    """Child processes that take chunks in turn, so that answers come back in order."""

    def __init__(self, prompts: PromptFormat, count: int) -> None:
        self._setup = (prompts.tokenizer.to_bytes(), prompts.block_size)
        self._count = count
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        root = str(Path(tpukit.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        for _ in range(self._count):
            worker = subprocess.Popen(
                [sys.executable, "-m", "tpukit.tasks.summarize.data.encoding_workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            self._workers.append(worker)
            _send(worker.stdin, self._setup)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                if stream:
                    stream.close()

    def encode(self, chunks: Iterable[list[Row]]) -> Iterator[list[EncodedRow]]:
        """Answers in the order of the chunks; each worker has one chunk at a time."""
        busy: deque[subprocess.Popen[bytes]] = deque()
        idle = deque(self._workers)
        for chunk in chunks:
            if not idle:
                worker = busy.popleft()
                answer = _receive(worker)
                idle.append(worker)
                yield answer
            worker = idle.popleft()
            try:
                _send(worker.stdin, chunk)
            except BrokenPipeError:
                raise _died(worker) from None
            busy.append(worker)
        while busy:
            yield _receive(busy.popleft())


def _send(stream: IO[bytes] | None, message: Any) -> None:
    assert stream is not None
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def _receive(worker: subprocess.Popen[bytes]) -> list[EncodedRow]:
    assert worker.stdout is not None
    try:
        answer: list[EncodedRow] = pickle.load(worker.stdout)
    except EOFError:
        raise _died(worker) from None
    return answer


def _died(worker: subprocess.Popen[bytes]) -> JobError:
    return JobError(
        f"A tokenising process ended before its work was done (exit code {worker.wait()}).",
        "Out of memory, perhaps: free some and run the same command again.",
    )


def work() -> None:
    """A worker: the setup, then chunks, until its parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        tokenizer, block_size = pickle.load(sys.stdin.buffer)
        prompts = PromptFormat(Tokenizer.from_bytes(tokenizer, "the tokenizer"), block_size)
        while True:
            _send(answers, encode_rows(prompts, pickle.load(sys.stdin.buffer)))
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    work()
