"""Finds removed and deprecated calls, and code that is slow or wrong on TPU, and rewrites it."""

from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.scan import ScanResult, scan_paths

__all__ = ["Finding", "ScanResult", "scan_paths"]
