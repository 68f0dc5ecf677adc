"""Checks: functions from facts to a verdict. The docstring is the label, a failure carries the
command that fixes it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tpukit.probe.machine.facts import Facts

Status = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Verdict:
    """A check's answer."""

    status: Status
    message: str
    fix: str | None = None
    """A command, for a warning or a failure."""


@dataclass(frozen=True)
class CheckOptions:
    """The user's options of the checks."""

    hw: Literal["auto", "tpu", "gpu", "cpu"] = "auto"
    live_seconds: float = 120.0
    """Time limit of the check that opens the device."""


Check = Callable[[Facts, CheckOptions], Verdict]


@dataclass(frozen=True)
class Result:
    """A verdict and the check it came from."""

    id: str
    label: str
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        """The fields that `doctor --json` promises, and the label."""
        verdict = self.verdict
        return {
            "id": self.id,
            "status": verdict.status,
            "message": verdict.message,
            "fix": verdict.fix,
            "label": self.label,
        }


def passed(message: str) -> Verdict:
    return Verdict("pass", message)


def warned(message: str, fix: str) -> Verdict:
    return Verdict("warn", message, fix)


def failed(message: str, fix: str) -> Verdict:
    return Verdict("fail", message, fix)


def skipped(message: str) -> Verdict:
    return Verdict("skip", message)


def run_check(check: Check, facts: Facts, options: CheckOptions) -> Result:
    """A check's result; a check that breaks is a failure of its own, the others still run."""
    label = (check.__doc__ or check.__name__).strip().split("\n")[0].rstrip(".")
    name = check.__name__.replace("_", "-")
    try:
        return Result(name, label, check(facts, options))
    except Exception as error:
        message = f"the check itself failed: {type(error).__name__}: {error}"
        return Result(name, label, failed(message, "tpukit doctor --debug --report"))


def worst(verdicts: Iterable[Verdict], otherwise: Verdict) -> Verdict:
    """Several problems as one verdict: the worst status, every message and every fix."""
    problems = [v for v in verdicts if v.status in ("warn", "fail")]
    if not problems:
        return otherwise
    status: Status = "fail" if any(v.status == "fail" for v in problems) else "warn"
    fixes = dict.fromkeys(v.fix for v in problems if v.fix)
    return Verdict(status, "; ".join(v.message for v in problems), "\n".join(fixes))
