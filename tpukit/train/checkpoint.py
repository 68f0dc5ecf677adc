"""Checkpoints: what they consist of, and how they are read, verified.

A checkpoint is a folder `step-00001000` with `model`, `ema` and `optimizer` as .safetensors (where
ranks hold shards, in files of `shards.py`), the other entries of the model's state dict as
`extra_state.pt`, the run's artifacts (normalisation, tokenizer) as they are, and `state.json` with
the rest and the SHA-256 of every file. A reader never sees half of one: the folder appears by a
rename, and its state's file is the last one.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpukit.errors import CheckpointError
from tpukit.hardware.backend import Backend
from tpukit.io.files import sha256_of, write_file
from tpukit.train.finite import first_not_finite
from tpukit.train.module_state import unpack_state
from tpukit.train.shards import INDEX_FILE, Shards, is_shard

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


def sum_of_values(body: Mapping[str, Any]) -> str:
    """The SHA-256 of a state's own values."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def point(pointer: Path, name: str) -> None:
    """Writes a name into a pointer file (`latest`, `best`)."""
    write_file(pointer, (name + "\n").encode())


def name_of(step: int) -> str:
    return f"step-{step:08d}"


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
        return {key: tensor.to("meta") for key, tensor in self._each_of(name)}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Those tensors, whole and on the host."""
        if self.shards is None:
            return dict(self._each_of(name))
        found = {k: torch.empty_like(t, device="cpu") for k, t in self.shapes(name).items()}
        self.shards.fill(name, found)
        return found

    def load(self, name: str, targets: Mapping[str, Tensor], backend: Backend) -> None:
        """Reads tensors of a file into some of the devices; each rank its part of sharded ones."""
        direct = {key: t for key, t in targets.items() if self.shards and isinstance(t, DTensor)}
        if self.shards is not None and direct:
            self.shards.fill(name, direct)
        whole = [key for key in targets if key not in direct]
        for key, tensor in self._each_of(name, whole):
            backend.load({key: targets[key]}, {key: tensor})

    def each_tensor(self) -> Iterator[tuple[str, str, Tensor]]:
        """(file, name, tensor), read one at a time."""
        for file in TENSOR_FILES:
            for name, tensor in self._each_of(file):
                yield file, name, tensor

    def _each_of(
        self, name: str, keys: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of a file, or of some of its tensors, the file opened once."""
        if self.shards is not None:
            for key, shape in self.shapes(name).items():
                if keys is None or key in keys:
                    tensor = torch.empty_like(shape, device="cpu")
                    self.shards.fill(name, {key: tensor})
                    yield key, tensor
        elif f"{name}.safetensors" in self.files:
            with safe_open(self.path / f"{name}.safetensors", "pt") as opened:
                for key in opened.keys() if keys is None else keys:
                    yield key, opened.get_tensor(key)

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
        if body.pop("sha256_of_this", None) != sum_of_values(body):
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
