"""What `tpukit test` found of a run, kept in its folder: tests.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from tpukit.io.files import write_file
from tpukit.train.storage.run_folder import RunFolder

Cell = tuple[float | None, list[float] | None]
"""A value and its interval."""
KEPT = ("task", "data", "samples", "skipped", "metrics", "intervals", "best", "worst")
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


def metric_table(test: Mapping[str, Any]) -> tuple[list[str], dict[str, list[Cell]]]:
    """Column names and rows: each metric with its interval, and its value in other ways beside it.

    `rouge1_baseline` is `rouge1` in another way where other metrics have a `_baseline` too;
    `rouge1_low` and `rouge1_high` are its interval.
    """
    metrics = {name: v for name, v in _entries(test, "metrics") if _is_number(v)}
    intervals = {name: v for name, v in _entries(test, "intervals") if _is_interval(v)}
    for name in [n for n in metrics if {f"{n}_low", f"{n}_high"} <= metrics.keys()]:
        intervals[name] = [metrics.pop(f"{name}_low"), metrics.pop(f"{name}_high")]
    parts = {name: name.rpartition("_") for name in metrics}
    suffixes = [suffix for base, _, suffix in parts.values() if base in metrics]
    ways = [w for w in dict.fromkeys(suffixes) if w == "baseline" or suffixes.count(w) > 1]
    rows = {}
    for name in metrics:
        base, _, suffix = parts[name]
        if not (base in metrics and suffix in ways):
            names = [name, *(f"{name}_{way}" for way in ways)]
            rows[name] = [(metrics.get(n), intervals.get(n)) for n in names]
    return ways, rows


def _entries(test: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    found = test.get(name)
    return found.items() if isinstance(found, Mapping) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
