"""What `tpukit test` found of a run, kept in its folder: tests.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tpukit.io.files import write_file
from tpukit.train.storage.run_folder import RunFolder

KEPT = ("task", "data", "samples", "skipped", "metrics", "metric_names", "methods",
        "intervals", "best", "worst")  # fmt: skip
"""The fields of `test --json` that are kept."""


def keep_test(folder: RunFolder, fields: Mapping[str, Any], step: int) -> None:
    """Keeps the result of a test on a data set, in place of the one before."""
    time = datetime.now().isoformat(timespec="seconds")
    kept = {name: fields[name] for name in KEPT if name in fields}
    tests = {
        **read_tests(folder),
        str(fields.get("data", "")): {**kept, "step": step, "time": time},
    }
    write_file(folder.tests, json.dumps(tests, indent=1, default=str).encode())


def read_tests(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """The results by data set; none where the file is missing or damaged."""
    try:
        tests = json.loads(folder.tests.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    known = tests.items() if isinstance(tests, dict) else ()
    return {name: test for name, test in known if isinstance(test, dict)}
