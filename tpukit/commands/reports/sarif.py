"""`tpukit doctor PATH... --sarif FILE`: findings as SARIF 2.1.0, which GitHub shows beside code."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpukit import __version__
from tpukit.errors import ConfigError
from tpukit.probe.lint import Finding

_LEVELS = {"removed": "error", "deprecated": "warning", "habit": "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def write_sarif(path: Path, findings: Sequence[Finding]) -> None:
    """Writes the findings. Raises ConfigError where the file cannot be written."""
    rules = {f.id: {"id": f.id, "shortDescription": {"text": f"{f.effect}: {f.new}"}}
             for f in findings}  # fmt: skip
    driver = {"name": "tpukit doctor", "version": __version__, "rules": list(rules.values())}
    run = {"tool": {"driver": driver}, "results": [_result(finding) for finding in findings]}
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    try:
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--sarif: {path} cannot be written ({error.strerror}).", "Name another file."
        ) from error


def _result(finding: Finding) -> dict[str, Any]:
    cell = f"cell {finding.cell}: " if finding.cell is not None else ""
    place = {
        "artifactLocation": {"uri": Path(finding.path).as_posix()},
        "region": {"startLine": finding.line, "startColumn": finding.column},
    }
    return {
        "ruleId": finding.id,
        "level": _LEVELS[finding.status],
        "message": {"text": f"{cell}{finding.effect}: {finding.old} -> {finding.new}"},
        "locations": [{"physicalLocation": place}],
    }
