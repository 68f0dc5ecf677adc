"""What is on this machine, without importing torch: `gather(host)` asks a `Host`, the one seam."""

from __future__ import annotations

from tpukit.hardware.host import Host, RealHost
from tpukit.hardware.recorded_host import PlayedHost
from tpukit.probe.machine.facts import Facts, gather

__all__ = ["Facts", "Host", "PlayedHost", "RealHost", "gather"]
