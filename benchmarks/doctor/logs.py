"""`tpukit doctor --explain` on logs that nobody here wrote (benchmarks/doctor/material/).

blind_4.toml to blind_17.toml hold logs with the answer that doctor gave the first time it was asked
(`first`, judged by a person); texts.toml has error texts of public threads with the cause that must
be named first, clean.toml logs without an error, of which no cause may be named.

    PYTHONPATH=benchmarks python benchmarks/doctor/logs.py --out answers.json
"""

import argparse
import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from recorded import write_result

from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs.explain import LogExplainer, unpack
from tpukit.probe.logs.explanations import Explanation
from tpukit.probe.logs.log_text import clean_lines

MATERIAL = Path(__file__).with_name("material")
Record = dict[str, Any]


def explained(log: str) -> list[Explanation]:
    """The explanations of a log, the first cause first."""
    explainer = LogExplainer(known_errors())
    explainer.feed(list(clean_lines(unpack(list(enumerate(log.splitlines(), start=1))))))
    return explainer.explanations()


def judged(log: Record, found: list[Explanation]) -> str:
    """right, unknown (no family is named) or other."""
    first = found[0] if found and found[0].role == "cause" else None
    if first is None:
        return "unknown" if log["expect"] or log.get("at") else "right"
    said = f"{first.cause} {first.fix}".lower()
    if any(word.lower() in said for word in log.get("bad", ())):
        return "other"
    if first.id in log["expect"]:
        return "right"
    is_on_line = any(part in first.text for part in log.get("at", ()))
    words = [*log.get("words", ()), "" if log["expect"] else log.get("exception", "")]
    if is_on_line and any(word.lower() in said for word in words if word):
        return "right"
    return "unknown" if first.id.startswith("unknown-") else "other"


def asked(path: Path) -> list[Record]:
    """What doctor answers to the logs of one set."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    results = []
    for log in table.get("log") or table["text"]:
        found = explained(log["log"])
        first = [found[0].id, found[0].confidence] if found else None
        about = {key: log[key] for key in ("id", "group", "first", "kind", "address") if key in log}
        verdict = judged({"expect": [], **log}, found)
        results.append({"set": path.stem, **about, "now": verdict, "answer": first})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write all answers here, as JSON")
    options = parser.parse_args()
    sets = [MATERIAL / "texts.toml", MATERIAL / "clean.toml", *MATERIAL.glob("blind_*.toml")]
    results = [result for path in sets for result in asked(path)]
    sums: dict[str, dict[str, Counter[str]]] = {}
    for result in results:
        part = f"{result['set']}, {result['group']}" if "group" in result else result["set"]
        for key in ("first", "now"):
            if key in result:
                sums.setdefault(part, {}).setdefault(key, Counter()).update([result[key]])
    if options.out:
        write_result(options.out, {"summary": sums, "results": results})
    print(json.dumps(sums, indent=1))


if __name__ == "__main__":
    main()
