"""Operations that would leave the TPU in the middle of a step: what, where, and what instead."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Mapping, Sequence

from tpukit.errors import JobError
from tpukit.probe.compiler.source_map import SourceLine

HIDDEN_EXECUTION = (
    "Unexpected execution happens inside the compiled function",
    "its data is not allocated yet",
)
"""torch_xla's text, and torch's of an operator that wants the memory of a tensor on the CPU."""

DEPENDS_ON_VALUES = (
    "Its size depends on values: keep the shape, with torch.where or times the mask instead of"
    " `x[mask]`, or do it in the dataset."
)
INSTEAD: Mapping[str, str] = {
    "_local_scalar_dense": "Keep it a tensor: torch.where instead of `if`, no `.item()`, `float()`"
    " or `bool()` of one in the model or the loss; give F.one_hot its num_classes.",
    "nonzero": DEPENDS_ON_VALUES,
    "masked_select": DEPENDS_ON_VALUES,
    "_unique": DEPENDS_ON_VALUES,
    "unique": DEPENDS_ON_VALUES,
    "repeat_interleave": DEPENDS_ON_VALUES,
    "equal": "Compare with torch.eq, or after the step.",
    "_fft": "Multiply by a matrix of cosines and sines instead.",
    "": "XLA lacks it: write it with other operators, or compute it in the dataset.",
}
"""Beginning of an operator's name -> what to write instead."""

READING = re.compile(r"\bprint\(|\.(?:numpy|cpu|tolist)\(")
READ_INSTEAD = (
    "It reads the tensor's values: leave it out, compute with tensors, and return what is to be"
    " logged from `loss`."
)

LIBRARY = ("/site-packages/", "/dist-packages/")
TOOLS = (*(f"{place}{name}/" for place in LIBRARY for name in ("torch", "torch_xla", "functorch")),
         "/tpukit/train/", "/tpukit/hardware/", "/tpukit/probe/", "<")  # fmt: skip
"""Parts of paths of tools, which are not the model's code."""

FORWARD_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n    (\S.*))?')
FORWARD_STACK = "Error detected in "
"""Beginning of torch's warning with the forward stack of a failed gradient."""


def forward_frames(recorded: Sequence[warnings.WarningMessage]) -> list[traceback.FrameSummary]:
    """The forward stack of the gradient that failed, from torch's warning about it."""
    texts = [str(w.message) for w in recorded if str(w.message).startswith(FORWARD_STACK)]
    return [
        traceback.FrameSummary(match[1], int(match[2]), match[3], line=match[4] or "")
        for match in FORWARD_FRAME.finditer("\n".join(texts[:1]))
    ]


def leaving_error(left: Sequence[str], frames: Sequence[traceback.FrameSummary]) -> JobError:
    """Names the operators that left and the model's line: a library's with the user's.

    frames: the stack, the innermost last.
    """
    name = " and ".join(left) or "an operation"
    inner = [f for f in frames if _is_model(f.filename)] or list(frames[-1:])
    place = _place(inner[-1])
    own = [f for f in inner if SourceLine(f.filename, f.lineno or 0).is_model_code]
    if own and own[-1] is not inner[-1]:
        place += f", called at {_place(own[-1])}"
    operator = left[0].removeprefix("aten::") if left else ""
    instead = next(text for start, text in INSTEAD.items() if operator.startswith(start))
    if READING.search(own[-1].line or "" if own else ""):
        instead = READ_INSTEAD
    return JobError(
        f"{name} would leave the TPU in the middle of the step, at {place}.",
        instead,
        id="leaves-device",
    )


def _is_model(path: str) -> bool:
    standard = "/lib/python3" in path and not any(part in path for part in LIBRARY)
    return not standard and not any(part in path for part in TOOLS)


def _place(frame: traceback.FrameSummary) -> str:
    source = f": `{frame.line}`" if frame.line else ""
    return f"{frame.filename}:{frame.lineno}{source}"
