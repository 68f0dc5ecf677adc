"""The facts of a machine, without importing torch: `gather(host)` reads them from a `Host`."""

from __future__ import annotations

from tpukit.hardware.host import Host, RealHost
from tpukit.probe.machine.facts import Facts, gather

__all__ = ["Facts", "Host", "RealHost", "gather"]
