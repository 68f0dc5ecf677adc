"""The checks of `doctor`: every one runs, whatever the others say."""

from __future__ import annotations

from collections.abc import Iterator

from tpukit.probe.machine import Facts
from tpukit.probe.machine.checks import gpu, packages, surroundings, tpu
from tpukit.probe.machine.checks.verdict import Check, CheckOptions, Result, Verdict, run_check

__all__ = ["QUICK", "Check", "CheckOptions", "Result", "Verdict", "run_check", "run_checks"]

QUICK: tuple[Check, ...] = (
    tpu.device,
    tpu.tpu_free,
    tpu.pjrt_device,
    packages.torch_and_torch_xla,
    packages.libtpu,
    packages.jax,
    packages.torch_tpu,
    packages.torchvision,
    packages.tensorflow,
    packages.old_releases,
    surroundings.variables,
    gpu.gpu_architecture,
    gpu.driver,
    gpu.number_formats,
    gpu.gpus_alike,
    surroundings.memory,
    surroundings.shared_memory,
    surroundings.free_disk,
    surroundings.cache,
    surroundings.cxx_compiler,
    surroundings.port,
)
"""Checks without heavy imports and without the network."""


def run_checks(facts: Facts, options: CheckOptions, *, quick: bool) -> Iterator[Result]:
    """Every check's result, as it comes."""
    for check in QUICK:
        yield run_check(check, facts, options)
    if quick:
        yield run_check(surroundings.weights, facts, options)
        return
    yield run_check(surroundings.weights_reachable, facts, options)
    from tpukit.probe.machine.checks.live import run_live_checks

    yield from run_live_checks(facts, options)
