"""The lean network on XLA: the same numbers as on the CPU, and nothing leaves the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.xla, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("eit_steps.py")


def run(out, hw, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    subprocess.run(
        [sys.executable, str(SCRIPT), str(out), hw], env=environment, check=True, timeout=400
    )
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return run(tmp_path_factory.mktemp("eager") / "out.pt", "cpu", USE_TORCH_XLA="0")


def test_two_virtual_devices_give_the_cpus_numbers(eager, tmp_path):
    found = run(tmp_path / "out.pt", "tpu", PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")
    assert found["devices"] == 2 and eager["devices"] == 1
    assert found["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    torch.testing.assert_close(found["mean"], eager["mean"], rtol=1e-3, atol=1e-3)
    assert found["left"] == []
    assert found["compiled"][-1] == found["compiled"][0]
