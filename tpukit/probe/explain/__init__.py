"""What an error log says: its known texts, the first cause before what followed from it."""

from __future__ import annotations

from tpukit.probe.explain.log import ExplainedLog, explain_log
from tpukit.probe.explain.source import LogSource, open_log

__all__ = ["ExplainedLog", "LogSource", "explain_log", "open_log"]
