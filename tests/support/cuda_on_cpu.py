"""A GPU for tests without one: what tpukit's code relies on of CUDA, kept on the CPU.

`torch.cuda` answers as on a T4 whose memory is counted: allocated, reserved, and what others hold.
Devices need an index where CUDA's do, and torch.compile runs Dynamo with its limit on
recompilations, without Inductor. Errors have the texts of CUDA's libraries.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpukit.hardware.eager.devices import CudaDevice

GIB = 2**30
TOTAL = 15 * GIB
GPU_TEXTS = [
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Failed to CUDA calloc async 6291456 bytes",
    "Failed to CUDA host alloc 16 bytes",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "AcceleratorError: CUDA error: out of memory (cudaErrorMemoryAllocation)",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
]
GPU_TEXTS_AFTER_A_FIT = [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "FIND was unable to find an engine to execute this computation",
    "GET was unable to find an engine to execute this computation",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
]


class Gpu:
    """The memory of the only GPU of a process, in bytes."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.others = GIB // 2
        """CUDA's context, NCCL's buffers, other processes."""
        self.fraction: float | None = None

    def allocate(self, size: int) -> None:
        """Tensors of `size` bytes; the allocator reserves a tenth more."""
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated * 11 // 10)
        self.reset_peaks(least=True)

    def free(self, size: int) -> None:
        """The cache keeps what was reserved."""
        self.allocated -= size

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset_peaks(self, *, least: bool = False) -> None:
        known = (self.peak_allocated, self.peak_reserved) if least else (0, 0)
        self.peak_allocated = max(known[0], self.allocated)
        self.peak_reserved = max(known[1], self.reserved)


def indexed(device: Any) -> None:
    """torch.cuda takes a device without an index as the present one, but here and there."""
    index = torch.cuda._utils._get_device_index(device)
    assert index == 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """torch.cuda answers for this GPU."""
    own = Gpu()

    def limit(fraction: float, device: Any) -> None:
        indexed(device)
        own.fraction = fraction

    answers = {
        "get_device_capability": lambda device=None: (7, 5),
        "is_bf16_supported": lambda including_emulation=True: including_emulation,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=TOTAL),
        "Stream": lambda device: None,
        "memory_allocated": lambda device: own.allocated,
        "max_memory_allocated": lambda device: own.peak_allocated,
        "memory_reserved": lambda device: own.reserved,
        "max_memory_reserved": lambda device: own.peak_reserved,
        "mem_get_info": lambda device: (TOTAL - own.others - own.reserved, TOTAL),
        "empty_cache": own.empty_cache,
        "reset_peak_memory_stats": lambda device: own.reset_peaks(),
        "set_per_process_memory_fraction": limit,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return own


@pytest.fixture
def cuda(gpu: Gpu) -> CudaDevice:
    """As a single process names its device."""
    return CudaDevice(torch.device("cuda"))


@pytest.fixture
def compiled_without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` traces, guards and counts as ever, and runs the graph eagerly."""
    own = torch.compile
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", lambda call, **how: own(call, **how, backend="eager"))
