"""A whole training run: from a task and a config to a finished run folder."""

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from tpukit.errors import InterruptedRunError, TpukitError
from tpukit.hardware.backend import Backend
from tpukit.hardware.collectives import launched_world_size
from tpukit.io.interrupts import StopRequest, listening
from tpukit.io.lock import mark_ending
from tpukit.io.remote import RemoteError
from tpukit.io.units import format_bytes, format_duration
from tpukit.train.checkpoint import KEPT, Checkpoint, point_as_recorded
from tpukit.train.checkpoint_writer import BackgroundWriter
from tpukit.train.clocks import Goodput
from tpukit.train.data import is_stream
from tpukit.train.engine import Engine
from tpukit.train.evaluation import require_metrics
from tpukit.train.learner import Learner
from tpukit.train.module_state import listed
from tpukit.train.monitor import RunMonitor
from tpukit.train.plan import RunPlan, TrainingRequest, plan_run
from tpukit.train.report.page import RunReport
from tpukit.train.requests import TrainingResult
from tpukit.train.resume import (
    claim_folder,
    find_checkpoint,
    require_same_arithmetic,
    require_same_nodes,
    with_recorded,
)
from tpukit.train.run_folder import RunFolder, versions, write_config
from tpukit.train.run_log import (
    RunLog,
    cut_metrics,
    draw_loss_curve,
    read_metrics,
    task_failures_kept,
)
from tpukit.train.run_state import RunState, load_run_state
from tpukit.train.streams import StreamPlan
from tpukit.train.task import overrides
from tpukit.train.tracking import start_tracker
from tpukit.train.user_code import code_warnings


def train_run(
    request: TrainingRequest, backend: Backend, log: Callable[[str], None]
) -> TrainingResult:
    """Runs a request to its end, or to where a signal or the clock stops it.

    Raises InterruptedRunError after a signal, its checkpoint written.
    """
    began = time.monotonic()
    stop = StopRequest(
        time.monotonic() + request.config.max_time if request.config.max_time else None
    )
    log = log if backend.is_main else lambda message: None
    with ExitStack() as stack:
        stack.enter_context(task_failures_kept(request.folder, backend.rank))
        stack.enter_context(_stopped_at_once(stop, request))
        stack.enter_context(listening(stop))
        # Until the first step nothing would be lost; several ranks stop after it, together.
        stop.raises = backend.world_size == 1
        require_same_nodes(backend, versions())
        undo_import = claim_folder(request, backend, stack, log)
        if backend.is_main:
            stop.on_request = partial(mark_ending, request.folder.lock)
        checkpoint = find_checkpoint(request, backend, log)
        if checkpoint is not None:
            request = with_recorded(request, checkpoint)
        plan = plan_run(request, backend, resumes=checkpoint is not None)
        require_same_nodes(backend, plan.identity)
        if checkpoint is not None:
            require_same_arithmetic(plan, checkpoint, log)
            undo_import.pop_all()
            early = plan.stops_early(checkpoint.state.since_best)
            if early or checkpoint.state.step >= plan.total_steps:
                return _already_finished(plan, checkpoint, log, early=early)
        return _train_from(plan, checkpoint, backend, stop, log, began)


@contextmanager
def _stopped_at_once(stop: StopRequest, request: TrainingRequest) -> Iterator[None]:
    """Turns a signal's KeyboardInterrupt into an InterruptedRunError."""
    try:
        yield
    except KeyboardInterrupt:
        if stop.signal_number is None:
            raise
        raise InterruptedRunError(
            "Stopped at once: what came after the last checkpoint is not saved."
            if request.folder.config.exists()
            else "Stopped before the first step.",
            f"Go on with: {request.command}",
            signal_number=stop.signal_number,
        ) from None


def _already_finished(
    plan: RunPlan, checkpoint: Checkpoint, log: Callable[[str], None], *, early: bool
) -> TrainingResult:
    state = checkpoint.state
    how, more = "is finished", "more --epochs or --max-steps go on with it"
    if early:
        how = f"stopped early, best {plan.best.describe(state.best)}"
        more = "a larger early_stopping goes on with it"
    elif "total_steps" in plan.identity:
        # The learning rate depends on the length of the run.
        more = f"--init-from {plan.folder.shown} --results-dir DIR goes on with its weights"
    log(
        f"The run in {plan.folder.shown} {how} ({state.step} steps)."
        f" --no-resume starts a new one; {more}."
    )
    plan.folder.store.publish()  # a killed run may have left a pointer behind
    losses = [row["loss"] for row in read_metrics(plan.folder) if row["kind"] == "train"]
    return TrainingResult(
        steps=state.step,
        loss=losses[-1] if losses else None,
        best=state.best,
        run=plan.folder.shown,
        resumed_from=state.step,
        finished=True,
        stopped_early=early,
    )


# -- training ------------------------------------------------------------------------------------
def _train_from(
    plan: RunPlan,
    checkpoint: Checkpoint | None,
    backend: Backend,
    stop: StopRequest,
    log: Callable[[str], None],
    began: float,
) -> TrainingResult:
    folder = plan.folder
    state = load_run_state(plan, backend, checkpoint)
    if checkpoint is None:
        require_metrics(plan, state.learner)
    elif isinstance(plan.batches, StreamPlan):
        _resume_stream(plan.batches, state, log)
    with ExitStack() as stack:
        run_log: RunLog | None = None
        goodput = Goodput()
        renew: Callable[[], object] = _nothing
        if backend.is_main:
            stack.push(partial(_publish_end, folder))
            if checkpoint is not None:
                point_as_recorded(checkpoint)
            goodput = Goodput.after(read_metrics(folder), state.step, began)
            run_log, renew = _open_log(plan, state.learner, log, stack)
        is_apart = folder.address is not None and not _is_of_first_host(backend)
        writer = BackgroundWriter(
            folder.checkpoints, renew, is_main=backend.is_main, in_shards=state.is_in_shards,
            send=folder.store.send_shard if is_apart else None,
        )  # fmt: skip
        stack.callback(writer.close)
        monitor = RunMonitor(plan, state.learner, run_log, goodput)
        engine = Engine(state, stop, monitor, writer)
        result = engine.run()
        if run_log:
            _log_end(engine, result, run_log)
    if engine.stopped_by is not None:
        raise _interrupted(engine, result, engine.stopped_by)
    return result


def _is_of_first_host(backend: Backend) -> bool:
    """Whether this rank is on the host of the main one: torchrun counts hosts; without a launcher
    each process of several has a host of its own (a TPU slice)."""
    is_launched = launched_world_size() > 1
    return os.environ.get("GROUP_RANK", "0" if is_launched else str(backend.rank)) == "0"


def _open_log(
    plan: RunPlan, learner: Learner, log: Callable[[str], None], stack: ExitStack
) -> tuple[RunLog, Callable[[], object]]:
    """What rank 0 writes beside checkpoints until `stack` ends: its log, and what renews the report
    and the copy at an address after each of them."""
    folder = plan.folder
    cut_metrics(folder, learner.steps_done)
    folder.held_out.unlink(missing_ok=True)  # of a run that ended earlier
    tables = _config_tables(plan, learner.backend)
    write_config(folder, tables)
    tracker = start_tracker(plan.config.track, folder.path, tables)
    run_log = RunLog(folder, log, tracker)
    stack.callback(run_log.close)
    report = RunReport(folder, run_log.text)
    stack.callback(report.renew)
    stack.push(run_log.note_failure)
    if "tpukit " in plan.command:
        run_log.note(f"Command: {plan.command}")
    _log_start(plan, learner, run_log)
    return run_log, partial(_after_checkpoint, report, folder)


def _nothing() -> None:
    """Other ranks renew nothing after a checkpoint."""


def _interrupted(engine: Engine, result: TrainingResult, number: int) -> InterruptedRunError:
    return InterruptedRunError(
        f"Stopped after step {result.steps} of {engine.plan.total_steps}; the checkpoint is"
        " written."
        if result.steps
        else "Stopped in the first step: nothing is saved.",
        f"Go on with: {engine.plan.command}",
        signal_number=number,
    )


def _after_checkpoint(report: RunReport, folder: RunFolder) -> None:
    report.renew()
    folder.store.publish()


def _publish_end(folder: RunFolder, kind: object, error: BaseException | None, _: object) -> None:
    """Sends what the end of a run left, as `ExitStack.push` calls it; the first error counts."""
    if error is None:
        folder.store.publish()
    elif not isinstance(error, RemoteError):
        with suppress(TpukitError):
            folder.store.publish()


def _resume_stream(stream: StreamPlan, state: RunState, log: Callable[[str], None]) -> None:
    """Restores the position of a training stream."""
    kept = stream.seek(state.step, state.stream)
    if not kept:
        log(
            "The training stream keeps no position (state_dict and load_state_dict, of plain"
            f" values): reading the first {state.step} steps' samples again."
        )
    elif kept < state.step:
        log(
            f"The training stream's position was kept at step {kept}: reading the samples of"
            f" {state.step - kept} steps again."
        )
    stream.step(state.step - 1)


# -- reporting -----------------------------------------------------------------------------------
def _config_tables(plan: RunPlan, backend: Backend) -> dict[str, Mapping[str, Any]]:
    return {
        "train": asdict(plan.config),
        "task": {
            "name": plan.task.name,
            "source": type(plan.task).source,
            **plan.task_settings,
        },
        "decided": {
            **backend.describe(),
            "devices": backend.devices,
            "precision": backend.precision,
            "accumulate": plan.split.accumulate,
            "rows_per_device": plan.split.rows_per_device,
            "form": plan.choice and plan.choice[0],
            "total_steps": plan.total_steps,
            "training_samples": _count(plan.datasets.train),
            "validation_samples": _validation_samples(plan),
        },
        "versions": versions(),
    }


def _count(data: Any) -> int | None:
    """Samples of a data set; None for a stream."""
    return None if is_stream(data) else len(data)


def _validation_samples(plan: RunPlan) -> int:
    return sum(map(len, plan.datasets.validation_sets().values()))


def _log_start(plan: RunPlan, learner: Learner, log: RunLog) -> None:
    backend, path = learner.backend, plan.folder.path
    kept_here = f", copy in {path}" if plan.folder.address else ""
    count = sum(p.numel() for p in backend.unwrap(learner.model).parameters())
    # fp32 on the disk: the weights, two moments, the EMA weights.
    one = count * 4 * (3 + (learner.ema is not None))
    needed, free = one * (KEPT + 2), shutil.disk_usage(path).free
    described = backend.describe(learner.model).items()
    device = ", ".join(f"{name} {value}" for name, value in described)
    model = f"{count / 1e6:.1f} M parameters; batch {plan.split.describe()}"
    command = plan.command if "tpukit " in plan.command else None
    log.event("session", step=learner.steps_done, command=command, model=model, device=device)
    log.text(f"Running on: {device}")
    for warning in code_warnings(plan.task.loss, backend.unwrap(learner.model)):
        log.text(warning)
    log.text(f"Model: {model}")
    if learner.ema and (copied := learner.ema.copied_floats):
        log.text(
            "EMA weights: parameters and running statistics are averaged; copied"
            f" {'is' if len(copied) == 1 else 'are'} {listed(copied)}."
        )
    if plan.choice:
        log.text(": ".join(plan.choice))
    if cut := plan.split.consequences(backend.unwrap(learner.model)):
        log.text(cut)
    samples = _count(plan.datasets.train)
    train = "a stream of" if samples is None else samples
    log.text(f"Data: {train} training, {_validation_samples(plan)} validation samples")
    log.text(
        f"Run: {plan.folder.shown}{kept_here}, step {learner.steps_done} of {plan.total_steps};"
        f" checkpoints need up to {format_bytes(needed)}, free {format_bytes(free)}"
    )
    if free < needed:
        log.text("Warning: the disk may fill up: free some space, or raise --ckpt-every.")
    warmup, total = plan.config.warmup_steps, plan.total_steps
    if warmup >= total and not overrides(plan.task, "learning_rate"):
        log.text(
            f"Warning: warmup_steps {warmup} of {total} steps: the learning rate ends at"
            f" {plan.rate(total - 1):.3g}, below --lr {plan.config.lr:g}. Use --set warmup_steps=N."
        )


def _log_end(engine: Engine, result: TrainingResult, log: RunLog) -> None:
    plan, goodput = engine.plan, engine.monitor.goodput
    elapsed = format_duration(goodput.elapsed_seconds)
    log.note(f"Goodput: {goodput.share:.1%} of {elapsed} made steps that are kept.")
    curve = draw_loss_curve(plan.folder)
    if curve:
        log.text(f"Loss curve: {curve}; report: {plan.folder.report}")
    if result.stopped_early:
        text = (
            f"Stopped early after step {result.steps}: no better validation for"
            f" {engine.state.since_best}; best {plan.best.describe(engine.state.best)}."
        )
    elif result.finished:
        loss = math.nan if result.loss is None else result.loss
        text = f"Done: {result.steps} steps, loss {loss:.4g}."
    elif engine.stopped_by is not None:
        name = signal.Signals(engine.stopped_by).name
        text = f"Stopped by {name} after step {result.steps}; the checkpoint is written."
    else:
        text = f"Time is up after step {result.steps}. Go on with: {plan.command}"
    # Of a signal the error that follows tells people; nobody may be there to read that.
    log.end(text, result.steps, shown=engine.stopped_by is None)
