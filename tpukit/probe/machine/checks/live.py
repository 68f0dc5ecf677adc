"""The checks that start torch: in a child process with a time limit, so that nothing can hang."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpukit.hardware.launch.child import Child, ChildDiedError, Death
from tpukit.probe.machine import Facts
from tpukit.probe.machine.checks.verdict import CheckOptions, Result, Verdict, failed, skipped

STEPS = {
    "torch-starts": "torch can be imported",
    "device-opens": "The device opens",
    "matrix-product": "A matrix product in fp32 and bf16 agrees with float64",
    "training-step": "A step of the engine runs",
}
CHILD = "tpukit.probe.machine.checks.live_child"


def run_live_checks(facts: Facts, options: CheckOptions) -> Iterator[Result]:
    """Starts the child; a result that it does not send is a failed or a skipped check."""
    if facts.version("torch") is None:
        for name, label in STEPS.items():
            yield Result(name, label, skipped("torch is not installed"))
        return
    waiting, has_failed = dict(STEPS), False
    for answer in child_results(("-m", CHILD, options.hw), options.live_seconds):
        name = str(answer.get("id"))
        if name in waiting:
            verdict = Verdict(answer["status"], str(answer["message"]), answer.get("fix"))
            has_failed = has_failed or verdict.status == "fail"
            yield Result(name, waiting.pop(name), verdict)
        elif name == "end":
            yield from _unanswered(waiting, "" if has_failed else str(answer["message"]), options)
            return


def _unanswered(waiting: Mapping[str, str], reason: str, options: CheckOptions) -> Iterator[Result]:
    """The step that the child stopped in has failed; those behind it were not tried."""
    for index, (name, label) in enumerate(waiting.items()):
        if index or not reason:
            yield Result(name, label, skipped("not tried: a step before it failed"))
        else:
            yield Result(name, label, failed(reason, _way_on(reason, options)))


def _way_on(reason: str, options: CheckOptions) -> str:
    if "no answer" in reason:
        return (
            f"tpukit doctor --quick --hw {options.hw}    # who holds the device; then try with "
            "TPU_SKIP_MDS_QUERY=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 set"
        )
    return f"tpukit doctor --quick --hw {options.hw}    # what the versions and the device say"


def child_results(command: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """The results that a child sends; at last `{"id": "end", "message": ...}` with the reason for
    its end, empty where it ended well.

    The child and everything it started is killed at the time limit.
    """
    deadline = time.monotonic() + seconds
    with Child({"PYTHONFAULTHANDLER": "1"}, command) as child:
        while True:
            try:
                answer = child.receive(deadline)
            except ChildDiedError as error:
                yield {"id": "end", "message": reason_of(error.death, seconds)}
                return
            yield answer


def reason_of(death: Death, seconds: float) -> str:
    """Reason why a child sent no result; empty where it ended well."""
    if death.return_code == 0:
        return ""
    if death.return_code is None:
        return f"no answer within {seconds:g} s"
    from tpukit.probe.logs.matching import explain_text

    known = explain_text(death.output)
    lines = (line.strip() for line in reversed(death.output.split("\n")))
    said = f"{known.cause} {known.fix}" if known else next(filter(None, lines), "")[:200]
    return f"the process {death.describe()}: {said}"
