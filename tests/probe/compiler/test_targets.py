"""Cloud names to topologies."""

from __future__ import annotations

import pytest

from tpukit.errors import ConfigError
from tpukit.probe.compiler.targets import find_target, target_names


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
    for name in target_names():
        assert find_target(name).name == name
        assert find_target(name).memory_bytes > 7 * 2**30


def test_v4_is_called_approximate():
    assert find_target("v4-8").generation.approximate
    assert find_target("v5e-8").generation.approximate is None


@pytest.mark.parametrize(
    ("name", "says"), [("v5e-7", "v5e-8"), ("v9-8", "v"), ("tpu", "v"), ("v5e", "v5e-")]
)
def test_a_target_that_does_not_exist_names_near_ones(name, says):
    with pytest.raises(ConfigError) as caught:
        find_target(name)
    assert name in caught.value.message
    assert says in (caught.value.hint or "")
    assert caught.value.exit_code == 2
