"""Explains error logs: finds known errors and orders them by cause and consequence."""

from tpukit.probe.logs.explain import ExplainedLog, explain_log
from tpukit.probe.logs.log_source import LogSource, open_log

__all__ = ["ExplainedLog", "LogSource", "explain_log", "open_log"]
