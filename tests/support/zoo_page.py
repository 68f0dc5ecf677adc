"""The page of tested models, and the record of their results that it is written from.

python zoo_page.py [--run [NAME...]]: writes the page, after running what is not in the record yet.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from zoo_models import FOLDER, Entry, entries, exceptions
from zoo_stages import CHECKS, outcome

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
RECORD = FOLDER / "results.json"
PACKAGES = ("torch", "torch_xla", "libtpu", "timm", "transformers", "torchvision")
MEANINGS = {
    "equals": "the step differs from the CPU's",
    "one-graph": "compiles after the warm-up",
    "compiles": "does not compile for a v5e",
}
"""A check of `zoo_stages.CHECKS` -> what failing it means."""

LABELS = {
    "equals": "a step equals the CPU's",
    "one-graph": "nothing compiles after the warm-up",
    "compiles": "the bf16 step compiles for a v5e",
}

HEAD = """# Models that train on the TPU path

Models of {libraries}, unmodified, through tpukit's engine. Each one

- takes a training step in fp32 on four virtual XLA devices that equals the CPU's: loss, gradients,
  weights, EMA weights and buffers differ by at most 1e-4 (relative; drop-out and stochastic depth
  off);
- compiles nothing after the warm-up, in three more steps and a validation;
- has a bf16 training step that the TPU compiler compiles for a v5e chip.

{counts}

Weights are random, images small, and most networks shallow and narrow: what is tested is that an
architecture's operations are taken, not how well it learns. The losses are cross-entropy on
synthetic labels or what the model computes itself; of a detector the network alone, without the
matching of boxes.

Under bf16 a TPU runs `scaled_dot_product_attention` in a fused kernel where there is no mask and
no drop-out in it, the tokens are a multiple of 128 and a head is at most 128 wide. The models of
transformers make no mask when they are given no `attention_mask`. Otherwise all scores are written
out: memory grows with the square of the tokens. Where a model asks whether its activations are
finite, to clamp them (DETR), the answer is yes without a look: a traced step has no branches.

Made with {versions}.
`python tests/support/zoo_page.py --run` runs every model that
`tests/zoo/results.json` has no result of and writes this page. The tests hold both against
`tests/zoo/exceptions.toml` and against what the models do: what is listed as failing must fail.

```
pytest tests/zoo -m ''
pytest tests/zoo -m '' -k timm-resnet
```
"""


# -- the record ----------------------------------------------------------------------------------
def recorded() -> dict[str, dict[str, str | None]]:
    """By model and check: None where it passed, else why not."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["results"]


def run_missing(names: Sequence[str]) -> None:
    """Runs the stages of these models that have no result; the record is written after each."""
    for name in names:
        for stage, checks in CHECKS.items():
            known = recorded()
            if all(check in known.get(name, {}) for check in checks):
                continue
            found = outcome(name, stage)
            failed = found.failed_checks()
            results = {check: failed.get(check) for check in checks}
            print(f"{name} {stage} {found.seconds} s: {failed or 'passed'}", flush=True)
            write_record({**known, name: {**known.get(name, {}), **results}})


def write_record(results: Mapping[str, Mapping[str, str | None]]) -> None:
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    sorted_results = {name: results[name] for name in entries() if name in results}
    record = {"versions": versions, "results": sorted_results}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


# -- the page --------------------------------------------------------------------------------------
def page() -> str:
    """The page's text."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    all_entries = list(entries().values())
    results = {entry.name: result(entry.name, record["results"]) for entry in all_entries}
    libraries = list(dict.fromkeys(entry.library for entry in all_entries))
    head = HEAD.format(
        libraries=f"{', '.join(libraries[:-1])} and {libraries[-1]}",
        counts=_counts(all_entries, record["results"]),
        versions=", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    )
    parts = [_table(name, all_entries, results) for name in libraries]
    return "\n".join([head, *parts])


def result(name: str, results: Mapping[str, Mapping[str, str | None]]) -> str:
    """What the page says of a model."""
    checks = results.get(name, {})
    failed = [MEANINGS[check] for check, message in checks.items() if message is not None]
    if failed:
        return f"**{' and '.join(failed)}**: {exceptions()[name]['reason']}"
    missing = [stage for stage, own in CHECKS.items() if not checks.keys() >= set(own)]
    return f"{' and '.join(missing)}: not run yet" if missing else "passes"


def _counts(all_entries: Sequence[Entry], results: Mapping[str, Mapping[str, str | None]]) -> str:
    """How many of the models passed each check, and all."""
    lines = [f"| of {len(all_entries)} models | run | passed |", "|---|---|---|"]
    checks = [check for stage in CHECKS.values() for check in stage]
    for check in checks:
        found = [
            results[entry.name][check]
            for entry in all_entries
            if check in results.get(entry.name, {})
        ]
        lines.append(f"| {LABELS[check]} | {len(found)} | {found.count(None)} |")
    whole = [results[e.name] for e in all_entries if results.get(e.name, {}).keys() == set(checks)]
    passed = sum(set(found.values()) == {None} for found in whole)
    return "\n".join([*lines, f"| all three | {len(whole)} | {passed} |"])


def _table(library: str, all_entries: Sequence[Entry], results: Mapping[str, str]) -> str:
    """One library's families."""
    own = [entry for entry in all_entries if entry.library == library]
    rows = [f"| {entry.family} | `{entry.model}` | {results[entry.name]} |" for entry in own]
    passed = sum(results[entry.name] == "passes" for entry in own)
    head = f"## {library}: {passed} of {len(own)}\n\n| family | model | |\n|---|---|---|"
    return "\n".join([head, *rows, ""])


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--run"]:
        run_missing(arguments[1:] or list(entries()))
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
