"""The page of tested models, and the record of their results that it is written from.

python zoo_page.py [--run [NAME...]]: writes the page, after running what is not in the record yet.
"""

import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo_models import FOLDER, Entry, entries
from zoo_stages import CHECKS, outcome

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
RECORD = FOLDER / "results.json"
HEAD = FOLDER / "page_head.md"
PACKAGES = ("torch", "torch_xla", "libtpu", "timm", "transformers", "torchvision")
PASSES = "passes"
LABELS = {
    "equals": "a step equals the CPU's",
    "one-graph": "nothing compiles after the warm-up",
    "compiles": "the bf16 step compiles for a v5e",
}


# -- the record ----------------------------------------------------------------------------------
def record() -> dict[str, Any]:
    """`versions`, `results`, and of the models compared in float64 `fp32`: by how much a step in
    fp32 differs from the CPU's."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def run_missing(names: Sequence[str]) -> None:
    """Runs the stages of these models that have no result; the record is written after each."""
    for name in names:
        for stage, checks in CHECKS.items():
            if all(check in record()["results"].get(name, {}) for check in checks):
                continue
            found = outcome(name, stage, limit_seconds=3000)
            failed = found.failed_checks()
            print(f"{name} {stage} {found.seconds} s: {failed or 'passed'}", flush=True)
            results = {check: failed.get(check) for check in checks}
            write_record(name, results, found.values.get("fp32", {}))


def write_record(
    name: str, results: Mapping[str, str | None], in_fp32: Mapping[str, float]
) -> None:
    """Adds the results of a model."""
    kept = record()
    kept["versions"] = {package: importlib.metadata.version(package) for package in PACKAGES}
    kept["results"].setdefault(name, {}).update(results)
    if in_fp32:
        kept["fp32"][name] = max(in_fp32.values())
    for part in ("results", "fp32"):
        kept[part] = {name: kept[part][name] for name in entries() if name in kept[part]}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


# -- the page --------------------------------------------------------------------------------------
def page() -> str:
    """The page's text."""
    kept, all_entries = record(), list(entries().values())
    results = {entry.name: result(entry, kept) for entry in all_entries}
    libraries = list(dict.fromkeys(entry.library for entry in all_entries))
    head = HEAD.read_text(encoding="utf-8").format(
        libraries=f"{', '.join(libraries[:-1])} and {libraries[-1]}",
        exact=len(kept["fp32"]),
        counts=_counts(kept["results"]),
        optimized=sum(entry.optimized for entry in all_entries),
        versions=", ".join(f"{name} {version}" for name, version in kept["versions"].items()),
    )
    parts = [_table(name, all_entries, results) for name in libraries]
    return "\n".join([head, *parts])


def result(entry: Entry, kept: Mapping[str, Any]) -> str:
    """What the page says of a model."""
    name, checks = entry.name, kept["results"].get(entry.name, {})
    if failed := [f"**{check}**: {message}" for check, message in checks.items() if message]:
        return "; ".join(failed)
    if len(checks) < len(LABELS):
        return "not run yet"
    if name in kept["fp32"]:
        return f"{PASSES} in float64; in fp32 the step differs by {kept['fp32'][name]:.0e}"
    return PASSES


def _counts(results: Mapping[str, Mapping[str, str | None]]) -> str:
    """How many of the models passed each check, and all."""
    lines = [f"| of {len(entries())} models | run | passed |", "|---|---|---|"]
    for check, label in LABELS.items():
        found = [checks[check] for checks in results.values() if check in checks]
        lines.append(f"| {label} | {len(found)} | {found.count(None)} |")
    whole = [{*found.values()} for found in results.values() if len(found) == len(LABELS)]
    return "\n".join([*lines, f"| all three | {len(whole)} | {whole.count({None})} |"])


def _table(library: str, all_entries: Sequence[Entry], results: Mapping[str, str]) -> str:
    """One library's families."""
    own = [entry for entry in all_entries if entry.library == library]
    rows = [f"| {entry.family} | `{entry.model}` | {results[entry.name]} |" for entry in own]
    passed = sum(results[entry.name].startswith(PASSES) for entry in own)
    head = f"## {library}: {passed} of {len(own)}\n\n| family | model | |\n|---|---|---|"
    return "\n".join([head, *rows, ""])


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--run"]:
        run_missing(arguments[1:] or list(entries()))
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
