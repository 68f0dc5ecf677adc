"""Maps operations to lines of source: a trace's call stacks reduced to the model's own line.

What would leave the TPU in the middle of a step is named that way, with what to write instead.
"""

import re
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpukit.errors import JobError
from tpukit.io.code_owner import is_model_code, owner_of

FILE = re.compile(r'^(#loc\d+) = loc\("([^"]*)":(\d+):\d+\)$', re.MULTILINE)
NAMED = re.compile(r'^(#loc\d+) = loc\("([^"]*)"\((#loc\d+)\)\)$', re.MULTILINE)
FRAME = re.compile(r'^(#loc\d+) = loc\("[^"]*"\((#loc\d+)\)\)$', re.MULTILINE)
CALL = re.compile(r"^(#loc\d+) = loc\(callsite\((#loc\d+) at (#loc\d+)\)\)$", re.MULTILINE)


class SourceLine(NamedTuple):
    """A line of source."""

    path: str
    line: int


def model_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The model's innermost frame in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (f for f in reversed(frames) if is_model_code(f.filename))
    return next(own, None)


def resolve_places(module: str) -> str:
    """A StableHLO module's text with each call stack replaced by one place.

    torch_xla records the whole Python stack of each operation; the compiler keeps the innermost
    frame alone, which is a line of torch. The innermost frame of the model's own is kept instead,
    where there is one (a backward pass runs outside all of them).
    """
    files = {match[1]: SourceLine(match[2], int(match[3])) for match in FILE.finditer(module)}
    calls = list(CALL.finditer(module))
    inner = {match[1]: match[2] for match in (*FRAME.finditer(module), *calls)}
    caller = {match[1]: match[3] for match in calls}

    def resolve(match: re.Match[str]) -> str:
        place = _place(match[1], files, inner, caller)
        return f'{match[1]} = loc("{place.path}":{place.line}:0)' if place else match[0]

    return CALL.sub(resolve, module)


def located_operations(module: str) -> list[tuple[str, str | None]]:
    """Each operation of a StableHLO module's text, and where it is one of the model's lines:
    `aten::view, at model.py:12`."""
    text = resolve_places(module)
    files = {match[1]: SourceLine(match[2], int(match[3])) for match in FILE.finditer(text)}
    named = {match[1]: (match[2], match[3]) for match in NAMED.finditer(text)}

    def place(at: str) -> str | None:
        operator = ""
        while at in named:
            name, at = named[at]
            operator = operator or name.rpartition("/")[2].replace("__", "::")
        line = files.get(at)
        return (
            f"{operator}, at {line.path}:{line.line}" if line and is_model_code(line.path) else None
        )

    lines = (line.rpartition(" loc(") for line in text.splitlines() if not line.startswith("#"))
    return [(operation, place(at.rstrip(")"))) for operation, _, at in lines if "=" in operation]


def _place(
    name: str, files: Mapping[str, SourceLine], inner: Mapping[str, str], caller: Mapping[str, str]
) -> SourceLine | None:
    """The model's innermost frame of a call stack, else the innermost of all."""
    innermost: SourceLine | None = None
    call: str | None = name
    while call is not None:
        frame = inner[call] if call in caller else call
        while frame in inner:
            frame = inner[frame]
        place = files.get(frame)
        if place and is_model_code(place.path):
            return place
        innermost = innermost or place
        call = caller.get(call)
    return innermost


# -- operations that would leave the device --------------------------------------------------------
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

TOOLS = tuple(f"-packages/{name}/" for name in ("torch", "torch_xla", "functorch"))
"""Parts of paths of libraries that are not the model's code."""

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
    place = _line_of(inner[-1])
    own = [f for f in inner if is_model_code(f.filename)]
    if own and own[-1] is not inner[-1]:
        place += f", called at {_line_of(own[-1])}"
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
    return owner_of(path) not in ("python", "tpukit") and not any(part in path for part in TOOLS)


def _line_of(frame: traceback.FrameSummary) -> str:
    source = f": `{frame.line}`" if frame.line else ""
    return f"{frame.filename}:{frame.lineno}{source}"
