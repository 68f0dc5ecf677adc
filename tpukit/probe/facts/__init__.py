"""What is on this machine, without importing torch: `gather(host)` asks a `Host`, the one seam."""

from __future__ import annotations

from tpukit.probe.facts.gather import Facts, gather
from tpukit.probe.facts.host import Host, RealHost
from tpukit.probe.facts.played import PlayedHost

__all__ = ["Facts", "Host", "PlayedHost", "RealHost", "gather"]
