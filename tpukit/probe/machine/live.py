"""The checks that start torch: in a child process with a time limit, so that nothing can hang."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpukit.hardware.launch.child import Child, ChildDiedError, Death
from tpukit.probe.machine.facts import Facts
from tpukit.probe.machine.verdict import (
    CheckOptions,
    Result,
    Verdict,
    failed,
    passed,
    skipped,
    warned,
)

STEPS = {
    "torch-starts": ("torch can be imported", "starts"),
    "device-opens": ("The device opens", "opens"),
    "matrix-product": ("A matrix product in fp32 and bf16 agrees with float64", "products"),
    "training-step": ("A step of the engine runs", "two_steps"),
}
"""Name of each check -> its label, and what the child is asked."""
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}
CHILD = ("-m", "tpukit.probe.machine.child")


def run_live_checks(
    facts: Facts, options: CheckOptions, command: Sequence[str] = CHILD
) -> Iterator[Result]:
    """Asks the child; where it sends no answer the check has failed, and those behind it are not
    tried.

    The child and everything it started is killed at the time limit.
    """
    if facts.version("torch") is None:
        for name, (label, _) in STEPS.items():
            yield Result(name, label, skipped("torch is not installed"))
        return
    has_failed = False
    deadline = time.monotonic() + options.live_seconds
    with Child(ENVIRONMENT, (*command, "live", options.hw)) as child:
        for name, (label, part) in STEPS.items():
            verdict = skipped("not tried: a step before it failed")
            if not has_failed:
                child.send({"part": part})
                try:
                    verdict = verdict_of(child.receive(deadline))
                except ChildDiedError as error:
                    why = reason_of(error.death, options.live_seconds)
                    verdict = failed(why, _way_on(why, options))
                has_failed = verdict.status == "fail"
            yield Result(name, label, verdict)
        child.finish()


def verdict_of(answer: Mapping[str, Any], fix: str = "") -> Verdict:
    """The verdict of a child's answer; fix: of an error without one."""
    if "error" in answer:
        return failed(answer["error"], answer["fix"] or fix)
    if answer.get("skip"):
        return skipped(answer["message"])
    if "warning" in answer:
        return warned(answer["message"], answer["warning"])
    return passed(answer["message"])


def _way_on(reason: str, options: CheckOptions) -> str:
    if "no answer" in reason:
        return (
            f"tpukit doctor --quick --hw {options.hw}    # who holds the device; then try with "
            "TPU_SKIP_MDS_QUERY=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 set"
        )
    return f"tpukit doctor --quick --hw {options.hw}    # what the versions and the device say"


def reason_of(death: Death, seconds: float) -> str:
    """Reason why a child sent no answer."""
    if death.return_code is None:
        return f"no answer within {seconds:g} s"
    from tpukit.probe.logs.matching import explain_text

    known = explain_text(death.output)
    said = f"{known.cause} {known.fix}" if known else death.last_line
    return f"the process {death.describe()}: {said}"
