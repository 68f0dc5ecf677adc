"""What holds for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

MARKS_THAT_NEED = {"xla": "torch_xla", "plan": "torch_xla", "torch_tpu": "torch_tpu"}
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # as the command line does


def pytest_configure() -> None:
    """Children must be interruptible, also where this process was started in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of torch_xla and of the TPU compiler are skipped where these are not installed."""
    for mark, module in MARKS_THAT_NEED.items():
        if find_spec(module) is None:
            skip = pytest.mark.skip(reason=f"needs {module}")
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(skip)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A test leaves the environment as it found it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
