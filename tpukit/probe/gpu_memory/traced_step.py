"""Traces one optimizer step and an evaluation of a task over fake tensors."""

import gc
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tpukit.errors import JobError
from tpukit.hardware.backend import Batch
from tpukit.hardware.modules import move_tensors
from tpukit.hardware.options import choose_precision
from tpukit.hardware.prefetch import BATCHES_AHEAD
from tpukit.probe.compiler.source_map import model_frame
from tpukit.probe.gpu_memory.backend import RecordedBackend, fake_ranks
from tpukit.probe.gpu_memory.cuda_forms import CudaForms
from tpukit.probe.gpu_memory.recorder import StorageRecorder, Trace
from tpukit.probe.targets import GpuTarget
from tpukit.probe.unfilled_model import unfilled_model
from tpukit.train.batch_size import Examples
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner
from tpukit.train.loader import example_batches
from tpukit.train.task import PlanSettings, Task
from tpukit.train.weights import built_model

CUBLAS_BYTES, CUBLAS_HOPPER_BYTES = 8519680, 2**25
"""cuBLAS' workspace of a thread."""
OPERATOR = re.compile(r"aten[:.]+\w+(?:\.\w+)?|\b\w+::\w+(?:\.\w+)?|(?<=OrderOperator )\w+")


def trace_fake_step(
    task: Task,
    config: TrainConfig,
    target: GpuTarget,
    rows: int,
    accumulate: int,
    *,
    as_cuda: bool = True,
    recomputes: bool = True,
    examples: Examples | None = None,
) -> Trace:
    """One step of micro-batches of `rows` samples a device, and an evaluation of one.

    as_cuda: operators in CUDA's forms, with workspaces; else in the CPU's.
    recomputes: activations are recomputed where the model asks for it.
    examples: the host batches of a number of rows; None: the task's own.

    Raises:
        JobError: an operator has no fake form, or the model reads a value.
    """
    recorder = StorageRecorder(workspaces=as_cuda)
    trace = recorder.trace
    native = target.capability >= 8.0
    precision = choose_precision(config.precision, "gpu", native_bf16=native)

    def count(flops: float) -> None:
        trace.flops += flops if recorder.phase != "evaluate" else 0.0

    forms = CudaForms(target.capability, count)
    shard = config.shard and target.devices > 1
    settings = PlanSettings(rows * accumulate * target.devices, rows, 1, seed=0, compiles=False)
    host = (examples(rows) if examples else example_batches(task, settings))[0]
    torch.manual_seed(0)
    registered = forms.registered() if as_cuda else nullcontext()
    ranks = fake_ranks(target.devices) if shard else nullcontext()
    with (
        quiet_collector(),
        quiet_torch(),
        ranks as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        registered,
        recorder.sharding() if shard else nullcontext(),
    ):
        backend = RecordedBackend(
            recorder, precision, target.devices, native_bf16=native, mesh=mesh,
            recomputes=recomputes,
        )  # fmt: skip
        model = fake_model(task, backend)
        trace.parameters = sum(p.numel() for p in model.parameters())
        batch = {name: _faked(tensor) for name, tensor in host.items()}
        with recorder, recorder.modules_of(model), said_plainly(recorder):
            _record(task, config, backend, model, batch, accumulate)
    recorder.end(CUBLAS_HOPPER_BYTES if int(target.capability) == 9 else CUBLAS_BYTES)
    return trace


def _record(
    task: Task, config: TrainConfig, backend: RecordedBackend, model: nn.Module, host: Batch,
    accumulate: int,
) -> None:  # fmt: skip
    recorder = backend.recorder
    if not backend.shards:
        recorder.claim((*model.parameters(), *model.buffers()), "parameters")
    with recorder.of_kind("temporaries"):
        learner = build_learner(task, backend, model, config)
    recorder.claim(learner.ema.weights.values() if learner.ema else (), "ema")
    if backend.shards:
        recorder.claim((*model.parameters(), *model.buffers()), "parameters")
    # As in a run, the next ones are sent while a step works.
    waiting = BATCHES_AHEAD + accumulate
    with recorder.of_kind("batch"):
        batches = [{name: t.clone() for name, t in host.items()} for _ in range(waiting)]
    recorder.mark("step")
    recorder.phase = "forward"
    learner.train_step(batches[:accumulate], lr=config.lr)
    recorder.mark("evaluate")
    recorder.phase = "evaluate"
    with learner.evaluation_weights():
        learner.model.eval()
        learner.sums.add(batches[0])
    recorder.mark("end")


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Garbage is collected before, not inside: when it is must not differ between traces."""
    gc.collect()
    gc.freeze()  # what is imported is not looked at again
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Leaves out torch's log of operators that fail on fake tensors: it raises their errors too."""
    log = logging.getLogger(FakeTensor.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def fake_model(task: Task, backend: RecordedBackend) -> nn.Module:
    """The task's model with fake weights, built so unless its constructor reads values."""
    try:
        model = built_model(task, backend)
    except Exception:
        with torch.utils._python_dispatch._disable_current_modes():
            model = unfilled_model(task, backend)
    move_tensors(model, _faked, _faked)
    return model.train()


def _faked(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor) and tensor.device != torch.device("meta"):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


@contextmanager
def said_plainly(recorder: StorageRecorder) -> Iterator[None]:
    """Turns what has no fake form, or depends on values, into an error with the user's line."""
    try:
        yield
    except Exception as error:
        text = " ".join([*(kind.__name__ for kind in type(error).__mro__), str(error)])
        hidden = next((known for known in FAKE_ERRORS if known in text), None)
        if hidden is None:
            raise
        frame, named = model_frame(error), OPERATOR.search(str(error))
        subject, does = FAKE_ERRORS[hidden]
        subject = subject or (named[0] if named else recorder.operator)
        where = f" at {frame.filename}:{frame.lineno}" if frame else ""
        raise JobError(
            f"{subject}{where} {does.format(error)}.",
            "A prediction without the GPU has shapes alone: keep values on the device"
            " (`torch.where` for `if`), or register a fake form of what is not torch's"
            " (`torch.library.custom_op`, `register_fake`).",
            id="no-fake",
        ) from error


FAKE_ERRORS = {
    "DataDependentOutputException": ("", "reads a value"),
    "DynamicOutputShapeException": ("", "has a shape that depends on values"),
    "no fake impl registered": ("", "has no fake form"),
    "UnsupportedOperatorException": ("", "has no fake form"),
    "UnsupportedFakeTensorException": ("", "has no fake form"),
    "SparseGradientError": ("", "makes the gradient {} sparse: its size depends on values"),
    "SparseTensorImpl": ("", "makes a sparse tensor, whose size depends on values"),
    "HigherOrderOperator": ("", "has no fake form"),
    "data pointer": ("a kernel outside of torch's operators", "reads the memory of a tensor"),
    "active drivers": ("a Triton kernel outside of torch's operators", "needs the GPU"),
    "numpy() is not supported": ("Tensor.numpy()", "reads values"),
    "FakeTensor.__format__": ("Tensor.__format__()", "reads a value"),
}
"""Errors of fake tensors by class or text -> the operator where they name none (empty: the last
one), and what it does."""
