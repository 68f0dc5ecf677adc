"""Profiler traces of a backend's work."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from tpukit.hardware.backend import Backend

ACTIVITIES = {"cuda": [ProfilerActivity.CUDA], "tpu": [ProfilerActivity.PrivateUse1]}
"""Activities that torch's profiler records beside the CPU's, by type of device."""


@contextmanager
def profile(backend: Backend, folder: Path) -> Iterator[None]:
    """Writes a trace of what runs inside into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if backend.device.type == "xla":
        from tpukit.hardware.xla.backend import profile_xla

        with profile_xla(folder):
            yield
        return
    activities = [ProfilerActivity.CPU, *ACTIVITIES.get(backend.device.type, [])]
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(folder / f"trace-{backend.rank}.json"))
