"""What the compiler needs of its surroundings."""

from __future__ import annotations

import pytest

from tpukit.errors import HardwareError
from tpukit.probe.compiler import compile as compiler


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("0.7.1", "0.7.1", True),
        ("0.0.21.1", "0.0.21", True),
        ("2.9.0+cpu", "2.9", True),
        ("0.0.210", "0.0.21", False),
        ("2.10.0", "2.9", False),
        ("0.7.10", "0.7.1", False),
    ],
)
def test_a_version_fits_or_not(version, wanted, fits):
    assert compiler.fits_version(version, wanted) is fits


def test_another_system_is_named(monkeypatch):
    monkeypatch.setattr(compiler.sys, "platform", "darwin")
    with pytest.raises(HardwareError) as caught:
        compiler.check_versions()
    assert caught.value.id == "no-compiler"
    assert "Linux" in caught.value.message


def test_another_processor_is_named(monkeypatch):
    monkeypatch.setattr(compiler.platform, "machine", lambda: "aarch64")
    with pytest.raises(HardwareError, match="aarch64"):
        compiler.check_versions()
