"""The facts of a machine, `doctor`'s checks, and its hardware test in child processes.

Only the children's modules (`device_parts`, `host_parts`, `selftest_task`) import torch."""
