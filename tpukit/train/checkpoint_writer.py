"""Writing checkpoints: files beside, synced, summed and renamed, on a thread of each rank."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from tpukit.errors import JobError, NonFiniteLossError
from tpukit.hardware.host_parts import is_in_parts, pieces
from tpukit.io.files import partial_of, replacing_folder, sha256_of, sync_file, write_file
from tpukit.train.checkpoint import (
    EXTRA_FILE,
    FORMAT,
    KEPT,
    STATE_FILE,
    STREAM_FILE,
    TENSOR_FILES,
    PlainState,
    StateDict,
    list_checkpoints,
    name_of,
    point,
    read_pointer,
    sum_of_values,
)
from tpukit.train.finite import first_not_finite
from tpukit.train.shards import first_of_ranks, group_of_writers, write_shards


def write_checkpoint(
    folder: Path,
    state: StateDict,
    group: dist.ProcessGroup | None = None,
    send: Callable[[Path], object] | None = None,
) -> Path:
    """Writes one checkpoint into `folder` and points `latest` at it. Returns its path.

    On any failure what was there stays as it was, and the partial folder is removed. Raises
    NonFiniteLossError for a state from which no run could go on.

    group: of ranks whose states are shards, all of which call this; the first one commits.
    send: takes the shards of a rank on another host.
    """
    plain: PlainState = state["plain"]
    final = folder / name_of(plain.step)
    kept = (
        (file, key, piece)
        for file, named in _tensors(state).items()
        for key, tensor in named.items()
        for piece in pieces(tensor)
    )
    place = first_not_finite(kept, state["trained"], plain.not_finite)
    if place := place if group is None else first_of_ranks(place, group):
        raise NonFiniteLossError(
            f"The state stopped being finite by step {plain.step}: {place}. No checkpoint"
            " was written of it.",
            "Lower --lr, or give the optimizer a larger eps; the same command resumes from the"
            " checkpoint before.",
        )
    with _errors_of(final):
        if group is not None and dist.get_rank(group) > 0:
            write_shards(partial_of(final), _tensors(state), group, send)
            return final
        with replacing_folder(final) as partial:
            _write_files(partial, state, group)
            if final.exists():  # damaged: the run went on from one before it
                _take_away(final)
        point(folder / "latest", final.name)
    return final


@contextmanager
def _errors_of(checkpoint: Path) -> Iterator[None]:
    """Turns what fails while a checkpoint is written into an error that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise JobError(
            f"Checkpoint {checkpoint.name} could not be written to {checkpoint.parent}: {error}.",
            "Free disk space and run the same command again: the checkpoint before is intact.",
            id="checkpoint-write",
        ) from error


def _tensors(state: StateDict) -> dict[str, dict[str, Tensor]]:
    return {name: state[name] for name in TENSOR_FILES if name in state}


def _write_files(partial: Path, state: StateDict, group: dist.ProcessGroup | None) -> None:
    """The state's file is the last one."""
    sums = {} if group is None else write_shards(partial, _tensors(state), group)
    for name, tensors in _tensors(state).items() if group is None else ():
        path = partial / f"{name}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        sums[path.name] = _sync_and_sum(path)
    others = {EXTRA_FILE: state["extra"], STREAM_FILE: state["stream"]}
    kept = {name: content for name, content in others.items() if content is not None}
    for name, content in {**state["artifacts"], **kept}.items():
        (partial / name).write_bytes(content)
        sums[name] = _sync_and_sum(partial / name)
    body = {"format": FORMAT, **asdict(state["plain"]), "sha256": sums}
    body["sha256_of_this"] = sum_of_values(body)
    path = partial / STATE_FILE
    path.write_bytes(_text_of_state(body))
    sync_file(path)


def _record_best(checkpoint: Path, best: Mapping[str, float]) -> None:
    """Makes a written checkpoint's own validation the best one so far."""
    path = checkpoint / STATE_FILE
    body = json.loads(path.read_bytes())
    body |= {"best": dict(best), "since_best": 0}
    del body["sha256_of_this"]
    body["sha256_of_this"] = sum_of_values(body)
    write_file(path, _text_of_state(body))
    point(checkpoint.parent / "best", checkpoint.name)


def _text_of_state(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode()


def _sync_and_sum(path: Path) -> str:
    sync_file(path)
    return sha256_of(path)


def remove_superseded(folder: Path) -> None:
    """Keeps the last checkpoints and the best one; removes what a killed writer left."""
    for leftover in [*folder.glob(".*.partial"), *folder.glob(".*.removed")]:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    kept = {path.name for path in list_checkpoints(folder)[:KEPT]}
    kept |= {name for pointer in ("latest", "best") if (name := read_pointer(folder / pointer))}
    for path in list_checkpoints(folder):
        if path.name not in kept:
            _take_away(path)


def _take_away(path: Path) -> None:
    """Deletes a checkpoint; renamed first, so that a reader sees a whole one or none."""
    doomed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


class BackgroundWriter:
    """Writes states one at a time on a thread; a failure surfaces at the next call of any.

    Every rank has one. That of the main rank writes, and calls `after` there for each checkpoint;
    of sharded states each writes its part, and `send` takes the files of other hosts'.
    """

    def __init__(
        self,
        folder: Path,
        after: Callable[[], object] = lambda: None,
        *,
        is_main: bool = True,
        in_shards: bool = False,
        send: Callable[[Path], object] | None = None,
    ) -> None:
        """in_shards: whether states will be; every rank then makes the group of writers now, which
        the first save would wait for."""
        self.folder = folder
        self._after = after
        self._is_main = is_main
        self._send = send
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[object] | None = None
        self._group: dist.ProcessGroup | None = group_of_writers() if in_shards else None

    def write(self, state: Stateful, *, is_best: bool) -> None:
        """Copies the state and starts writing, after the one before has ended: else the host would
        hold two copies."""
        self.wait()
        copied = state.state_dict()
        every = (tensor for named in _tensors(copied).values() for tensor in named.values())
        in_shards = any(map(is_in_parts, every))
        if in_shards and self._group is None:
            self._group = group_of_writers()
        if self._is_main or in_shards:
            self._pending = self._pool.submit(self._write, copied, is_best)

    def prepare(self, fill: Callable[[], object]) -> None:
        """Fills the room for the copies of a first `write` on the thread, which it waits for."""
        self.wait()
        self._pending = self._pool.submit(fill)

    def record_best(self, step: int, best: Mapping[str, float]) -> None:
        """Makes the checkpoint of `step`, which is written, the best one."""
        self.wait()
        checkpoint = self.folder / name_of(step)
        if self._is_main:
            with _errors_of(checkpoint):
                _record_best(checkpoint, best)

    def check(self) -> None:
        """Raises the error of a write that has failed; waits for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def _write(self, state: StateDict, is_best: bool) -> None:
        path = write_checkpoint(self.folder, state, self._group, self._send)
        if not self._is_main:
            return
        with _errors_of(path):
            if is_best:
                point(self.folder / "best", path.name)
            remove_superseded(self.folder)
        self._after()

    def wait(self) -> None:
        """Waits for the write in progress; raises its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Waits and ends the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
