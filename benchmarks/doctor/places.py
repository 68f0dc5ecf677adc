"""Failing scripts in a real environment: does doctor's first answer name the cause and the fix?

Each case of benchmarks/doctor/material/places/NAME.toml is run, must fail, is explained with the
environment (the record of `tpukit run`) and by its log alone (paths made another machine's), and is
run again with its patch, after which it must pass. `right` and `bad` judge a first time; `--out`
has the answers for a person to judge.

    python benchmarks/doctor/places.py dev --out answers.json
    python benchmarks/doctor/places.py kaggle --python /opt/kaggle/bin/python --out kaggle.json
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpukit.io.recorder import recording_environment
from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs import explain_log, open_log
from tpukit.probe.logs.place.live import Uncaught, read_records

MATERIAL = Path(__file__).with_name("material") / "places"
SECONDS = 300
Record = dict[str, Any]
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "PJRT_DEVICE": "CPU",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", help="the file's name: dev, kaggle, colab")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the scripts")
    parser.add_argument("--case", action="append", help="only these")
    parser.add_argument("--out", type=Path, help="write the answers here, as JSON")
    options = parser.parse_args()
    text = (MATERIAL / f"{options.environment}.toml").read_text(encoding="utf-8")
    cases = [c for c in tomllib.loads(text)["case"] if c["id"] in (options.case or [c["id"]])]
    known_errors()
    results = []
    for case in cases:
        results.append(asked(case, options.python))
        print(line_of(results[-1]), flush=True)
    for way in ("here", "log"):
        print(way, dict(Counter(result[way]["verdict"] for result in results)))
        wrong = [r["id"] for r in results if r[way]["verdict"] != "right"]
        print("  certain and not right:", [
            r["id"] for r in results if r["id"] in wrong and r[way]["confidence"] == "certain"
        ])  # fmt: skip
    seconds = sorted(result["here"]["seconds"] for result in results)
    print(f"seconds an answer: median {seconds[len(seconds) // 2]}, last {seconds[-1]}")
    print("without a failure, or failing with the patch:", [
        r["id"] for r in results if not r["fails"] or not r["passes"]
    ])  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


def run(python: str, script: Path, log: Path, environment: dict[str, str]) -> int:
    """The exit code of a script, whose output goes to the log."""
    with log.open("wb") as out:
        done = subprocess.run(
            [python, script.name], cwd=script.parent, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, timeout=SECONDS, check=False, env={**environment, **OFFLINE},
        )  # fmt: skip
    return done.returncode


def asked(case: Record, python: str) -> Record:
    """A case's answers, and whether its script fails and, patched, passes."""
    with tempfile.TemporaryDirectory(prefix="case-") as folder:
        script, log = Path(folder, "train.py"), Path(folder, "out.log")
        script.write_text(case["script"].lstrip(), encoding="utf-8")
        environment = recording_environment(Path(folder, "record.jsonl"))
        code = run(python, script, log, environment)
        records = read_records(Path(folder, "record.jsonl"))
        is_silent = code == 0 and any(record.thread for record in records)
        here = answer(case, log, records)
        other = Path(folder, "other.log")
        moved = log.read_text(encoding="utf-8", errors="replace").replace(folder, "/code")
        moved = re.sub(r"/\S+/(?=site-packages/)", "/opt/venv/lib/python3.12/", moved)
        other.write_text(moved, encoding="utf-8")
        by_log = answer(case, other, ())
        text = case["script"].lstrip()
        for old, new in case["patch"]:
            if old not in text:
                raise SystemExit(f"{case['id']}: the patch does not apply: {old!r}")
            text = text.replace(old, new, 1)
        script.write_text(text, encoding="utf-8")
        plain = {**os.environ, "PYTHONPATH": environment["PYTHONPATH"]}
        passes = run(python, script, Path(folder, "patched.log"), plain) == 0
    return {
        "id": case["id"], "about": case["about"], "cause": case["cause"], "patch": case["patch"],
        "fails": code != 0 or is_silent, "passes": passes, "here": here, "log": by_log,
        "output": moved[-4000:],
    }  # fmt: skip


def answer(case: Record, log: Path, records: Sequence[Uncaught]) -> Record:
    """The first answer about a log, judged by the case's expressions."""
    start = time.perf_counter()
    found = explain_log(open_log(str(log), 20.0), known_errors(), records).explanations
    seconds = round(time.perf_counter() - start, 3)
    first = next((e for e in found if e.role == "cause"), None)
    if first is None:
        return {"verdict": "nothing", "seconds": seconds, "confidence": "", "said": ""}
    own = first.cause.removeprefix(first.shown)  # what the exception says itself is no answer
    said = f"{own} | {first.fix}"
    is_right = all(re.search(form, said) for form in case["right"])
    is_bad = any(re.search(form, said) for form in case.get("bad", ()))
    return {
        "verdict": "right" if is_right and not is_bad else "other", "seconds": seconds,
        "confidence": first.confidence, "answer": first.id, "shown": first.shown, "said": said,
    }  # fmt: skip


def line_of(result: Record) -> str:
    state = "" if result["fails"] and result["passes"] else " (NO CASE)"
    here, log = result["here"], result["log"]
    return f"{result['id']:28} here {here['verdict']:8} log {log['verdict']:8}{state}"


if __name__ == "__main__":
    main()
