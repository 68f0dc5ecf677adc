"""Attacks on tpukit, by number: seeded, resumable, each one reproduced by one command.

    PYTHONPATH=.:scripts:tests/support python -m campaign [--folder DIR] [--only KIND] [--number N]

Without --number all attacks run that DIR/results.jsonl does not record yet. Prints the counts, and
of each failure the command that repeats it.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaign.damage import damage
from campaign.processes import kill, two_writers
from campaign.readers import EXAMPLES, fuzz
from campaign.resources import UnavailableError, own_mounts, starve
from tpukit.train.run_folder import versions

ATTACKS: dict[str, tuple[Callable[[int], None], int]] = {
    "fuzz": (fuzz, 1000),  # EXAMPLES inputs each
    "damage": (damage, 1000),
    "kill": (kill, 200),
    "starve": (starve, 60),
    "two-writers": (two_writers, 20),
}
"""Each kind with how many there are."""
COMMAND = "PYTHONPATH=.:scripts:tests/support python -m campaign"


def attack(kind: str, number: int) -> str:
    """What went wrong, in one line; empty where nothing did.

    Raises:
        UnavailableError: this machine lacks what the attack needs.
    """
    try:
        ATTACKS[kind][0](number)
    except (KeyboardInterrupt, UnavailableError):
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return ""


def main() -> int:
    parse = argparse.ArgumentParser()
    parse.add_argument("--folder", type=Path, default=Path("campaign"))
    parse.add_argument("--only", choices=ATTACKS)
    parse.add_argument("--number", type=int)
    parse.add_argument("--most", type=int, help="attacks of each kind")
    parse.add_argument("--seconds", type=float, default=math.inf, help="then no more are begun")
    parse.add_argument("--write", type=Path, help="a JSON file for the counts")
    asked = parse.parse_args()
    _as_in_a_terminal()
    _keep_output()
    own_mounts()
    if asked.number is not None:
        failure = attack(asked.only, asked.number)
        print(failure or "no failure")
        return bool(failure)
    asked.folder.mkdir(parents=True, exist_ok=True)
    results = asked.folder / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    known = {(row["kind"], row["number"]): row["failure"] for row in map(json.loads, lines)}
    until = time.monotonic() + asked.seconds
    with results.open("a") as file:
        for kind, number in _planned(asked.only, asked.most):
            if (kind, number) in known or time.monotonic() > until:
                continue
            started = time.monotonic()
            try:
                known[kind, number] = failure = attack(kind, number)
            except UnavailableError as reason:
                print(f"{kind} {number} is not made here: {reason}")
                continue
            row = {"kind": kind, "number": number, "failure": failure,
                   "seconds": round(time.monotonic() - started, 2)}  # fmt: skip
            print(json.dumps(row), file=file, flush=True)
    if asked.write:
        asked.write.write_text(json.dumps(_counts(known), indent=2) + "\n")
    return _report(known)


def _as_in_a_terminal() -> None:
    """What a shell or nohup lets its background jobs ignore would not stop a command."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _keep_output() -> None:
    """Descriptor 1 is the attacked commands'; what is printed here goes to standard output."""
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _counts(known: dict[tuple[str, int], str]) -> dict[str, Any]:
    """What docs/results.md shows: for each kind attacks made, failures, attacks planned."""
    done = Counter(kind for kind, _ in known)
    failed = Counter(kind for (kind, _), failure in known.items() if failure)
    kinds = {
        kind: {"attacks": done[kind], "failures": failed[kind], "planned": planned}
        for kind, (_, planned) in ATTACKS.items()
    }
    kinds["fuzz"]["inputs"] = done["fuzz"] * EXAMPLES
    return {"kinds": kinds, "versions": versions()}


def _planned(only: str | None, most: int | None) -> Iterator[tuple[str, int]]:
    for kind, (_, count) in ATTACKS.items():
        if only in (None, kind):
            yield from ((kind, number) for number in range(min(count, most or count)))


def _report(known: dict[tuple[str, int], str]) -> int:
    failures = {place: failure for place, failure in known.items() if failure}
    done, failed = Counter(kind for kind, _ in known), Counter(kind for kind, _ in failures)
    for kind in done:
        print(f"{kind}: {done[kind]} attacks, {failed[kind]} failures")
    for (kind, number), failure in failures.items():
        print(f"{failure}\n  {COMMAND} --only {kind} --number {number}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
