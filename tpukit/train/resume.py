"""Claiming a run folder, and the checkpoint in it that a run resumes from."""

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpukit.errors import CheckpointError, ConfigError, UsageError
from tpukit.hardware.backend import Backend
from tpukit.io.files import replacing_folder
from tpukit.io.process import output_sent_to
from tpukit.train.checkpoint import (
    Checkpoint,
    list_checkpoints,
    newest_good,
    open_checkpoint,
    point,
    read_pointer,
)
from tpukit.train.config import EARLIER_VALUES, TrainConfig
from tpukit.train.plan import RunPlan, TrainingRequest
from tpukit.train.run_folder import RunFolder, locked, run_folder
from tpukit.train.run_log import keep_crashes
from tpukit.train.task import as_recorded, restored
from tpukit.train.weights import open_initial_run


def claim_folder(
    request: TrainingRequest, backend: Backend, stack: ExitStack, log: Callable[[str], None]
) -> ExitStack:
    """Rank 0 makes and locks the folder; the others wait and write to their log files.

    Returns what removes an imported run again, in `stack`, until its callbacks are dropped.
    """
    folder, undo = request.folder, ExitStack()
    if backend.is_main:
        if not request.config.resume and (folder.address or folder.path.exists()):
            with locked(folder), folder.store.claimed(log):
                aside = folder.set_aside()
            if aside:
                log(f"The old run was renamed to {aside}")
        folder.create()
        stack.enter_context(locked(folder))
        stack.enter_context(folder.store.claimed(log))
        folder.store.pull()
        # Under the lock: what another run is about to use is not this one's to remove.
        stack.callback(folder.remove_if_unused)
        stack.enter_context(undo)
        if request.config.resume_from:
            _import_run(request.config.resume_from, folder, undo, log)
    backend.all_gather_objects(None)  # rank 0 has claimed the folder
    if folder.address is not None:
        if not backend.is_main and os.environ.get("LOCAL_RANK", "0") == "0":
            folder.store.pull()  # the first rank of a further node
        backend.all_gather_objects(None)
    keep_crashes(folder, backend.rank)
    # The first rank of a further node prints there: its errors belong to that terminal.
    if not backend.is_main and os.environ.get("LOCAL_RANK", "0") != "0":
        stack.enter_context(output_sent_to(folder.rank_log(backend.rank), 1, 2))
    return undo


def _import_run(
    source: str, folder: RunFolder, undo: ExitStack, log: Callable[[str], None]
) -> None:
    """Copies a read-only run's newest good and best checkpoints, unless this folder is further."""
    if list_checkpoints(folder.checkpoints):
        log(f"{folder.shown} has checkpoints of its own: --resume-from is not needed.")
        return
    origin = run_folder(source)
    origin.store.pull()
    newest = newest_good(origin.checkpoints, log) if origin.checkpoints.is_dir() else None
    if newest is None:
        raise CheckpointError(
            f"--resume-from {source}: no checkpoint in {origin.shown}/checkpoints.",
            "Give the run folder that holds `checkpoints/`.",
        )
    undo.callback(_remove_import, folder)
    best = read_pointer(origin.checkpoints / "best")
    for name in sorted({newest.path.name, best or newest.path.name}):
        with replacing_folder(folder.checkpoints / name) as made:
            source_folder = origin.checkpoints / name
            for file in filter(Path.is_file, source_folder.iterdir()):
                shutil.copyfile(file, made / file.name)
    if best:
        point(folder.checkpoints / "best", best)
    point(folder.checkpoints / "latest", newest.path.name)
    for file in (origin.metrics, origin.config):
        if file.exists():
            shutil.copyfile(file, folder.path / file.name)
    log(f"Starting from {source}, {newest.path.name}.")


def _remove_import(folder: RunFolder) -> None:
    """Leaves nothing of a run that could not go on: it would be taken for one that can."""
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    folder.checkpoints.mkdir()
    for file in (folder.metrics, folder.config):
        file.unlink(missing_ok=True)


def find_checkpoint(
    request: TrainingRequest, backend: Backend, log: Callable[[str], None]
) -> Checkpoint | None:
    """The newest good checkpoint, as rank 0 has verified it."""
    checkpoint, problem = None, None
    if backend.is_main:
        try:
            checkpoint = newest_good(request.folder.checkpoints, log)
        except CheckpointError as error:
            problem = error.message, error.hint
    found = checkpoint and checkpoint.path.name, problem
    name, problem = backend.all_gather_objects(found)[0]
    if problem is not None:
        raise CheckpointError(*problem)
    if name is not None and checkpoint is None:
        with suppress(CheckpointError):
            checkpoint = open_checkpoint(request.folder.checkpoints / name, verify=False)
    seen = backend.all_gather_objects(checkpoint and checkpoint.state.step)
    if len(set(seen)) > 1:
        raise CheckpointError(
            f"The ranks see different checkpoints in {request.folder.shown}: steps {seen}.",
            "All hosts must share the run folder.",
        )
    if source := request.config.init_from:
        if checkpoint is not None:
            log(f"The run in {request.folder.shown} is resumed: --init-from is not used.")
        else:
            run = open_initial_run(request.task, source, log)
            log(f"Initial weights: {source}, {run.checkpoint.path.name}. All else begins anew.")
    return checkpoint


def with_recorded(request: TrainingRequest, checkpoint: Checkpoint) -> TrainingRequest:
    """The request with the run's artifacts, and its settings where defaults have changed since."""
    identity, config, defaults = checkpoint.state.identity, request.config, request.task.defaults
    recorded = {
        name: older
        for name, older in EARLIER_VALUES.items()
        if identity.get(name, older) == older != getattr(TrainConfig, name)
        and getattr(config, name) in (getattr(TrainConfig, name), getattr(defaults, name))
    }
    task = restored(as_recorded(request.task, identity), checkpoint.artifacts())
    return replace(request, task=task, config=replace(config, **recorded))


def require_same_arithmetic(
    plan: RunPlan, checkpoint: Checkpoint, log: Callable[[str], None]
) -> None:
    """Raises ConfigError naming what differs from the run that left the checkpoint.

    Checkpoints of earlier versions do not identify their data: that is a warning.
    """
    before = {**EARLIER_VALUES, **checkpoint.state.identity}
    if before.get("task") in plan.task.earlier_names:
        before["task"] = plan.task.name
    unknown = sorted(plan.datasets.identity.keys() - before.keys())
    if unknown:
        log(
            f"Warning: {checkpoint.path.name} does not record {', '.join(unknown)}: make sure that"
            " the data is the same. The next checkpoint records it."
        )
    changes = [
        f"{name} was {before.get(name)!r}, now {plan.identity.get(name)!r}"
        for name in sorted({*before, *plan.identity} - {*unknown, *plan.task.earlier_settings})
        if before.get(name) != plan.identity.get(name)
    ]
    if not changes:
        return
    hint = (
        "Give the old values to go on with it, --no-resume to start anew (the old run is set"
        " aside), or another --results-dir, with"
        f" --init-from {plan.folder.shown} where its weights are to be the first ones."
    )
    if len(changes) == 1 and changes[0].startswith("total_steps"):
        hint = (
            "Its learning rate depends on the length of the run:"
            f" --max-steps {before.get('total_steps')} finishes it as it was planned; a run of"
            " another length starts anew, with --no-resume or in another --results-dir. With --set"
            " schedule=constant a run can be continued to any length."
        )
    raise ConfigError(
        f"The run in {plan.folder.shown} was made with other settings: {'; '.join(changes)}.",
        hint,
        id="changed-arithmetic",
    )


def require_same_nodes(backend: Backend, facts: Mapping[str, Any]) -> None:
    """Compares plain values over all ranks; every rank must call it.

    Raises:
        UsageError: naming the nodes and the values that differ from the first rank's.
    """
    (first, expected), *others = backend.all_gather_objects((platform.node(), dict(facts)))
    for rank, (node, found) in enumerate(others, 1):
        differing = [
            f"{name} {found.get(name)} (rank 0: {expected.get(name)})"
            for name in sorted({*expected, *found})
            if found.get(name) != expected.get(name)
        ]
        if differing:
            raise UsageError(
                f"node {node} (rank {rank}) is not like node {first}: {', '.join(differing)}.",
                "Give all nodes the same installation and the same data.",
                id="nodes-differ",
            )
