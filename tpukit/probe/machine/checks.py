"""The checks of `doctor`: every one runs, whatever the others say."""

from collections.abc import Iterator

from tpukit.probe.machine import devices, packages, surroundings
from tpukit.probe.machine.facts import Facts
from tpukit.probe.machine.live import run_live_checks
from tpukit.probe.machine.verdict import Check, CheckOptions, Result, run_check

QUICK: tuple[Check, ...] = (
    devices.device,
    devices.tpu_free,
    devices.pjrt_device,
    packages.torch_and_torch_xla,
    packages.libtpu,
    packages.jax,
    packages.torch_tpu,
    packages.torchvision,
    packages.tensorflow,
    packages.old_releases,
    surroundings.variables,
    devices.gpu_architecture,
    devices.driver,
    devices.number_formats,
    devices.gpus_alike,
    surroundings.memory,
    surroundings.shared_memory,
    surroundings.free_disk,
    surroundings.cache,
    surroundings.cxx_compiler,
)
"""Checks without heavy imports and without the network."""


def run_checks(facts: Facts, options: CheckOptions, *, quick: bool) -> Iterator[Result]:
    """Every check's result, as it comes."""
    for check in QUICK if quick else (*QUICK, surroundings.weights_reachable):
        yield run_check(check, facts, options)
    if not quick:
        yield from run_live_checks(facts, options)
