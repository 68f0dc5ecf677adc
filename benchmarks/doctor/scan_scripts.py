"""Precision and recall of `tpukit doctor` on public training scripts that it was not written for.

`material/scripts.toml` to `scripts_9.toml` list each script (repository, path, commit) with
what a reader found wrong in it before doctor was asked: rule and line (in a notebook cell.line),
`plain` for `doctor PATH` and `to_tpu` for what `--to tpu` has to add, of which the first line a
rule. FOLDER holds the scripts as <owner>+<name>@<path>. What doctor says beside the list is
printed, to be judged.

    python benchmarks/doctor/scan_scripts.py FOLDER --set scripts_3
"""

import argparse
import json
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

MATERIAL = Path(__file__).with_name("material")
NEAR = 10
"""Lines between a finding and the listed one: a call begins above what is wrong in it."""
CELL = 1000
"""Lines by which the cells of a notebook lie apart."""


def findings(file: Path, *options: str) -> list[tuple[str, int]]:
    command = [sys.executable, "-m", "tpukit", "doctor", str(file), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["findings"]
    return [(one["id"], (one["cell"] or 0) * CELL + one["line"]) for one in found]


def place(text: str) -> int:
    """The line of `31`, or of `3.31` in the third cell."""
    cell, _, line = text.rpartition(".")
    return int(cell or 0) * CELL + int(line)


def compared(listed: list[str], said: list[tuple[str, int]]) -> dict[str, list[str]]:
    expected = [(id, place(line)) for id, _, line in (entry.partition(":") for entry in listed)]
    hit = {one for one in expected for s in said if s[0] == one[0] and abs(s[1] - one[1]) <= NEAR}
    # Of one rule for CUDA, only the first line is listed.
    whole = {id for id, _ in expected if id.startswith(("cuda-", "read-", "wait-", "padding-"))}
    beside = [
        (id, line)
        for id, line in said
        if id not in whole and not any(id == i and abs(line - n) <= NEAR for i, n in expected)
    ]
    kinds = {"found": hit, "missed": set(expected) - hit, "beside": set(beside)}
    return {kind: [f"{id}:{line}" for id, line in sorted(them)] for kind, them in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", default="scripts")
    options = parser.parse_args()
    material = (MATERIAL / f"{options.set}.toml").read_text(encoding="utf-8")
    scripts = tomllib.loads(material)["script"]
    result: dict[str, Any] = {"plain": {}, "to_tpu": {}}
    for script in scripts:
        name = f"{script['repository'].replace('/', '+')}@{script['path']}"
        plain = findings(options.folder / name)
        moved = [f for f in findings(options.folder / name, "--to", "tpu") if f not in plain]
        for kind, said in (("plain", plain), ("to_tpu", moved)):
            result[kind][name] = compared(script[kind], said)
    for kind, each in list(result.items()):
        kinds = ("found", "missed", "beside")
        result[f"{kind}_counts"] = {k: sum(len(one[k]) for one in each.values()) for k in kinds}
        result[kind] = {n: one for n, one in each.items() if one["missed"] or one["beside"]}
    result["tpukit"] = version("tpukit")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
