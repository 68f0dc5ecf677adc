"""Writes a result as JSON with its commit, date, machine and versions; prints rows as a table."""

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("tpukit", "torch", "torchvision", "torch_xla", "libtpu", "jax", "accelerate", "timm",
            "transformers", "lightning", "numpy")  # fmt: skip


def measured() -> dict[str, Any]:
    """Where and when a result was measured."""
    of_code = ("--", ".", ":!benchmarks/results")  # where results are written meanwhile
    changed = _git("status", "--porcelain", "--untracked-files=no", *of_code)
    commit = _git("rev-parse", "--short=8", "HEAD") or "unknown"
    cpu = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return {
        "commit": f"{commit}-dirty" if changed else commit,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **dict(_versions())},
    }


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


def _versions() -> Iterable[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a JSON file with where it was measured, and no place of this machine."""
    text = json.dumps({**measured(), **result}, indent=2, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # An environment, this one or one that it reads from, may lie in the checkout: it comes first.
    text = re.sub(r'[^"\s]*/(?:site|dist)-packages/', "", text).replace(f"{ROOT}/", "")
    path.write_text(text + "\n", encoding="utf-8")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a Markdown table."""
    titles = [*rows[0]] if rows else []
    cells = [[_cell(row.get(title, "")) for title in titles] for row in rows]
    lines = [titles, ["---"] * len(titles), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
