"""Checkpoints: atomic writes, verified when read.

A checkpoint is a folder `step-00001000` with `model`, `ema` and `optimizer` as .safetensors (where
ranks hold shards, in files of `shards.py`), the other entries of the model's state dict as
`extra_state.pt`, the run's artifacts (normalisation, tokenizer) as they are, and `state.json` with
the rest and the SHA-256 of every file. A reader never sees half of one: the folder appears by a
rename, and its state's file is the last one.
"""

import hashlib
import io
import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tpukit.errors import CheckpointError, JobError, NonFiniteLossError, UsageError
from tpukit.hardware.backend import Backend
from tpukit.hardware.modules import local
from tpukit.io.files import partial_of, replacing_folder, sha256_of, sync_file, write_file
from tpukit.train.shards import (
    INDEX_FILE,
    Shards,
    first_of_ranks,
    group_of_writers,
    is_shard,
    write_shards,
)

FORMAT = 1
KEPT = 2
STATE_FILE = "state.json"
EXTRA_FILE, STREAM_FILE = "extra_state.pt", "stream.pt"
TENSOR_FILES = ("model", "ema", "optimizer")
FOLDER_NAME = re.compile(r"step-\d{8,}")
"""What names a checkpoint, not a copy of one (`step-00001000.bak`)."""


@dataclass(frozen=True)
class PlainState:
    """The part of a run's state that JSON can hold."""

    step: int
    """Optimizer steps done; the position in the data follows from it."""
    task: str
    identity: dict[str, Any]
    """What a resumed run must share: the task's own values and the training arithmetic."""
    scaler: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    """`loss` (or another metric) and `step` of the best validation so far."""
    since_best: int = 0
    """Validations since then."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """The optimizer's class, and its state but for the tensors."""
    window: list[float] = field(default_factory=list)
    """Sums since the last log line, so that the log goes on as well."""
    not_finite: list[str] = field(default_factory=list)
    """Parameters and buffers that were not finite when the run began, and may stay so."""


StateDict = dict[str, Any]
"""`RunState.state_dict()`: `plain` (PlainState), tensors by name as `model`, `optimizer` and, where
it is kept, `ema`, what else the model's state dict has (`extra`, of `pack_state`), the `artifacts`,
the training stream's position (`stream`) and the names of the parameters that are `trained`."""


# -- writing -------------------------------------------------------------------------------------
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
    kept = ((file, key, local(t)) for file, of in _tensors(state).items() for key, t in of.items())
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
    body["sha256_of_this"] = _sum_of_values(body)
    path = partial / STATE_FILE
    path.write_bytes(_text_of_state(body))
    sync_file(path)


def _record_best(checkpoint: Path, best: Mapping[str, float]) -> None:
    """Makes a written checkpoint's own validation the best one so far."""
    path = checkpoint / STATE_FILE
    body = json.loads(path.read_bytes())
    body |= {"best": dict(best), "since_best": 0}
    del body["sha256_of_this"]
    body["sha256_of_this"] = _sum_of_values(body)
    write_file(path, _text_of_state(body))
    point(checkpoint.parent / "best", checkpoint.name)


def _text_of_state(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode()


def _sum_of_values(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def first_not_finite(
    tensors: Iterable[tuple[str, str, Tensor]], trained: Collection[str], allowed: Collection[str]
) -> str | None:
    """The first tensor of (file, name, tensor) with a value that no run can go on with, if any.

    NaN is none; infinities are meant in buffers (masks) and in an optimizer's state, but not in
    trained parameters. `allowed`: names of what may hold anything.
    """
    for file, key, tensor in tensors:
        name = key.split("/")[1] if file == "optimizer" else key
        if name in allowed or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        ends = _ends(tensor)
        strict = file != "optimizer" and name in trained
        if ends.isnan().any() or (strict and ends.isinf().any()):
            return f"{key} of {file} holds {'nan' if ends.isnan().any() else 'inf'}"
    return None


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; of numbers that are not floats, yes."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return not is_float or bool(_ends(tensor.detach()).isfinite().all())


def _ends(tensor: Tensor) -> Tensor:
    """The smallest and the largest value, in one pass; NaN where there is one."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.numel():
        return torch.zeros(2)
    if values.element_size() == 1:  # of 8-bit floats torch knows no order
        values = values.float()
    return torch.stack(torch.aminmax(values)).float()


def _sync_and_sum(path: Path) -> str:
    sync_file(path)
    return sha256_of(path)


def point(pointer: Path, name: str) -> None:
    """Writes a name into a pointer file (`latest`, `best`)."""
    write_file(pointer, (name + "\n").encode())


def name_of(step: int) -> str:
    return f"step-{step:08d}"


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
        send: Callable[[Path], object] | None = None,
    ) -> None:
        self.folder = folder
        self._after = after
        self._is_main = is_main
        self._send = send
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    def write(self, state: Stateful, *, is_best: bool) -> None:
        """Copies the state and starts writing, after the one before has ended: else the host would
        hold two copies."""
        self.wait()
        copied = state.state_dict()
        every = (tensor for named in _tensors(copied).values() for tensor in named.values())
        in_shards = any(isinstance(tensor, DTensor) for tensor in every)
        if in_shards and self._group is None:
            self._group = group_of_writers()
        if self._is_main or in_shards:
            self._pending = self._pool.submit(self._write, copied, is_best)

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


# -- reading -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder, its tensors read on demand."""

    path: Path
    state: PlainState
    files: frozenset[str]
    """Names of the files that were written, without the state's: nothing else is read."""

    @cached_property
    def shards(self) -> Shards | None:
        """What reads the tensors of a sharded run."""
        return Shards(self.path) if INDEX_FILE in self.files else None

    def shapes(self, name: str) -> dict[str, Tensor]:
        """The tensors of `model`, `ema` or `optimizer` without values; empty where that file is not
        kept."""
        if self.shards is not None:
            return self.shards.shapes(name)
        if f"{name}.safetensors" not in self.files:
            return {}
        with safe_open(self.path / f"{name}.safetensors", "pt") as opened:
            return {key: opened.get_tensor(key).to("meta") for key in opened.keys()}  # noqa: SIM118

    def tensors(self, name: str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Those tensors, or some of them, whole and on the host."""
        shapes = self.shapes(name)
        wanted = shapes if keys is None else {key: shapes[key] for key in keys}
        if self.shards is not None:
            found = {key: torch.empty_like(t, device="cpu") for key, t in wanted.items()}
            self.shards.fill(name, found)
            return found
        if not wanted:
            return {}
        with safe_open(self.path / f"{name}.safetensors", "pt") as opened:
            return {key: opened.get_tensor(key) for key in wanted}

    def load(self, name: str, targets: Mapping[str, Tensor], backend: Backend) -> None:
        """Reads tensors of a file into some of the devices; each rank its part of sharded ones."""
        direct = {key: t for key, t in targets.items() if self.shards and isinstance(t, DTensor)}
        if self.shards is not None and direct:
            self.shards.fill(name, direct)
        for key in targets.keys() - direct.keys():
            backend.load({key: targets[key]}, self.tensors(name, [key]))

    def each_tensor(self) -> Iterator[tuple[str, str, Tensor]]:
        """(file, name, tensor), read one at a time."""
        for file in TENSOR_FILES:
            for name in self.shapes(file):
                yield file, name, self.tensors(file, [name])[name]

    def weights(self, *, averaged: bool = False) -> dict[str, Any]:
        """The model's state dict: its tensors, and where it was written what else there is.

        averaged: with the EMA weights, where they are kept.
        """
        files = ["model", "ema"] if averaged else ["model"]
        return self._extra() | {k: t for file in files for k, t in self.tensors(file).items()}

    def weights_of(
        self, model: nn.Module, backend: Backend, *, averaged: bool = False
    ) -> dict[str, Any]:
        """The same, read into the tensors of a prepared model, but for those of another shape."""
        state, own = self._extra(), model.state_dict()
        for file in ["model", "ema"] if averaged else ["model"]:
            places = {
                key: own[key]
                if key in own and own[key].shape == shape.shape
                else torch.empty_like(shape, device="cpu")
                for key, shape in self.shapes(file).items()
            }
            self.load(file, places, backend)
            state |= places
        return state

    def _extra(self) -> dict[str, Any]:
        if EXTRA_FILE not in self.files:
            return {}
        return unpack_state((self.path / EXTRA_FILE).read_bytes())

    def state_dict(self) -> StateDict:
        """What `RunState.load_state_dict` takes, but for the EMA weights."""
        return {"plain": self.state, "stored": self, "stream": self.stream()}

    def stream(self) -> bytes | None:
        """Position of the training stream; None without one, or where it keeps no position."""
        return (self.path / STREAM_FILE).read_bytes() if STREAM_FILE in self.files else None

    def artifacts(self) -> dict[str, bytes]:
        """The run's small files by name."""
        other = {EXTRA_FILE, STREAM_FILE, *(f"{name}.safetensors" for name in TENSOR_FILES)}
        other |= {name for name in self.files if self.shards and is_shard(name)}
        return {name: (self.path / name).read_bytes() for name in sorted(self.files - other)}


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, the newest first."""
    found = (path for path in folder.glob("step-*") if path.is_dir())
    numbered = {int(path.name[5:]): path for path in found if FOLDER_NAME.fullmatch(path.name)}
    return [numbered[step] for step in sorted(numbered, reverse=True)]


def read_pointer(pointer: Path) -> str | None:
    """The name in `latest` or `best`, if it names a checkpoint that exists."""
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if FOLDER_NAME.fullmatch(name) and (pointer.parent / name).is_dir() else None


def point_as_recorded(checkpoint: Checkpoint) -> None:
    """Points `latest` and `best` at what a checkpoint says of them.

    A killed writer may have left them behind, or ahead of a checkpoint that was damaged since.
    """
    folder = checkpoint.path.parent
    names = {"latest": checkpoint.path.name}
    if step := checkpoint.state.best.get("step"):
        names["best"] = name_of(int(step))
    for pointer, name in names.items():
        if read_pointer(folder / pointer) != name and (folder / name).is_dir():
            point(folder / pointer, name)


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """A checkpoint whose files' sums were verified. Raises CheckpointError naming the file.

    verify: False where another rank has done so.
    """
    try:
        body = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        if body.pop("sha256_of_this", None) != _sum_of_values(body):
            raise ValueError("its values are not those that were written")
        found_format, sums = body.pop("format"), body.pop("sha256")
        if found_format != FORMAT:
            raise CheckpointError(
                f"Checkpoint {path} has format {found_format!r}; this tpukit reads {FORMAT}.",
                "Use the tpukit version that wrote it, or start anew with --no-resume.",
            )
        body.pop("random", None)  # of earlier versions: draws are a function of seed and step
        state = PlainState(**body)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path / STATE_FILE} is damaged or missing: {error}.") from error
    for file, expected in ((path / n, digest) for n, digest in sums.items() if verify):
        try:
            found = sha256_of(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
        if found != expected:
            raise CheckpointError(
                f"{file} is damaged: its SHA-256 is not the one that was recorded."
            )
    return Checkpoint(path, state, frozenset(sums))


def require_finite(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a state that no run can go on with: earlier versions wrote such.

    The trained parameters are those that the optimizer keeps a state for.
    """
    if checkpoint.shards is not None:
        return  # each rank looked at its part
    tensors = checkpoint.each_tensor()
    trained = {key.split("/")[1] for key in checkpoint.shapes("optimizer")}
    if place := first_not_finite(tensors, trained, checkpoint.state.not_finite):
        raise CheckpointError(f"{place}: no run can go on from it.")


def newest_good(folder: Path, log: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies and is finite; logs which ones are not; None where there
    is none.

    Raises CheckpointError where there are checkpoints and none is good.
    """
    problems = []
    for path in list_checkpoints(folder):
        try:
            checkpoint = open_checkpoint(path)
            require_finite(checkpoint)
        except CheckpointError as error:
            problems.append(error)
            log(f"Skipping checkpoint {path.name}: {error.message}")
            continue
        if problems:
            log(f"Using the checkpoint before it: {path.name}.")
        return checkpoint
    if problems:
        raise CheckpointError(
            f"No checkpoint in {folder} is intact. {problems[0].message}",
            "Start anew with --no-resume (the old run is set aside, not deleted), --init-from RUN"
            " for the weights of another one.",
        )
    return None


# -- the model in it ------------------------------------------------------------------------------
def tensors_of(model: nn.Module, *, frozen: bool = True) -> dict[str, Tensor]:
    """The tensors of the state dict by name; tied ones once, under their first name.

    frozen: with parameters that are not trained, of which EMA weights have none of their own.
    """
    found, seen = {}, set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        if frozen or value.requires_grad or not isinstance(value, nn.Parameter):
            found[name] = value
    return found


def others_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state dict beside tensors, with the versions of its modules."""
    others = OrderedDict((n, value) for n, value in state.items() if not isinstance(value, Tensor))
    others._metadata = getattr(state, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return others


def pack_state(state: Mapping[str, Any]) -> bytes:
    """Those entries, in host memory, as `torch.load(..., weights_only=True)` reads them.

    Raises UsageError naming one that it does not read.
    """
    others: Any = others_of(state)
    on_host = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), others)
    on_host._metadata = others._metadata
    try:
        unpack_state(packed := _saved(on_host))
    except Exception as error:  # whatever a pickle, and what reads it, raises
        name = next((n for n, value in on_host.items() if not _is_readable(value)), "_metadata")
        raise UsageError(
            f"the model's state dict holds a {type(on_host.get(name)).__name__} as {name!r}, which"
            " `torch.load(..., weights_only=True)` does not read: no checkpoint can be made of it.",
            "Have `get_extra_state` return tensors, numbers, texts, lists and dicts of these.",
            id="task-value",
        ) from error
    return packed


def unpack_state(packed: bytes) -> dict[str, Any]:
    """The values again; nothing in them is executed."""
    return torch.load(io.BytesIO(packed), weights_only=True)  # type: ignore[no-any-return]


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _is_readable(value: Any) -> bool:
    try:
        unpack_state(_saved(value))
    except Exception:
        return False
    return True
