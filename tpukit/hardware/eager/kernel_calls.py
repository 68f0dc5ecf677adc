"""The attention kernels as operations of torch_tpu, through private functions of release 0.2.0.

They are lowered for a TPU; the tests' device runs them in JAX's interpreter. Needs jax.
"""

import dataclasses
import functools
import hashlib
import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpukit.hardware.detect import EMULATED_KERNELS
from tpukit.hardware.kernels.flash_attention import Kernel, Shapes, results_of, with_shapes
from tpukit.hardware.step_programs import host_state, set_host_state


def kernel_call(kernel: Kernel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The kernel by itself, or in the program that is being recorded."""
    shapes = tuple((tuple(t.shape), t.dtype) for t in inputs)
    interpret = os.environ.get(EMULATED_KERNELS) == "1"
    name, digest = _registered(dataclasses.replace(kernel, interpret=interpret), shapes)
    outputs = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in results_of(kernel, inputs)
    ]
    found: list[Tensor] = _pallas().call_custom_kernel(
        name, digest, inputs=list(inputs), output_shapes=outputs, donate_argnums=[],
        device_assignment=[],
    )  # fmt: skip
    return found


@functools.lru_cache(maxsize=256)
def _registered(kernel: Kernel, inputs: Shapes) -> tuple[str, str]:
    """The kernel's name and its program's digest, by which torch_tpu's caches know it."""
    # jax, imported or asked, draws from Python's generator, which no recorded step may.
    state = host_state()
    import jax
    from jax._src.config import export_ignore_forward_compatibility

    function, shapes = with_shapes(kernel, inputs)
    checks = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
    # The libtpu beside it is of jax's age, and reads its newest Mosaic.
    with export_ignore_forward_compatibility(True):
        exported = jax.export.export(function, platforms=["tpu"], disabled_checks=checks)(*shapes)
    set_host_state(state)
    name = f"tpukit_attention_{kernel.function}"
    digest = hashlib.sha256(repr((kernel, inputs)).encode() + exported.mlir_module_serialized)
    _pallas().register_custom_kernel(
        name, digest.hexdigest(), serialized_mlir_module=exported.mlir_module_serialized
    )
    return name, digest.hexdigest()


def _pallas() -> Any:
    return importlib.import_module("torch_tpu._internal.pallas.tpu_torch_pallas")
