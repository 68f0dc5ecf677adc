"""What the values around an exception say: keys, files, tensors of the model."""

import re
from pathlib import Path

from tpukit.probe.logs.particulars import CREATING
from tpukit.probe.logs.place import source
from tpukit.probe.logs.place.lost import Advice
from tpukit.probe.logs.tracebacks import Raised

_KEYS = re.compile(r"dict\((.*?)(, \.\.\.)?\)")
_ARRAY = re.compile(r"\w+\([\d, ]*\) (?:torch|[a-z]+\d)")
_MOST_LISTED = 8
_MOST_KEYS = 15
_MOST_TENSORS = 6


def values(raised: Raised) -> Advice | None:
    """What the frames' values, or the disk, say of an exception."""
    kinds = {"KeyError": _key, "FileNotFoundError": _file, "OSError": _file}
    found = kinds[raised.class_name](raised) if raised.class_name in kinds else None
    return found or _tensors(raised)


def _key(raised: Raised) -> Advice | None:
    key = raised.message.strip("'\"")
    for frame in raised.frames[:-4:-1]:
        for name, text in frame.names.items():
            match = _KEYS.match(text)
            is_read = re.search(rf"(?<![\w.]){re.escape(name)}(?:\[|\.pop\()", frame.code)
            if match is None or not (is_read or name == "self.data"):
                continue
            keys = re.findall(r"'([^']*)'|([\w.]+)", match[1])
            has = [first or second for first, second in keys]
            if key in has:
                continue
            listed = ", ".join(f"`{each}`" for each in has[:_MOST_KEYS]) or "no keys"
            more = " and others" if match[2] or len(has) > _MOST_KEYS else ""
            why = f"`{name}` in {frame.place} has {listed}{more}, and no `{key}`."
            return Advice(why, f"Read one of these, or give `{name}` the key `{key}`.")
    return None


def _file(raised: Raised) -> Advice | None:
    match = re.search(r"['\"]([^'\"]+)['\"]", raised.message)
    user = raised.users_frame
    if match is None or "Errno 2" not in raised.message:
        return None
    folder = Path(match[1])
    if not folder.is_absolute() and user is None:
        return None
    missing = folder
    while not folder.exists() and folder != folder.parent:
        missing, folder = folder, folder.parent
    if folder == Path(match[1]) or not folder.is_dir():
        return None
    codes = [frame.code for frame in raised.frames if frame.code]
    if missing != Path(match[1]) and any(CREATING.search(code) for code in codes):
        why = f"The folder `{missing}` in which it is to be made does not exist."
        return Advice(why, f"`mkdir -p {Path(match[1]).parent}` before it.")
    there = sorted(path.name for path in folder.iterdir())
    listed = ", ".join(f"`{name}`" for name in there[:_MOST_LISTED]) or "nothing"
    more = f" and {len(there) - _MOST_LISTED} more" if len(there) > _MOST_LISTED else ""
    where = "The working directory" if folder == Path() else f"`{folder}`"
    why = f"{where} has no `{missing.name}`; it has {listed}{more}."
    return Advice(
        why, f"Correct the path{f' in {user.place}' if user else ''}, or put the file there."
    )


def _tensors(raised: Raised) -> Advice | None:
    """Shapes, dtypes and devices in the innermost frames, and the model's module."""
    if not raised.frames or source.smallest_raise(raised.frames[-1].path, raised.frames[-1].line):
        return None
    inner = raised.frames[-1]
    module = next((f for f in reversed(raised.frames) if f.module), None)
    said = []
    if module is not None:
        said.append(f"It is the model's `{module.module}`, {module.names.get('self', '')}")
    for frame in dict.fromkeys((inner.place, (raised.users_frame or inner).place)):
        of_frame = next(f for f in reversed(raised.frames) if f.place == frame)
        arrays = {n: v for n, v in of_frame.names.items() if _ARRAY.match(v) and n.count(".") < 2}
        if arrays:
            shown = ", ".join(f"`{n}` {v}" for n, v in list(arrays.items())[:_MOST_TENSORS])
            said.append(f"{frame} has {shown}")
    return Advice(f"{'. '.join(said)}.", "", leads=False) if said else None
