"""Memory of a process and its device: usage, peak, an enforced limit, out-of-memory errors."""

import ctypes
import re
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tpukit.errors import HardwareError

MAPPED_ALONE_BYTES = 2**15
"""Smallest allocation in bytes that goes back to the system when freed, under a limit."""
COMPILER_BYTES = 2**31
"""Memory in bytes left for the first compilation."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
GLIBC_SETTINGS = {M_MMAP_MAX: 2**16, M_MMAP_THRESHOLD: 2**25, M_TRIM_THRESHOLD: 2**26}
"""glibc's own maxima for these thresholds, which it raises as memory is freed."""
SECONDS_BETWEEN_SAMPLES = 0.005
SECONDS_TO_ANSWER = 10.0
"""Time limit of a first sample: without its metadata server libtpu may try for long."""
RESERVE_SHARE, RESERVE_BYTES = 0.05, (2**28, 2**31)
"""Part of the machine's memory that is left free by default, and its least and most bytes."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""Limit, usage, and the prefix of what counts a group with those below it, by version."""
NO_LIMIT = 2**60
OUT_OF_MEMORY_TEXTS = (
    # XLA and libtpu
    r"RESOURCE_EXHAUSTED",
    r"Ran out of memory in memory space",
    r"Allocation .*would exceed memory",
    r"exceeds available HBM",
    r"Used \S+ of \S+ \w+\. Exceeded \w+ capacity",
    r"Attempting to (?:reserve|allocate) \S+.*That was not possible",
    r"[Oo]ut of memory allocating \d+ bytes",
    r"TPU ran out of memory while awaiting",
    r"Error allocating device buffer",
    # CUDA
    r"CUDA out of memory",
    r"CUDA (?:driver )?error: out of memory",
    r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
    r"CU[A-Z]+(?:_STATUS)?_ALLOC_FAILED",
    r"Triton Error \[CUDA\]: out of memory",
    # NCCL
    r"Cuda failure (?:\d+ )?'out of memory'",
    r"Failed to (?:CUDA|Cuda) (?:host )?\w*alloc",
    # accelerate, after the smallest batch failed too
    r"No executable batch size found",
    # tpukit's own end of a process
    r"out of memory: \S+ \S+ of \S+ \S+ are available",
    # torch and numpy on the host
    r"can't allocate memory",
    r"not enough memory: you tried to allocate",
    r"std::bad_alloc",
    r"Cannot allocate memory",
    r"Unable to allocate .* for an array",
)
TEXTS_AFTER_A_FIT = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUSOLVER_STATUS_INTERNAL_ERROR",
    "was unable to find an engine to execute this computation",
    "no valid convolution algorithms available",
    "unhandled cuda error",
)
"""Further texts of CUDA's libraries on a full GPU: out of memory if a smaller batch fitted."""
TEXTS_UNDER_LIMIT = (
    "can't start new thread",
    "failed to map segment",
    "unable to mmap",
    "Resource temporarily unavailable",
)
"""Further texts under a memory limit, where a thread's stack or a mapping does not fit."""
LATE_FAILURE = "a required argument is in a failed state"
"""torch_tpu's error for a result of a failed program, whose own error is only logged."""
LOG_BYTES = 2**16
_PATTERN = re.compile("|".join(OUT_OF_MEMORY_TEXTS), re.DOTALL)


@dataclass(frozen=True)
class Memory:
    """Memory usage in bytes: the fullest device where there are several."""

    used: int
    peak: int
    limit: int | None


ReadMemory = Callable[[], Memory | None]
"""Usage and peak since a meter started; None where the device does not report them."""


class SampledMemory:
    """Memory with its peak, where nothing else keeps that: a thread samples it.

    The thread starts with the first `read`, which takes `SECONDS_TO_ANSWER` at most.
    """

    def __init__(self, source: ReadMemory, seconds: float) -> None:
        self._source, self._seconds = source, seconds
        self._peak = 0
        self._answered, self._done = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def read(self) -> Memory | None:
        """Usage now, and the peak since `start_anew`; None where the source reports none."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
            self._thread.start()
            if not self._answered.wait(SECONDS_TO_ANSWER):
                self.close()
        return None if self._done.is_set() else self._sample()

    @property
    def answers(self) -> bool:
        """Whether the source has reported something, and is asked on."""
        return self._answered.is_set() and not self._done.is_set()

    def start_anew(self, seconds: float) -> None:
        """The peak counts from here, with a sample every `seconds`."""
        self._peak, self._seconds = 0, seconds

    def close(self) -> None:
        """Ends the samples: nothing is reported from here on."""
        self._done.set()

    def _watch(self) -> None:
        while not self._done.is_set():
            if self._sample() is None:
                self._done.set()
            self._answered.set()
            self._done.wait(self._seconds)

    def _sample(self) -> Memory | None:
        memory = self._source()
        if memory is None:
            return None
        self._peak = max(self._peak, memory.used)
        return Memory(memory.used, self._peak, memory.limit)


@contextmanager
def meter_process_memory(
    limit_bytes: int | None, *, tensors_alone: bool = False
) -> Iterator[ReadMemory]:
    """Private memory of this process beyond what it has now: what a memory limit counts.

    Without a limit it is what the machine has available, less the reserve.
    tensors_alone: leaves out what a `TensorMemoryLimit` leaves out.
    """
    sampled = SampledMemory(lambda: Memory(data_bytes(), 0, None), SECONDS_BETWEEN_SAMPLES)
    before = data_bytes() - (small_bytes() if tensors_alone else 0)
    limit = limit_bytes or max(0, available_bytes() - reserve_bytes())

    def read() -> Memory | None:
        memory, out = sampled.read(), before + (small_bytes() if tensors_alone else 0)
        return memory and Memory(memory.used - out, memory.peak - out, limit)

    read()
    try:
        yield read
    finally:
        sampled.close()


@contextmanager
def meter_device_memory(read_device: ReadMemory) -> Iterator[ReadMemory]:
    """Device memory beyond what is used now; the device itself keeps the peak."""
    start = read_device()
    before = start.used if start else 0

    def read() -> Memory | None:
        memory = read_device()
        if memory is None:
            return None
        return Memory(memory.used - before, memory.peak - before, memory.limit)

    yield read


def limit_host_memory(limit_bytes: int) -> None:
    """Limits this process to `limit_bytes` of private memory beyond what it holds already.

    Allocations beyond it fail as they would on a full device. Call it once the libraries and the
    device are up: what they took does not count.

    Raises:
        HardwareError: the system does not allow such a limit.
    """
    _return_freed_memory()
    _limit_data(data_bytes() + limit_bytes)


@dataclass(frozen=True)
class TensorMemoryLimit:
    """A limit on tensors alone, for a device whose compiler works in this process.

    It leaves out allocations under `MAPPED_ALONE_BYTES`, which a compiler's are: half a GB for a
    program of 17,000 operations, and most of it stays with the process, freed or not.
    """

    limit_bytes: int
    most_bytes: int
    """Maximum bytes of the process beside small allocations."""

    def enforce(self, room_bytes: int = 0) -> None:
        """Sets the limit; to be called again after each compilation.

        room_bytes: for a compiler that has yet to work. Raises as `limit_host_memory` does.
        """
        _limit_data(self.most_bytes + small_bytes() + room_bytes)


def limit_tensor_memory(limit_bytes: int) -> TensorMemoryLimit:
    """As `limit_host_memory`, but of tensors, and with room for the first compilation until
    `enforce` is called."""
    _return_freed_memory()
    limit = TensorMemoryLimit(limit_bytes, data_bytes() - small_bytes() + limit_bytes)
    limit.enforce(COMPILER_BYTES)
    return limit


def _limit_data(limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY and limit > hard:
        raise HardwareError(
            f"--memory-limit: it would take {limit - hard} bytes more than this shell allows.",
            "Give a smaller limit, or raise the shell's (`ulimit -d`).",
        )
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    except (OSError, ValueError) as error:
        raise HardwareError(f"--memory-limit: this system refuses it ({error}).") from error


def keep_freed_memory() -> None:
    """Keeps the memory that this process frees, for its next tensors.

    glibc maps each large tensor anew, and the system clears its pages: 7 % of a step of GPT-2.
    """
    _set_allocator({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})


def give_freed_memory_back() -> None:
    """Ends `keep_freed_memory`."""
    _set_allocator(GLIBC_SETTINGS)
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def return_large_tensors() -> None:
    """Gives the memory of large tensors back when they are freed, as ranks of a sharded model need.

    Gathered weights come and go: with the pieces that glibc would keep of them a step of 300
    million parameters on four ranks took 2.6 GB instead of 0.9.
    """
    _set_allocator({M_MMAP_THRESHOLD: 2**20})


def _return_freed_memory() -> None:
    """Else glibc keeps freed tensors and samples in pieces that others do not fit into: how many
    depends on the batch, one of 173 ran where one of 169 did not."""
    _set_allocator({M_MMAP_THRESHOLD: MAPPED_ALONE_BYTES})


def _set_allocator(settings: Mapping[int, int]) -> None:
    """Settings of glibc's `mallopt`; of another C library nothing is set."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, value in settings.items():
            mallopt(name, value)


def data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    return _status("VmData")


def small_bytes() -> int:
    """Memory that allocations under `MAPPED_ALONE_BYTES` take under a limit, with what is free
    between them; 0 for another C library than glibc."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _AllocatorUsage
    return int(mallinfo().small_bytes)


def resident_bytes() -> tuple[int, int]:
    """This process' resident memory now, and the most it has been."""
    return _status("VmRSS"), _status("VmHWM")


def private_bytes() -> int:
    """Private memory that this process has written to: the part of `data_bytes` that is used."""
    return _status("RssAnon")


def tree_bytes() -> int:
    """Resident memory of this process and of those it has started."""
    import psutil

    this, total = psutil.Process(), 0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total


# -- the machine's memory ------------------------------------------------------------------------
def host_memory_bytes() -> int:
    """Memory of this machine, or of the container it is."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _container_memory())])


def available_bytes() -> int:
    """Memory that this machine, or its container, can still give to its processes."""
    import psutil

    free = (limit - used for limit, used in _container_memory())
    return min([int(psutil.virtual_memory().available), *free])


def reserve_bytes() -> int:
    """Bytes that a process leaves free by default: with none left the system kills processes."""
    least, most = RESERVE_BYTES
    return min(max(int(RESERVE_SHARE * host_memory_bytes()), least), most)


def _container_memory() -> Iterator[tuple[int, int]]:
    """Limit and usage of each control group (version 1 or 2) of this process that has a limit.

    Usage leaves out file pages: the system drops them before it ends a process.
    """
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CONTROL_GROUPS / "memory" if controllers else CONTROL_GROUPS
        files = GROUP_FILES[1 if controllers else 2]
        # Without a namespace of its own a container sees its group at the root alone.
        inner = root / name.strip("/")
        for group in (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)):
            limit, used = (_text(group / file).strip() for file in files[:2])
            if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT:
                yield int(limit), int(used) - _file_pages(_text(group / "memory.stat"), files[2])


def _file_pages(statistics: str, prefix: str) -> int:
    kinds = {f"{prefix}active_file", f"{prefix}inactive_file"}
    pairs = (line.split() for line in statistics.splitlines())
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in kinds)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


class _AllocatorUsage(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [("small_bytes", ctypes.c_size_t), ("others", ctypes.c_size_t * 9)]


def _status(field: str) -> int:
    """A size of this process in bytes; its resident memory where there is no /proc (macOS)."""
    text = _text(Path("/proc/self/status"))
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    import psutil

    return 0 if text else int(psutil.Process().memory_info().rss)


# -- out of memory: recognised by its text, as the exception's class varies ----------------------
def is_out_of_memory_text(text: str) -> bool:
    """Whether a failure's text says that memory ran out."""
    return _PATTERN.search(text) is not None


def is_out_of_memory(
    error: BaseException, *, limited: bool = False, after_a_fit: bool = False
) -> bool:
    """Whether this error, or what it was raised from or after, says that memory ran out.

    limited: a memory limit was set on the process, under which libraries fail in odd places.
    after_a_fit: the same ran at a smaller size, so that a GPU's libraries fail by the size.
    """
    further = (TEXTS_UNDER_LIMIT if limited else ()) + (TEXTS_AFTER_A_FIT if after_a_fit else ())
    seen: BaseException | None = error
    while seen is not None:
        is_named = isinstance(seen, MemoryError) or type(seen).__name__ == "OutOfMemoryError"
        if is_named or is_out_of_memory_text(str(seen)):
            return True
        if LATE_FAILURE in str(seen) and is_out_of_memory_text(_logged()):
            return True
        if any(text in str(seen) for text in further):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def _logged() -> str:
    """The end of this process' standard error where that is a file, as in a memory trial."""
    path = Path("/proc/self/fd/2")
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")
