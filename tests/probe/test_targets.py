"""Cloud names to topologies."""

import math

import pytest

from tpukit.errors import ConfigError
from tpukit.probe.targets import find_target, target_names

HBM_GIB = {"v2": 7.48, "v3": 15.48, "v4": 15.25, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}
"""As the compiler reports it."""


@pytest.mark.parametrize(
    ("name", "topology", "devices"),
    [
        ("v5e-1", "v5e:2x2", 1),
        ("v5e-8", "v5e:2x4", 8),
        ("V5E-256", "v5e:16x16", 256),
        ("v5litepod-8", "v5e:2x4", 8),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v4-8", "v4:2x2x1", 8),
        ("v3-8", "v3:2x2", 8),
        ("v6e-4", "v6e:2x2", 4),
    ],
)
def test_cloud_names(name, topology, devices):
    target = find_target(name)
    assert (target.topology, target.devices) == (topology, devices)


def test_every_listed_name_is_found():
    names = target_names()
    assert len(names) == len(set(names)) == 37
    for name in names:
        target = find_target(name)
        kind, count = name.split("-")
        chips = math.prod(map(int, target.topology.removeprefix(f"{kind}:").split("x")))
        assert (target.name, target.memory_bytes) == (name, int(HBM_GIB[kind] * 2**30))
        # v5e-1 and v6e-1 are one device of the smallest topology; v2 to v4 have two cores a chip.
        devices = {"v2": 2 * chips, "v3": 2 * chips, "v4": 2 * chips}.get(kind, chips)
        assert target.devices == (1 if count == "1" else devices)
        assert target.has_kernels == (kind not in ("v2", "v3"))


def test_v4_is_called_approximate():
    assert "splits each v4 chip" in find_target("v4-8").generation.approximate
    assert find_target("v5e-8").generation.approximate is None


@pytest.mark.parametrize(
    ("name", "says"),
    [("v5e-7", "v5e-8"), ("v9-8", "v4-8"), ("tpu", "Use v2-8, "), ("v5e", "v5e-1"), ("v7x-8", "v")],
)
def test_a_target_that_does_not_exist_names_near_ones(name, says):
    with pytest.raises(ConfigError) as caught:
        find_target(name)
    assert name in caught.value.message
    assert says in (caught.value.hint or "")
    assert caught.value.exit_code == 2
