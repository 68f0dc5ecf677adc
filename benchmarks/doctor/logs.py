"""`tpukit doctor` on texts, files and logs that nobody here wrote (benchmarks/doctor/material/).

Three sets: error texts of public threads with the cause that must be named first, public files
with the findings that must be made, and logs without an error, of which no cause may be named.
Each is split by its source (repository or site) into a half to learn from and a half to measure:
the parity of the SHA-256 of "184 <source>" decides, odd is measured. The number was taken once,
before any answer was seen, so that the halves are about equal and most families are in both.

The files themselves are not kept. Put them into a folder as <repository>/<path>, each as it was
at the revision in files.toml; what is missing there is listed and left out.

    PYTHONPATH=benchmarks python benchmarks/doctor/logs.py --files /tmp/material --out answer.json
    PYTHONPATH=benchmarks python benchmarks/doctor/logs.py --blind --out answer.json

`--blind` asks about the logs of blind_4.toml to blind_17.toml, whose first answers stand there.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from recorded import write_result

from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs import explain_log, open_log

SECONDS = 20.0
MATERIAL = Path(__file__).with_name("material")
HALVES = ("learn", "measure")
Record = dict[str, Any]

CAUSES = ("cause", "consequence")
TRACEBACK = re.compile(r"Traceback \(most recent calls? ")


def source(address: str) -> str:
    """The repository of a GitHub address, else the site."""
    parts = address.split("/")
    return "/".join(parts[3:5]).lower() if parts[2] == "github.com" else parts[2].lower()


def half(name: str) -> str:
    """The half that a source belongs to."""
    return HALVES[int(sha256(f"184 {name}".encode()).hexdigest(), 16) % 2]


def read(name: str, key: str) -> list[Record]:
    """The entries of one set, each with its half."""
    entries: list[Record] = tomllib.loads((MATERIAL / name).read_text(encoding="utf-8"))[key]
    for entry in entries:
        of = entry["repository"].lower() if key == "file" else source(entry["address"])
        entry["half"] = half(of)
    return entries


def doctor(*arguments: str) -> Record:
    """What `tpukit doctor` answers."""
    done = subprocess.run(
        [sys.executable, "-m", "tpukit", "doctor", "--json", *arguments],
        capture_output=True,
        check=False,
        text=True,
    )
    if not done.stdout.strip():
        raise SystemExit(f"doctor gave no answer to {arguments[:2]}: {done.stderr[-500:]}")
    answer: Record = json.loads(done.stdout)
    return answer


def explain(log: str) -> Record:
    """What `tpukit doctor --explain` answers about one log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.log")
        path.write_bytes(log.encode())
        found = explain_log(open_log(str(path), SECONDS), known_errors())
    unknown = [{"text": line.text} for line in found.unknown]
    return {"explanations": [e.as_json() for e in found.explanations], "unknown": unknown}


# -- texts ----------------------------------------------------------------------------------------


def cause_lines(text: Record) -> set[int]:
    """The lines that an answer may name: those that carry the cause, and the traceback above."""
    lines = text["log"].splitlines()
    found: set[int] = set()
    for index, line in enumerate(lines):
        if not any(part in line for part in text["at"]):
            continue
        above = [i for i in range(index + 1) if TRACEBACK.search(lines[i])]
        found.update(range((above[-1] if above else index) + 1, index + 2))
    return found


def says(text: Record, explanation: Record) -> bool:
    """Whether the words of an answer name the cause, or the exception where no id fits."""
    words = [*text["words"], *([] if text["expect"] else [text["exception"]])]
    said = f"{explanation['cause']} {explanation['fix']}".lower()
    return any(word.lower() in said for word in words if word)


def is_right(text: Record, explanation: Record) -> bool:
    said = f"{explanation['cause']} {explanation['fix']}".lower()
    if any(word.lower() in said for word in text.get("bad", [])):
        return False
    if explanation["id"] in text["expect"]:
        return True
    on_the_line = explanation["line"] in cause_lines(text)
    return names_a_cause(explanation) and on_the_line and says(text, explanation)


def names_a_cause(explanation: Record) -> bool:
    """Consequences, warnings and harmless lines name none."""
    return bool(explanation.get("role", "cause") == "cause")


def judge(text: Record, answer: Record) -> str:
    """ "right", "wrong", or "unknown" where no cause is named."""
    if not answer["explanations"]:
        return "unknown"
    first = answer["explanations"][0]
    if is_right(text, first):
        return "right"
    return "wrong" if names_a_cause(first) else "unknown"


def texts() -> list[Record]:
    results = []
    for text in read("texts.toml", "text"):
        answer = explain(text["log"])
        first = answer["explanations"][0] if answer["explanations"] else None
        results.append(
            {
                "half": text["half"],
                "family": text["family"],
                "address": text["address"],
                "expected": text["expect"] or [text["exception"] or f"unknown: {text['family']}"],
                "answer": first and first["id"],
                "verdict": judge(text, answer),
            }
        )
    return results


# -- logs without an error ------------------------------------------------------------------------


def clean() -> list[Record]:
    results = []
    for log in read("clean.toml", "log"):
        answer = explain(log["log"])
        told = answer["explanations"]
        results.append(
            {
                "half": log["half"],
                "kind": log["kind"],
                "address": log["address"],
                "alarms": [e["id"] for e in told if e.get("role", "cause") in CAUSES],
                "suspected": [line["text"] for line in answer.get("unknown", [])],
            }
        )
    return results


# -- logs asked once -------------------------------------------------------------------------------


def blind() -> Record:
    """What the first answers were, and what the answers are since the tables learned from them."""
    results = []
    for path in sorted(MATERIAL.glob("blind_*.toml"), key=lambda p: int(p.stem.split("_")[1])):
        for log in tomllib.loads(path.read_text(encoding="utf-8"))["log"]:
            first = next(iter(explain(log["log"])["explanations"]), None)
            named = first["id"] if first and names_a_cause(first) else ""
            expected = first["id"] in log["expect"] if first else False
            is_right = expected or (not log["expect"] and not named)
            unknown = named.startswith("unknown-") or not named
            now = "right" if is_right else "unknown" if unknown else "other"
            asked = {key: log.get(key, "") for key in ("id", "group", "first", "kind")}
            answer = first and [first["id"], first["confidence"]]
            results.append({"set": path.stem, **asked, "now": now, "answer": answer})
    sums: dict[str, dict[str, Counter[str]]] = {}
    for result in results:
        whole = [] if result["group"] == "clean" else [result["set"]]
        for part in (*whole, f"{result['set']}, {result['group']}"):
            for key in ("first", "now", "kind"):
                sums.setdefault(part, {}).setdefault(key, Counter()).update([result[key]])
    return {"summary": sums, "results": results}


# -- files ----------------------------------------------------------------------------------------


def counted(entry: Record, findings: Iterable[Record]) -> int:
    """How many of a file's findings are what this entry expects."""
    total = 0
    for finding in findings:
        shown = f"{finding.get('id', '')} {finding['old']}"
        named = finding.get("id") == entry["id"] if entry["id"] else False
        matched = any(word in shown for word in entry.get("match", []))
        total += int(finding.get("count") or 1) if named or matched else 0
    return total


def extra(file: Record, findings: Iterable[Record]) -> list[str]:
    """The ids of findings that nothing in the file's entry speaks of."""
    known = {entry["id"] for entry in file["find"]} | set(file["may"])
    words = [word for entry in file["find"] for word in entry.get("match", [])]
    result = []
    for finding in findings:
        shown = f"{finding.get('id', '')} {finding['old']}"
        if finding.get("id") not in known and not any(word in shown for word in words):
            result.append(f"{finding['line']}: {finding.get('id') or finding['old']}")
    return result


def judge_file(file: Record, findings: Sequence[Record]) -> Record:
    """Findings that are right, too many, and missed."""
    right, false, missed = 0, extra(file, findings), []
    for entry in file["find"]:
        found = counted(entry, findings)
        most = entry.get("most", entry["count"])
        right += min(found, most)
        name = entry["id"] or entry["match"][0]
        false += [name] * max(0, found - most)
        missed += [name] * max(0, entry["count"] - found)
    path = f"{file['repository']}/{file['path']}"
    return {"half": file["half"], "path": path, "right": right, "false": false, "missed": missed}


def files(folder: Path) -> tuple[list[Record], list[str]]:
    """The files that are there, judged, and the paths of those that are not."""
    entries = {folder / f["repository"] / f["path"]: f for f in read("files.toml", "file")}
    there = {path: file for path, file in entries.items() if path.is_file()}
    missing = [str(path.relative_to(folder)) for path in entries if path not in there]
    if not there:
        return [], missing
    answer = doctor(*map(str, there))
    by_path: dict[Path, list[Record]] = {path: [] for path in there}
    for finding in answer["findings"]:
        by_path[Path(finding["path"]).absolute()].append(finding)
    return [judge_file(file, by_path[path]) for path, file in there.items()], missing


# -- sums -----------------------------------------------------------------------------------------


def share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def sum_texts(results: Sequence[Record]) -> Record:
    verdicts = Counter(r["verdict"] for r in results)
    counts = {verdict: verdicts[verdict] for verdict in ("right", "wrong", "unknown")}
    return {"texts": len(results), **counts, "right_share": share(counts["right"], len(results))}


def sum_clean(results: Sequence[Record]) -> Record:
    alarms = sum(bool(r["alarms"]) for r in results)
    return {
        "logs": len(results),
        "false_alarms": alarms,
        "with_suspected_lines": sum(bool(r["suspected"]) for r in results),
    }


def sum_files(results: Sequence[Record]) -> Record:
    right = sum(r["right"] for r in results)
    false = sum(len(r["false"]) for r in results)
    missed = sum(len(r["missed"]) for r in results)
    return {
        "files": len(results),
        "right": right,
        "false": false,
        "missed": missed,
        "precision": share(right, right + false),
        "recall": share(right, right + missed),
    }


SUMS = {"texts": sum_texts, "clean": sum_clean, "files": sum_files}


def summary(results: dict[str, list[Record]]) -> Record:
    """Every set's sums, for each half."""
    return {
        name: {of: SUMS[name]([r for r in entries if r["half"] == of]) for of in HALVES}
        for name, entries in results.items()
    }


def family_sums(results: Sequence[Record]) -> Record:
    families: dict[str, Counter[str]] = {}
    for result in results:
        families.setdefault(result["family"], Counter())[result["verdict"]] += 1
    return {family: dict(counts) for family, counts in sorted(families.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=Path, help="the folder with the fetched files")
    parser.add_argument("--blind", action="store_true", help="ask about the blind sets")
    parser.add_argument("--out", type=Path, help="write all answers here, as JSON")
    parser.add_argument(
        "--learn-only", action="store_true", help="hide the measured half's answers"
    )
    options = parser.parse_args()
    if options.blind:
        found = blind()
        if options.out:
            write_result(options.out, found)
        print(json.dumps(found["summary"], indent=1))
        return
    results: dict[str, list[Record]] = {"texts": texts(), "clean": clean()}
    missing: list[str] = []
    if options.files:
        results["files"], missing = files(options.files.absolute())
    sums = summary(results)
    shown = {
        name: [r for r in entries if not options.learn_only or r["half"] == "learn"]
        for name, entries in results.items()
    }
    whole = {
        "summary": sums,
        "families": family_sums(shown["texts"]),
        "missing_files": missing,
        "results": shown,
    }
    if options.out:
        write_result(options.out, whole)
    print(json.dumps({"summary": sums, "missing_files": missing}, indent=1))


if __name__ == "__main__":
    main()
