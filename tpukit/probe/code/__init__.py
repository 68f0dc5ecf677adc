"""What in a user's code is deprecated, gone or hurts on XLA, and how to rewrite it."""

from __future__ import annotations

from tpukit.probe.code.finding import Finding
from tpukit.probe.code.scan import ScanReport, scan_paths

__all__ = ["Finding", "ScanReport", "scan_paths"]
