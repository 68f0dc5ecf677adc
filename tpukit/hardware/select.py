"""Selects the hardware of a run and opens its backend. Imports no torch before `open_backend`."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tpukit.errors import HardwareError, InterruptedRunError
from tpukit.hardware.detect import (
    CHIP_BOUNDS,
    TPU_VARIABLES,
    Hardware,
    TpuChips,
    detect_hardware,
    is_emulated,
)
from tpukit.hardware.device_trials import (
    KERNELS,
    STEPS,
    DeviceTrial,
    kernel_device,
    steps_device,
)
from tpukit.hardware.host import Host
from tpukit.hardware.kept_programs import keep_programs
from tpukit.hardware.launch.failures import failures_named
from tpukit.hardware.launch.memory_watch import watched_memory
from tpukit.hardware.options import HardwareOptions, Kind, choose_precision
from tpukit.hardware.tpu_stack import (
    AUTOLOAD_VARIABLE,
    RANKS_VARIABLE,
    check_rank_count,
    choose_stack,
    installed_stack,
)

if TYPE_CHECKING:
    from tpukit.hardware.backend import Backend, OpenedBackend

Options = TypeVar("Options", bound=HardwareOptions)


ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Variables of CUDA's allocator: the name since torch 2.9, and the earlier one."""
EXPANDABLE = "expandable_segments:True"
"""What a run sets in them: segments that grow leave fewer gaps."""
_AT_EXIT = ExitStack()
atexit.register(_AT_EXIT.close)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def open_backend(
    options: HardwareOptions, log: Callable[[str], None] = _to_stderr, runs: Sequence[Path] = ()
) -> OpenedBackend:
    """The backend for these options.

    log: is given what to know about its kernels and steps. runs: see `settled`.

    Raises:
        HardwareError: the hardware is not here, or cannot do what the options ask for.
    """
    kind = prepare_environment(options)
    options = settled(options, log, runs)
    if kind == "tpu" and installed_stack() == "torch_xla":
        from tpukit.hardware.xla.backend import open_xla

        return open_xla(options)
    from tpukit.hardware.eager.backend import open_eager

    return open_eager(options, kind)


@contextmanager
def opened_backend(
    options: HardwareOptions,
    log: Callable[[str], None] = _to_stderr,
    *,
    once: bool = True,
    runs: Sequence[Path] = (),
) -> Iterator[Backend]:
    """The backend within the context; raises as `open_backend` does.

    Without a limit on memory what computes on the CPU leaves some for the system, see
    `tpukit.hardware.launch.memory_watch`.

    Afterwards this process may hold as much memory, and compute as freely, as before.
    once: this process opens no other one; else ranks stay joined until it ends, as they cannot join
        a second time.
    runs: run folders that keep what was found out about the kernels, the run's own first.
    """
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    _require_default_device()
    backend = open_backend(options, log, runs)
    in_step = backend.world_size == 1
    """Whether the other ranks leave as well."""
    try:
        with failures_named(), memory_guard(options):
            yield backend
        in_step = True
    except InterruptedRunError:
        in_step = True
        raise
    finally:
        if not in_step:
            # NCCL's end would wait for ranks that wait for this one.
            _AT_EXIT.pop_all()
        elif once or backend.world_size == 1:
            backend.close()
        else:
            _AT_EXIT.callback(backend.close)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        for trial, device in _tried(options) if runs and backend.is_main else ():
            trial.keep(device, options, runs=runs[:1])
        if options.deterministic:
            sys.modules["torch"].use_deterministic_algorithms(False)


def _require_default_device() -> None:
    """Raises HardwareError where new tensors are not made on the CPU, as batches are in workers."""
    torch = sys.modules.get("torch")
    if torch is not None and (device := torch.get_default_device().type) != "cpu":
        raise HardwareError(
            f"torch.set_default_device({device!r}) is in effect: DataLoader workers would make"
            " batches on that device.",
            "Leave it out (in a notebook: torch.set_default_device(None)); the model and batches"
            " are on the device of the run, and new tensors take `device=x.device`.",
            id="default-device",
        )


def are_virtual(kind: object) -> bool:
    """Whether the devices of this kind are virtual ones of the emulation on CPU."""
    return kind == "tpu" and is_emulated(os.environ)


def computes_on_cpu(kind: Kind) -> bool:
    """Whether the devices of this kind are the host's CPU, as virtual devices are."""
    return kind == "cpu" or are_virtual(kind)


def memory_guard(options: HardwareOptions) -> AbstractContextManager[None]:
    """Keeps a computation on the CPU of this host from taking all of its memory."""
    kind = find_kind(options)
    if options.memory_limit is not None or not computes_on_cpu(kind):
        return nullcontext()
    return watched_memory(limited=kind == "cpu")


def settled(options: Options, log: Callable[[str], None], runs: Sequence[Path] = ()) -> Options:
    """The options with `kernels` and `steps` decided: what is not known of this device is tried.

    runs: run folders that may know it. Raises HardwareError as `find_kind` does.
    """
    hardware = _this_machine()
    _check(options, hardware)
    tried = {
        trial: trial.works(device, hardware, options, log, runs=runs, may_try=not holds_tpu())
        for trial, device in _tried(options)
    }
    if options.kernels == "auto":
        options = dataclasses.replace(options, kernels="on" if tried.get(KERNELS) else "off")
    if STEPS in tried:
        options = dataclasses.replace(options, step_mode="recorded" if tried[STEPS] else "traced")
    return options


def _tried(options: HardwareOptions) -> Iterator[tuple[DeviceTrial, str]]:
    """What is tried for these options, and on which kind of device."""
    hardware = _this_machine()
    device = _kernel_device(options, hardware) if options.kernels == "auto" else None
    if device is not None:
        yield KERNELS, device
    kind = hardware.kind if options.hw == "auto" else options.hw
    if kind == "tpu" and installed_stack() == "torch_xla" and options.step_mode != "traced":
        yield STEPS, steps_device(hardware)


def try_own_kernels(options: HardwareOptions, seconds: float) -> Mapping[str, Any] | None:
    """The result of a new trial of the kernels, kept for runs; None where there are none.

    See `tpukit.hardware.device_trials.DeviceTrial.attempt`.
    """
    hardware = _this_machine()
    device = _kernel_device(options, hardware)
    if device is None:
        return None
    result = KERNELS.attempt(hardware, options, seconds)
    if result["opened"]:
        KERNELS.keep(device, options, result)
    return result


def _kernel_device(options: HardwareOptions, hardware: Hardware) -> str | None:
    kind = hardware.kind if options.hw == "auto" else options.hw
    # With torch_tpu several ranks run no program that holds a kernel.
    if kind != "tpu" or (installed_stack() == "torch_tpu" and rank_count(options, kind) > 1):
        return None
    return kernel_device(hardware)


def find_kind(options: HardwareOptions, hardware: Hardware | None = None) -> Kind:
    """The hardware that these options select on this machine; nothing is started or imported.

    hardware: what was found here, where somebody has looked.

    Raises:
        HardwareError: it is not here, or cannot do what the options ask for.
    """
    return _check(options, hardware or _this_machine())


def holds_tpu() -> bool:
    """Whether this process has opened a TPU: no other process can then."""
    if hasattr(sys.modules.get("torch"), "tpu"):  # torch_tpu's module, loaded with its device
        return True
    compiled: Any = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    is_open = compiled is not None and compiled._xla_runtime_is_initialized()
    return is_open and not is_emulated(os.environ)


def rank_count(options: HardwareOptions, kind: Kind) -> int:
    """Ranks of a run on this host: one a GPU, one a device of a TPU with torch_tpu; a single one
    drives all devices of a TPU with torch_xla."""
    if kind == "gpu":
        return options.devices or len(_this_machine().gpus)
    if kind == "cpu":
        return options.devices or 1
    tpu = _this_machine().tpu
    if tpu is None or installed_stack() == "torch_xla":
        return 1
    return options.devices or tpu.devices


def prepare_environment(options: HardwareOptions) -> Kind:
    """Sets what torch, torch_xla, CUDA and accelerate read from the environment at import: called
    before a task's file is imported, as that may import any of them."""
    hardware = _this_machine()
    kind = _check(options, hardware)
    # The backend loads torch_tpu where a run uses it.
    os.environ.setdefault(AUTOLOAD_VARIABLE, "0")
    # Else DDP's C++ part advises each run whose parameters are all used.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if kind == "tpu":
        # XLA logs the end of its own partitioner several times a compilation.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if kind == "tpu" and installed_stack() == "torch_xla":
        # torch_xla's import would start a pool of compilers for GPU kernels.
        os.environ.setdefault("TORCH_WARM_POOL", "0")
        os.environ["USE_TORCH_XLA"] = "1"
        _prepare_xla(options, hardware)
    else:
        # A user's accelerate would import torch_xla where it is installed, and insist on it.
        os.environ["USE_TORCH_XLA"] = "0"
    if kind == "tpu" and installed_stack() == "torch_tpu":
        os.environ[RANKS_VARIABLE] = str(rank_count(options, kind))
        if options.compile_cache is not None:
            keep_programs(Path(options.compile_cache).absolute(), "torch_tpu")
    if kind == "gpu":
        os.environ[ALLOCATOR_VARIABLES[1]] = allocator_settings(EXPANDABLE)
        if options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return kind


def allocator_settings(default: str) -> str:
    """The settings of CUDA's allocator that the user gave, else the default."""
    given = (os.environ.get(name) for name in ALLOCATOR_VARIABLES)
    return next((settings for settings in given if settings is not None), default)


def _this_machine() -> Hardware:
    """The hardware here; looked at once for as long as the variables that decide it stay."""
    decided = os.environ.get("PJRT_DEVICE", "TPU").upper()
    others = (os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", *TPU_VARIABLES))
    return _detected(Host, (decided, *others))


@functools.lru_cache(maxsize=1)
def _detected(host: Callable[[], Host], _variables: tuple[str | None, ...]) -> Hardware:
    return detect_hardware(host())


def _check(options: HardwareOptions, hardware: Hardware) -> Kind:
    kind = hardware.kind if options.hw == "auto" else options.hw
    if kind == "tpu":
        _check_tpu(options, hardware)
    elif kind == "gpu":
        _check_gpu(options, hardware)
    if options.kernels == "on" and _kernel_device(options, hardware) is None:
        raise HardwareError(
            "--kernels on: there are no kernels for this hardware; they need jax on a TPU v4 or"
            " newer, and one device with torch_tpu.",
            "Leave --kernels out.",
            id="no-kernels",
        )
    if options.step_mode == "recorded" and kind != "tpu":
        raise HardwareError(
            f"--steps recorded: a step on a {kind.upper()} runs as its Python says.",
            "Leave --steps out.",
        )
    if options.devices is not None and options.devices < 1:
        raise HardwareError(
            f"--devices {options.devices}: at least one device is needed.", "Use --devices 1."
        )
    return kind


def _check_tpu(options: HardwareOptions, hardware: Hardware) -> None:
    choose_precision(options.precision, "tpu", native_bf16=True)
    stack = choose_stack(hardware, Host())
    if stack == "torch_tpu" and options.devices is not None and hardware.tpu is not None:
        check_rank_count(options.devices, hardware.tpu)
    if options.memory_limit is not None and not hardware.emulated:
        raise HardwareError(
            "--memory-limit: a TPU's memory cannot be limited.",
            "Leave it out, or set PJRT_DEVICE=CPU for emulation on CPU.",
        )


def _check_gpu(options: HardwareOptions, hardware: Hardware) -> None:
    count = len(hardware.gpus)
    if count == 0:
        hidden = f" ({hardware.hidden_gpus} hidden by CUDA_VISIBLE_DEVICES)"
        raise HardwareError(
            f"--hw gpu: there is no GPU on this machine{hidden if hardware.hidden_gpus else ''}.",
            "Run `tpukit doctor` to see the hardware; --hw cpu runs on the CPU.",
            id="no-gpu",
        )
    if options.devices is not None and options.devices > count:
        raise HardwareError(
            f"--devices {options.devices}: this machine has {count} GPUs.",
            f"Use --devices {count}.",
        )


def _prepare_xla(options: HardwareOptions, hardware: Hardware) -> None:
    if hardware.tpu is None or hardware.emulated:
        if options.devices is not None:
            os.environ["CPU_NUM_DEVICES"] = str(options.devices)
        return
    os.environ["PJRT_DEVICE"] = "TPU"
    # Notebook images set it to "local", which newer runtimes complain about.
    if os.environ.get("TPU_PROCESS_ADDRESSES") == "local":
        del os.environ["TPU_PROCESS_ADDRESSES"]
    if options.devices is not None:
        _limit_chips(options.devices, hardware.tpu)
    if options.compile_cache is not None:
        keep_programs(Path(options.compile_cache).absolute())


def _limit_chips(devices: int, tpu: TpuChips) -> None:
    chips, rest = divmod(devices, tpu.devices_per_chip)
    if rest or chips not in CHIP_BOUNDS:
        possible = [n * tpu.devices_per_chip for n in CHIP_BOUNDS]
        raise HardwareError(
            f"--devices {devices}: invalid number of TPU devices; a host is split into 1, 2, 4 or"
            " 8 chips.",
            f"Use --devices {min(possible, key=lambda n: abs(n - devices))}.",
        )
    if devices == tpu.devices:
        return
    os.environ["TPU_VISIBLE_CHIPS"] = ",".join(str(chip) for chip in range(chips))
    os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = CHIP_BOUNDS[chips]
    os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"
