"""A TPU through torch_tpu: a device of torch's own that runs eagerly, one rank a device.

torch_tpu is experimental. Executed on a CPU, through the plugin that the tests use; never on a TPU.
"""

import importlib.metadata
import io
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpukit.errors import HardwareError, JobError
from tpukit.hardware.backend import Batch, DeviceUsage
from tpukit.hardware.collectives import COLLECTIVE_TIMEOUT, init_method
from tpukit.hardware.eager.devices import EagerDevice, Gather
from tpukit.hardware.eager.programs import RecordedPrograms
from tpukit.hardware.eager.torch_tpu_operators import replace_operators
from tpukit.hardware.kept_programs import record_programs
from tpukit.hardware.memory import LATE_FAILURE, Memory
from tpukit.hardware.modules import move_tensors, require_unpacked
from tpukit.hardware.options import Precision
from tpukit.hardware.prefetch import prefetch
from tpukit.hardware.step_programs import StepCall

LAUNCH_VARIABLES = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")


class TpuDevice(EagerDevice):
    """One device of a TPU: each rank sees its own alone, as the first."""

    compiles = True
    native_bf16 = True
    compiles_everything = True

    def __init__(self) -> None:
        self.device = torch.device("tpu", 0)
        self._tpu: Any = torch.get_device_module("tpu")
        self._programs_seen = 0
        self._programs = RecordedPrograms(self.device, _note)
        held = torch.zeros(1, device=self.device)
        self._counts_memory = torch.accelerator.memory_allocated(held.device) > 0
        version = importlib.metadata.version("torch_tpu")
        self.versions: Mapping[str, str] = {"torch_tpu": f"{version} (experimental)"}

    def name(self) -> str:
        return str(self._tpu.get_device_name())

    def set_arithmetic(self, precision: Precision, *, deterministic: bool) -> None:
        # By default fp32 factors are rounded to bf16.
        if precision == "fp32":
            torch.set_float32_matmul_precision("highest")

    def place(self, model: nn.Module) -> nn.Module:
        """The same model, moved to the device."""
        require_unpacked(model, "a TPU")
        move_tensors(model, self._move, self._move)
        return model

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        return prefetch(loader, self._send)

    def _send(self, batch: Mapping[str, Tensor]) -> Batch:
        # A compiled model takes no views with other strides.
        return {name: tensor.contiguous().to(self.device) for name, tensor in batch.items()}

    def run(self, step: StepCall, gather: Gather) -> Any:
        self._programs.gather = gather
        result = self._programs.run(step)
        if self._programs.results:
            self.surface_errors(self._programs.results[:1])
        return result

    def limit_memory(self, limit_bytes: int) -> None:
        raise HardwareError("--memory-limit: a TPU's memory cannot be limited.", "Leave it out.")

    def surface_errors(self, results: Sequence[Tensor]) -> None:
        """Waits for a step that compiled: that is the one that may run out of memory."""
        if self._programs_made() == self._programs_seen:
            return
        try:
            for tensor in results:
                # A wait for the device raises nothing: only reading what failed does.
                tensor.detach().flatten()[:1].cpu()
        except RuntimeError as error:
            if LATE_FAILURE not in str(error):
                raise
            raise JobError(
                "a program failed on the TPU; the runtime logs its own error (above)",
                "Out of memory (RESOURCE_EXHAUSTED): a smaller --global-batch-size, --accumulate "
                "or --shard. An operator that torch_tpu cannot compile: --precision fp32 or "
                "--no-compile may avoid it.",
                id="tpu-program-failed",
            ) from error
        # Operations are dispatched asynchronously: some have compiled only now.
        self._programs_seen = self._programs_made()
        record_programs()

    def _programs_made(self) -> int:
        """Programs that were new to this process, those of a cache's files too."""
        return int(self._tpu._get_cache_misses())

    def compilations(self) -> int:
        return int(self._tpu._get_cache_stats().num_compilations)

    def usage(self) -> DeviceUsage:
        return replace(super().usage(), host_sleeps=True)

    def memory(self) -> Memory | None:
        if not self._counts_memory:
            return None
        accelerator: Any = torch.accelerator  # as torch 2.11 has it
        _, total = accelerator.get_memory_info(self.device)
        used = accelerator.memory_allocated(self.device)
        return Memory(used, accelerator.max_memory_allocated(self.device), total or None)


def start_torch_tpu(world_size: int) -> TpuDevice:
    """The device of this rank, after joining the others."""
    _check_launch_variables()
    load_torch_tpu()
    if world_size > 1:
        dist.init_process_group("tpu", init_method=init_method(), timeout=COLLECTIVE_TIMEOUT)
    return TpuDevice()


def _note(text: str) -> None:
    print(f"Note: {text}.", file=sys.stderr, flush=True)


def load_torch_tpu() -> None:
    """What `import torch` does by itself where its autoload is on."""
    # Nearly all of `torch.tpu` warns that it is experimental; the run's first lines say it once.
    warnings.filterwarnings("ignore", message="<TorchTpu/ApiStage/")
    # While a step is recorded it looks at results' gradients: a warning for each of a user's lines.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    [entry] = importlib.metadata.entry_points(group="torch.backends", name="torch_tpu")
    with redirect_stderr(io.StringIO()):  # it prints each of its own steps
        entry.load()()
    replace_operators()
    if not hasattr(torch, "tpu") or torch.accelerator.current_accelerator() is None:
        raise HardwareError(
            "--hw tpu: torch_tpu found no TPU that it can use.",
            "Run `tpukit doctor`: it names the chips and who holds them.",
            id="no-tpu",
        )


def _check_launch_variables() -> None:
    """Under a launcher the runtime aborts where these are missing."""
    missing = [name for name in LAUNCH_VARIABLES if name not in os.environ]
    if "WORLD_SIZE" in os.environ and missing:
        raise HardwareError(
            f"--hw tpu: {' and '.join(missing)} are not set, by which torch_tpu's ranks meet.",
            "Leave the launch to tpukit, or set them before torchrun: "
            "`export $(python -m torch.tpu.distributed | xargs)`.",
        )
