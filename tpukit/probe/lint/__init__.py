"""What in a user's code is deprecated, gone or hurts on XLA, and how to rewrite it."""

from __future__ import annotations

from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.scan import ScanReport, scan_paths

__all__ = ["Finding", "ScanReport", "scan_paths"]
