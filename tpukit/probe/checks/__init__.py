"""The checks of `doctor`: every one runs, whatever the others say."""

from __future__ import annotations

from collections.abc import Iterator

from tpukit.probe.checks import gpu, surroundings, tpu, versions
from tpukit.probe.checks.verdict import Asked, Check, Result, Verdict, run_check
from tpukit.probe.facts import Facts

__all__ = ["QUICK", "Asked", "Check", "Result", "Verdict", "run_check", "run_checks"]

QUICK: tuple[Check, ...] = (
    tpu.device,
    tpu.tpu_free,
    tpu.pjrt_device,
    versions.torch_and_torch_xla,
    versions.libtpu,
    versions.jax,
    versions.torch_tpu,
    versions.torchvision,
    versions.tensorflow,
    versions.old_releases,
    surroundings.variables,
    gpu.gpu_architecture,
    gpu.driver,
    gpu.number_formats,
    gpu.gpus_alike,
    surroundings.memory,
    surroundings.shared_memory,
    surroundings.free_disk,
    surroundings.port,
)
"""Checks that import nothing heavy and ask nobody outside."""


def run_checks(facts: Facts, asked: Asked, *, quick: bool) -> Iterator[Result]:
    """Every check's result, as it comes."""
    for check in QUICK:
        yield run_check(check, facts, asked)
    if quick:
        yield run_check(surroundings.weights, facts, asked)
        return
    yield run_check(surroundings.weights_reachable, facts, asked)
    from tpukit.probe.checks.live import run_live_checks

    yield from run_live_checks(facts, asked)
