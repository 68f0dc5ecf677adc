"""The child process of `doctor`: it answers what a device can do, and may crash or hang.

Started by `tpukit.hardware.launch.child` with KIND HW DESCRIPTOR PARENT as its arguments. A
question names a method of `DeviceParts` (or `HostParts`) and its arguments; the answer has
`message`, `values` and perhaps `warning` (what to know although nothing failed), or `error` and
`fix`.
"""

import importlib
import json
import os
import sys
from typing import Any

from tpukit.errors import TpukitError
from tpukit.io.process import die_with_parent
from tpukit.probe.logs.matching import explain_text


def main(kind: str, hw: str, descriptor: int, parent: int) -> int:
    """Answers until standard input ends."""
    die_with_parent(parent)
    parts: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["part"] == "starts":
                answer = {"message": f"torch {importlib.import_module('torch').__version__}"}
            else:
                parts = parts or _parts(kind, hw)
                answer = getattr(parts, question.pop("part"))(**question)
        except Exception as error:
            message, fix = explained(error)
            answer = {"error": message, "fix": fix}
        os.write(descriptor, (json.dumps(answer, default=str) + "\n").encode())
    return 0


def _parts(kind: str, hw: Any) -> Any:
    # Imported within a question's answer: torch's import may fail.
    if kind == "host":
        from tpukit.probe.machine.host_parts import HostParts

        return HostParts(hw)
    from tpukit.probe.machine.device_parts import DeviceParts

    return DeviceParts(hw, kind)


def explained(error: Exception) -> tuple[str, str]:
    """The message and the hint for an error."""
    if isinstance(error, TpukitError):
        return error.message, error.hint or "tpukit doctor --quick"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    known = explain_text(text)
    if known is None:
        return text[:300], "tpukit doctor --quick    # versions and who holds the device"
    return f"{text[:160]}: {known.cause}", known.fix


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
