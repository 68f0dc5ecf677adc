"""Devices that run eagerly: a CPU and an NVIDIA GPU. A TPU's is in `torch_tpu.py`."""

import importlib.util
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpukit.errors import HardwareError
from tpukit.hardware.backend import Batch, DeviceUsage
from tpukit.hardware.eager.compiling import compiled_graphs
from tpukit.hardware.memory import (
    Memory,
    ReadMemory,
    available_bytes,
    data_bytes,
    limit_host_memory,
    meter_device_memory,
    meter_process_memory,
    reserve_bytes,
    resident_bytes,
)
from tpukit.hardware.options import Precision
from tpukit.hardware.prefetch import prefetch
from tpukit.hardware.step_programs import StepCall

Gather = Callable[[Any], list[Any]]


class EagerDevice:
    """What a CPU, a GPU and a TPU do differently."""

    device: torch.device
    versions: Mapping[str, str] = {}
    """Version of each package that belongs to the device."""
    compiles = False
    """Whether torch.compile is the default."""
    native_bf16 = False
    recomputes = True
    """Whether `recompute` checkpoints activations: memory is scarcer than time."""
    compiles_everything = False
    """See `Backend`."""
    limit_bytes: int | None = None

    def name(self) -> str:
        raise NotImplementedError

    def set_arithmetic(self, precision: Precision, *, deterministic: bool) -> None:
        pass

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        return (dict(batch) for batch in loader)

    def run(self, step: StepCall, gather: Gather) -> Any:
        """See `Backend`; gather: its `all_gather_objects`."""
        return step()

    def limit_memory(self, limit_bytes: int) -> None:
        raise NotImplementedError

    def surface_errors(self, results: Sequence[Tensor]) -> None:
        """Raises a step's errors in that step, where they would otherwise appear later."""

    def compilations(self) -> int:
        return compiled_graphs()

    def usage(self) -> DeviceUsage:
        return DeviceUsage(self.memory(), keeps_freed_memory=True)

    def memory(self) -> Memory | None:
        raise NotImplementedError

    def memory_meter(self) -> AbstractContextManager[ReadMemory]:
        return meter_device_memory(self.memory)


class CpuDevice(EagerDevice):
    """The CPU of this host."""

    recomputes = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        # What the ranks of this host may hold, each its share.
        room = max(0, available_bytes() - reserve_bytes())
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.room_bytes = resident_bytes()[0] + room // ranks
        self.bytes_before_limit = 0
        self.peak_bytes = 0

    def name(self) -> str:
        return f"{_cpu_name()}, {torch.get_num_threads()} threads"

    def limit_memory(self, limit_bytes: int) -> None:
        # What the first optimizer of a process imports, 90 MB, is not a batch's memory.
        import torch._dynamo

        # Thread stacks count as memory: they must exist before a limit is set.
        operand = torch.ones(256, 256, requires_grad=True)
        (operand @ operand).sum().backward()  # type: ignore[no-untyped-call]
        self.recomputes = True
        self.limit_bytes = limit_bytes
        self.bytes_before_limit = data_bytes()
        limit_host_memory(limit_bytes)

    def usage(self) -> DeviceUsage:
        return DeviceUsage(self.memory())

    def memory(self) -> Memory:
        if self.limit_bytes is None:
            return Memory(*resident_bytes(), self.room_bytes)
        # What the limit counts; the kernel keeps no peak of it.
        used = data_bytes() - self.bytes_before_limit
        self.peak_bytes = max(self.peak_bytes, used)
        return Memory(used, self.peak_bytes, self.limit_bytes)

    def memory_meter(self) -> AbstractContextManager[ReadMemory]:
        return meter_process_memory(self.limit_bytes)


class CudaDevice(EagerDevice):
    """One NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        # A single process may leave the index out, and some of torch.cuda needs one.
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = device = torch.device("cuda", index)
        self.capability = torch.cuda.get_device_capability(device)
        self.native_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        # torch.compile writes its kernels with Triton, which starts at compute capability 7.0.
        has_triton = importlib.util.find_spec("triton") is not None
        self.compiles = has_triton and self.capability >= (7, 0)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def set_arithmetic(self, precision: Precision, *, deterministic: bool) -> None:
        torch.backends.cudnn.benchmark = not deterministic
        if precision == "fp32":
            _keep_convolutions_in_fp32()

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        for batch, copied in prefetch(loader, self._send):
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in batch.values():
                # The allocator must not reuse the memory while this stream still reads it.
                tensor.record_stream(current)
            yield batch

    def _send(self, batch: Mapping[str, Tensor]) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            sent = {
                name: (tensor if tensor.is_pinned() else tensor.pin_memory()).to(
                    self.device, non_blocking=True
                )
                for name, tensor in batch.items()
            }
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)  # type: ignore[no-untyped-call]
        return sent, copied

    def limit_memory(self, limit_bytes: int) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        if limit_bytes > total:
            raise HardwareError(
                f"--memory-limit {limit_bytes}: this GPU has {total} bytes.",
                "Give a smaller limit, or leave it out.",
            )
        self.limit_bytes = limit_bytes
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total, self.device)

    def usage(self) -> DeviceUsage:
        return replace(super().usage(), utilization_percent=self._utilization_percent())

    def memory_meter(self) -> AbstractContextManager[ReadMemory]:
        # What an earlier trial left in the allocator's cache is not this one's peak.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return super().memory_meter()

    def memory(self) -> Memory:
        """The peak and the limit are of what the allocator reserves: CUDA's context, NCCL's
        buffers and other processes have the rest."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return Memory(
            torch.cuda.memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
            self.limit_bytes or free + torch.cuda.memory_reserved(self.device),
        )

    def _utilization_percent(self) -> int | None:
        try:
            return int(torch.cuda.utilization(self.device))
        except Exception:  # no nvidia-ml-py, or a driver that does not report it
            return None


def _keep_convolutions_in_fp32() -> None:
    """torch rounds their inputs to TF32 by default; fp32 was asked for."""
    settings: Any = torch.backends.cudnn
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API")
        settings.allow_tf32 = False
    if hasattr(settings, "conv"):  # torch 2.9
        # All of them: where they differ, whoever reads `allow_tf32` gets an error.
        settings.conv.fp32_precision = settings.rnn.fp32_precision = "ieee"


def check_cuda() -> None:
    """Raises `HardwareError` where torch cannot use the GPU that is here."""
    if not torch.cuda.is_available():
        raise HardwareError(
            f"There is a GPU here, but torch {torch.__version__} cannot use it.",
            "Install a CUDA build of torch that fits the driver (`nvidia-smi`); "
            "--hw cpu runs on the CPU.",
        )
    major, minor = torch.cuda.get_device_capability()
    built = [int(arch.rsplit("_", 1)[1].rstrip("af")) for arch in torch.cuda.get_arch_list()]
    if built and major * 10 + minor < min(built):
        raise HardwareError(
            f"{torch.cuda.get_device_name()} (compute capability {major}.{minor}) is too old for "
            f"torch {torch.__version__}, which starts at {min(built) / 10}.",
            "Choose another GPU (T4, L4), or an older build of torch.",
        )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "CPU"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
