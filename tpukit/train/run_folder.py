"""The run folder: its files, its lock, and reading a run that is there."""

import contextlib
import hashlib
import json
import os
import platform
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpukit import __version__
from tpukit.errors import CheckpointError, UsageError
from tpukit.io.files import write_file
from tpukit.io.lock import LockedError, exclusive, is_held
from tpukit.io.mirror import path_here
from tpukit.io.remote import address_of
from tpukit.io.toml import toml_text
from tpukit.knowledge.versions import installed_versions
from tpukit.train.checkpoint import (
    STATE_FILE,
    Checkpoint,
    newest_good,
    open_checkpoint,
    read_pointer,
    require_finite,
)
from tpukit.train.remote_run import RunStore, store_of

SUM_LINE = "# SHA-256 of the lines below: "
VERSIONED = (
    *("torch", "torch_xla", "torch_tpu", "libtpu", "jax"),
    *("accelerate", "timm", "numpy"),
)


@dataclass(unsafe_hash=True)
class RunFolder:
    """The files of a run."""

    path: Path
    address: str | None = None
    """Address of the run, if `path` is a copy of it."""

    def __post_init__(self) -> None:
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.log = self.path / "log.txt"
        self.logs = self.path / "logs"
        self.report = self.path / "report.html"
        self.tests = self.path / "tests.json"
        self.held_out = self.path / "held_out.csv"
        self.lock = self.path / ".lock"

    @property
    def shown(self) -> str:
        """The run folder as a user names it."""
        return self.address or str(self.path)

    @property
    def store(self) -> RunStore:
        """Where the run is kept."""
        return store_of(self.path, self.address)

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.txt"

    def create(self) -> None:
        """Makes the folders. Raises UsageError where they cannot be written."""
        try:
            for folder in (self.path, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _unusable(self.path, error) from error
        files = [self.config, self.metrics, self.events, self.log, self.lock, self.report]
        files += [self.tests, self.path / "loss.png"]
        files += [self.checkpoints / name for name in ("latest", "best")]
        files += self.logs.glob("rank-*.txt")
        for file in files:
            if os.path.lexists(file) and not file.is_file():
                raise UsageError(
                    f"{file} is not a file, and the run writes one there.",
                    "Rename or remove it, or choose another folder with --results-dir.",
                    id="run-folder",
                )

    def remove_if_unused(self) -> None:
        """Removes what `create` made, where no run began in it (bad data, say)."""
        if self.config.exists():
            return
        with contextlib.suppress(OSError):
            for file in (*self.path.glob(".lock*"), *self.logs.glob("rank-*.txt")):
                file.unlink(missing_ok=True)
            for folder in (self.checkpoints, self.logs, self.path):
                folder.rmdir()

    def set_aside(self) -> Path | str | None:
        """Renames an old run; its new path, or None where there was none."""
        if self.address is not None:
            return self.store.set_aside()
        if not self.config.exists() and not self.checkpoints.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside


def run_folder(place: str | Path) -> RunFolder:
    """The run folder at a path or an address."""
    address = address_of(place)
    return RunFolder(Path(place)) if address is None else RunFolder(path_here(address), address)


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Locks the folder: it has one live run. Raises UsageError naming the process that holds it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive(folder.lock))
        except LockedError as error:
            raise UsageError(
                f"Another run is writing to {folder.shown} (process {error.owner or 'unknown'}).",
                "Wait for it, end it, or choose another folder with --results-dir.",
                id="run-locked",
            ) from error
        except OSError as error:
            raise _unusable(folder.path, error) from error
        yield


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"The run folder {path} cannot be written: {error.strerror}.",
        "Choose another one with --results-dir.",
        id="run-folder",
    )


# -- config.toml ---------------------------------------------------------------------------------
def versions() -> dict[str, str]:
    """Versions of the packages that decide a run's arithmetic: tpukit's is that of the code."""
    found = {"python": platform.python_version(), "tpukit": __version__}
    return found | installed_versions(VERSIONED)


def write_config(folder: RunFolder, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes `config.toml`: one table after the other, None left out; its SHA-256 on top."""
    lines = ["# Everything that was decided; `--config` takes this file.", ""]
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [
            f"{name} = {toml_text(value)}" for name, value in values.items() if value is not None
        ]
        lines.append("")
    text = "\n".join(lines)
    write_file(folder.config, f"{SUM_LINE}{_sum_of_text(text)}\n{text}".encode())


def _sum_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_config(folder: RunFolder) -> dict[str, Any]:
    """The tables of a run's `config.toml`.

    Raises CheckpointError where it is missing, damaged, or not what the run wrote.
    """
    try:
        text = folder.config.read_text(encoding="utf-8")
        first, _, content = text.partition("\n")
        if first.startswith("# SHA") and first != f"{SUM_LINE}{_sum_of_text(content)}":
            raise CheckpointError(
                f"{folder.config} is not what the run wrote: its SHA-256 is another one.",
                "Undo the change; to use the file as it is, delete its first line.",
            )
        tables = tomllib.loads(text)
        missing = [f"[{name}]" for name in ("train", "task") if name not in tables]
        if missing:
            raise CheckpointError(f"{folder.config} is damaged: it has no {', '.join(missing)}.")
        return tables
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder.shown} is not a run folder: it has no config.toml.",
            "Give the folder that a training command wrote (--run DIR).",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder.config} cannot be read: {error}.") from error


# -- a run to use --------------------------------------------------------------------------------
@dataclass(frozen=True)
class TrainedRun:
    """A run as `test` and `predict` use it."""

    path: Path
    task: str
    source: str | None
    """`FILE:CLASS` of a user's own task, as far as the run recorded it."""
    task_config: dict[str, Any]
    train_config: dict[str, Any]
    checkpoint: Checkpoint
    unfinished: str | None = None
    """Last step of a run that is not at its end (`step 5 of 125, never validated`); None: it is,
    its length is unknown, or one checkpoint of it was named."""
    address: str | None = None
    """Address of the run, if `path` is a copy of it."""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path, self.address)

    def weights(self) -> dict[str, Any]:
        """The state dict with the EMA weights where the run kept them, else the trained ones; on
        the CPU."""
        trained = self.checkpoint.weights()
        # Runs of earlier versions had their first update after that number of steps.
        late = self.train_config.get("ema_updates", "multiples") == "multiples"
        if late and self.checkpoint.state.step < int(self.train_config.get("ema_every", 1)):
            return trained
        trained.update(self.checkpoint.tensors("ema"))
        return trained


def open_run(place: str | Path, log: Callable[[str], None]) -> TrainedRun:
    """A run folder's task, configs and best checkpoint (the newest good one if it is damaged).

    `place` may also be one checkpoint folder of a run.
    """
    path = Path(place)
    is_checkpoint = path.name.startswith("step-") and path.parent.name == "checkpoints"
    folder = run_folder(path.parent.parent if is_checkpoint else path)
    if not is_held(folder.lock):  # a live run here has written what its address has
        folder.store.pull(best=True)
    path = folder.checkpoints / path.name if is_checkpoint else folder.path
    if not folder.path.is_dir():
        raise CheckpointError(
            f"Run folder {address_of(place) or place} does not exist.",
            "Train first, or give another one with --run DIR.",
        )
    config = read_config(folder)
    checkpoint = open_checkpoint(path) if is_checkpoint else _best_checkpoint(folder, log)
    settings = dict(config.get("task", {}))
    name = str(settings.pop("name", checkpoint.state.task))
    source = settings.pop("source", None)
    train_config = dict(config.get("train", {}))
    unfinished = None if is_checkpoint else unfinished_at(folder, config)
    return TrainedRun(
        folder.path, name, source, settings, train_config, checkpoint, unfinished, folder.address
    )


def unfinished_at(folder: RunFolder, config: Mapping[str, Any]) -> str | None:
    """See `TrainedRun.unfinished`; `config`: the run's tables."""
    decided, patience = config.get("decided", {}), config.get("train", {}).get("early_stopping")
    try:
        state = _latest_state(folder)
        step, total = int(state["step"]), int(decided["total_steps"])
        if step >= total or (patience and int(state.get("since_best", 0)) >= patience):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    unseen = decided.get("validation_samples") and not state.get("best")
    return f"step {step} of {total}" + (", never validated" if unseen else "")


def read_last_best(folder: RunFolder) -> dict[str, float]:
    """The best metric by name and its `step`, as the latest checkpoint has it; else empty."""
    try:
        best = _latest_state(folder)["best"]
        return {str(key): float(value) for key, value in best.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _latest_state(folder: RunFolder) -> dict[str, Any]:
    """What the latest checkpoint's `state.json` holds. Raises what its reading raises."""
    name = read_pointer(folder.checkpoints / "latest") or ""
    state: dict[str, Any] = json.loads((folder.checkpoints / name / STATE_FILE).read_bytes())
    return state


def _best_checkpoint(folder: RunFolder, log: Callable[[str], None]) -> Checkpoint:
    best = read_pointer(folder.checkpoints / "best")
    if best is not None:
        try:
            checkpoint = open_checkpoint(folder.checkpoints / best)
            require_finite(checkpoint)
            return checkpoint
        except CheckpointError as error:
            log(f"The best checkpoint is not usable: {error.message}")
    newest = newest_good(folder.checkpoints, log)
    if newest is None:
        raise CheckpointError(
            f"{folder.shown} has no checkpoint yet.",
            "Train on, or give another run with --run DIR.",
        )
    return newest
