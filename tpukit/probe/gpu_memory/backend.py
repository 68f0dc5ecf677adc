"""The eager backend of a GPU over fake tensors: the engine's own step, recorded, not executed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpukit.hardware.backend import HALVES, OptimizerSettings, ParameterGroup
from tpukit.hardware.collectives import Collectives
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import CpuDevice
from tpukit.hardware.eager.distributed import FSDP, SingleProcess, split_mixed_groups
from tpukit.hardware.eager.grad_scaling import LocalScaler, PlainUpdate, ScaledUpdate
from tpukit.hardware.modules import local
from tpukit.hardware.optimizers import adopt, gradients_of, named_optimizer, trained_of
from tpukit.hardware.options import Precision
from tpukit.probe.gpu_memory.recorder import StorageRecorder

BUCKETS = [2**20, 25 * 2**20]
"""Bytes of DDP's first bucket of gradients and of the others, by its defaults."""


class FakeGpu(CpuDevice):
    """A GPU that is not here: fake tensors on the CPU stand for its own."""


class RecordedBackend(EagerBackend):
    """The eager backend, which gives the recorder its phases."""

    def __init__(
        self, recorder: StorageRecorder, precision: Precision, devices: int, *, native_bf16: bool,
        mesh: DeviceMesh | None = None, recomputes: bool = True,
    ) -> None:  # fmt: skip
        self.recorder, gpu = recorder, FakeGpu()
        gpu.native_bf16, gpu.recomputes = native_bf16, recomputes
        parallel = SingleProcess(lambda model: model)
        if devices > 1:
            half = HALVES.get(precision)
            parallel = FSDP(mesh, half=half, compared=0) if mesh else RecordedDDP(recorder)
        super().__init__(
            "gpu", gpu, precision, Collectives(), parallel, _update(precision), compiles=False
        )
        self.devices = devices
        self.shards = mesh is not None

    def optimizer(
        self,
        groups: Sequence[ParameterGroup],
        settings: OptimizerSettings,
        own: torch.optim.Optimizer | None = None,
    ) -> torch.optim.Optimizer:
        """Its state is that of a first step, which no value is needed for."""
        # A GPU that is full moves pages of the state to the host: they are counted here.
        kind: Any = settings.name.removeprefix("paged_")
        optimizer = own or named_optimizer(groups, replace(settings, name=kind))
        adopt(optimizer, settings)
        for name, hooks in vars(optimizer).items():
            if name.endswith("_hooks"):
                hooks.clear()
        trained = [p for group in optimizer.param_groups for p in trained_of(group)]
        # What a GPU has by default; Adafactor, one parameter at a time there too.
        by_lists = not isinstance(optimizer, torch.optim.Adafactor)
        for group in optimizer.param_groups:
            if by_lists and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        split_mixed_groups(optimizer)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for state in optimizer.state.values():
            self.recorder.claim((v for v in state.values() if isinstance(v, Tensor)), "optimizer")
        return optimizer

    def backward(self, loss: Tensor) -> None:
        self.recorder.phase = "backward"
        super().backward(loss)
        self.recorder.phase = "forward"

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, **given: Any) -> Tensor:
        self.recorder.phase = "step"
        # With DDP they are views of its buckets.
        own = (g for g in gradients_of(optimizer) if self.recorder.kind_of(local(g)) != "buckets")
        self.recorder.claim(own, "gradients")
        norm = super().step(optimizer, **given)
        self.recorder.phase = "forward"
        return norm


@contextmanager
def fake_ranks(count: int) -> Iterator[DeviceMesh]:
    """`count` ranks inside, of which this is the first: nothing is sent."""
    import torch.distributed._tools.fake_collectives  # noqa: F401 (registers their fake forms)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


class RecordedDDP(SingleProcess):
    """DDP on one rank's memory: gradients are views of buckets, which stay."""

    def __init__(self, recorder: StorageRecorder) -> None:
        super().__init__(lambda model: model)
        self.recorder = recorder
        self.reduces = False

    def prepare(self, model: nn.Module, *, train: bool) -> nn.Module:
        if not train:
            return model
        # In the order of their gradients, the last one's first.
        trained: list[Any] = [p for p in reversed([*model.parameters()]) if p.requires_grad]
        buckets, _ = dist._compute_bucket_assignment_by_size(trained, BUCKETS)  # type: ignore[attr-defined]
        views: dict[nn.Parameter, Tensor] = {}
        with self.recorder.of_kind("buckets"):
            for bucket in ([trained[index] for index in indices] for indices in buckets):
                flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype)
                self.recorder.trace.reduced_bytes += flat.nbytes
                parts = torch.split(flat, [p.numel() for p in bucket])
                views |= {p: part.view_as(p) for p, part in zip(bucket, parts, strict=True)}

        def into_bucket(parameter: nn.Parameter) -> None:
            if self.reduces:
                self.recorder.claim([parameter.grad], "gradients")
                parameter.grad = views[parameter]

        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(into_bucket)
        return model

    @contextmanager
    def micro_batch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        self.reduces = last
        yield


class SteppingScaler(LocalScaler):
    """A gradient scaler that reads no value: every step's gradients are finite."""

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> float | None:
        result: float | None = optimizer.step(*args, **kwargs)
        return result


def _update(precision: Precision) -> PlainUpdate:
    if precision != "fp16":
        return PlainUpdate()
    return ScaledUpdate(SteppingScaler("cpu"), torch.device("cpu"))
