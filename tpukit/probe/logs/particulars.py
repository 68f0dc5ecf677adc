"""What a traceback names beside the exception: who raised it, who asked, which value and line."""

import difflib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpukit.knowledge.error_table import KnownError, line_forms
from tpukit.knowledge.releases import Lost, libraries, lost_name, owner
from tpukit.knowledge.versions import installed_versions
from tpukit.probe.logs.explanations import shorten
from tpukit.probe.logs.tracebacks import Frame, Raised

_TERM = r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+|\[[^\[\]]{0,60}\]|\([^()]{0,60}\))*?"
"""A name with its attributes, subscripts and calls, the shortest that fits."""
_LOOKUPS = {"__getattr__", "__getitem__", "__getattribute__", "__missing__", "get_loc"}
"""Methods that read a value for their caller."""
_PASSING = set(line_forms()["words"]["passing"])
_FAULTS = set(line_forms()["words"]["faults"])
"""What Python itself raises: no refusal that somebody wrote."""
CREATING = re.compile(
    r"\b(?:mkdir|savefig|save|to_csv|to_json|write_\w+|imwrite|open\(.*['\"][wax])"
)
"""Calls that make the file that they name."""
_MOST_TERMS = 3
_NONE_FORMS = {
    "subscriptable": rf"({_TERM})\[", "callable": rf"({_TERM})\(",
    "has no len": rf"len\(({_TERM})\)",
    "iterable": rf"\bin ({_TERM})(?::|$|\])|= ({_TERM})$|\*({_TERM})[,)]",
}  # fmt: skip
"""Forms of the code that reads the value, by words of the message."""

_NAMED = {name: re.compile(form) for name, form in line_forms()["named"].items()}
"""What a message of any class may name."""
_LISTED = re.compile(
    r"['\"`](?P<value>[\w.-]{2,60})['\"`](?!.*['\"`]\s+(?:is|was)\s+(?:one|in)\b)[\s\S]{0,120}?"
    r"\b(?:one of|choose from|choices|available|supported|allowed|valid|known|options|following)\b"
    r"[^:\[({]{0,60}[:\[({]\s*(?P<names>[\s\S]{3,1500})",
    re.IGNORECASE,
)
"""A value that is refused, and the list of those that are taken."""
_LIST = re.compile(r"\[[^\[\]]*,[^\[\]]*\]")
_ROOT = re.compile(r".*?[/\\](?:site|dist)-packages(?=[/\\])")
_NAMED_FILE = re.compile(r"\((/[^()\n]{3,400}\.py)\)$")
"""The file of a module, as an ImportError names it."""


def particulars(
    raised: Raised, captures: Mapping[str, str], entry: KnownError, releases: Mapping[str, str]
) -> dict[str, str]:
    """What the message named (`captures`), and beside it what the frames and the log's lines about
    releases name: `raiser`, `asker`, `user`, `at`, `expression`, `reader`, `lost`, `remedy` ..."""
    raiser = raised.frames[-1].package if raised.frames else raised.name.rpartition(".")[0]
    raiser = raiser.partition(".")[0]
    version = f" {releases[raiser]}" if raiser in releases else ""
    found = {"raiser": f"`{raiser}`{version}" if raiser else "the program", "importer": raiser}
    said = f"{raised.message[:2000]}\n{raised.details}"
    found |= {name: m[name] for name, form in _NAMED.items() if (m := form.search(said))}
    # One of the values that a message lists is no setting to change.
    alone = _NAMED["setting"].search(_LIST.sub("[]", said))
    found["setting"] = alone["setting"] if alone else ""
    found |= {**captures} | ({"module": entry.place} if entry.place else {})
    found["native"] = raised.native_call
    found["pip"] = _pip(found.get("name", "").partition(".")[0])
    if user := raised.users_frame:
        found["user"] = found["own"] = user.place
    elif not raised.frames:
        found["own"] = "that line"
    if raised.frames:
        found["at"] = raised.frames[-1].place
        code = raised.frames[-1].code
        found["code"] = "" if code.startswith(("raise ", "assert ")) else code
        asserted = re.match(r"assert (.+?)(?:, f?[\"'].*)?$", code)
        found["condition"] = asserted[1] if asserted else ""
    found |= _file_asked_for(raised, found) | _nearest(raised)
    if value := next(_values(raised, captures.get("name", "")), None):
        found["expression"], frame = value
        found["reader"] = f"`{frame.package}` ({frame.place})" if frame.package else frame.place
    found |= _of_release(raised, found, releases) if entry.topic == "release" else _of_call(raised)
    return {name: value for name, value in found.items() if value or name == "remedy"}


def _file_asked_for(raised: Raised, found: Mapping[str, str]) -> dict[str, str]:
    """Whether a missing file is one that the code makes, or that a callback wants to read."""
    codes = [frame.code for frame in raised.frames if frame.code]
    folder = re.match(r"(.+)[/\\][^/\\]+$", found.get("path", ""))
    result: dict[str, str] = {}
    if folder and (made := next((c for c in reversed(codes) if CREATING.search(c)), "")):
        result |= {"creating": shorten(made, 80), "folder": folder[1]}
    asking = (f for f in raised.frames if re.match(r"on_[a-z]+_", f.where) and f.in_library)
    if callback := next(asking, None):
        result["callback"] = f"The callback in {callback.place} (`{callback.where}`)"
    return result


def _nearest(raised: Raised) -> dict[str, str]:
    """Of the names that a message lists, the one that is most like the value it refuses."""
    match = _LISTED.search(f"{raised.message}\n{raised.details}")
    if match is None:
        return {}
    names = {name.lower(): name for name in re.findall(r"[\w.-]*\w", match["names"])}
    value = match["value"].lower()
    near = difflib.get_close_matches(value, names.keys() - {value}, 1)
    return {"nearest": names[near[0]]} if near else {}


def _values(raised: Raised, name: str) -> Iterator[tuple[str, Frame]]:
    """The expressions that were read when it was raised, each with the frame that reads it."""
    forms = [form for words, form in _NONE_FORMS.items() if words in raised.message]
    frames = raised.frames[:-5:-1]
    if raised.class_name == "KeyError" and name:
        forms = [rf"({_TERM})(?:\[|\.(?:pop|index)\()[rbuf]?['\"]{re.escape(name)}['\"]"]
        if not any(re.search(forms[0], frame.code) for frame in frames):
            forms, frames = [rf"({_TERM})\[[a-z_]\w*\]"], frames[:1]
    elif raised.class_name == "AttributeError" and name:
        forms = [rf"({_TERM})\.{re.escape(name)}\b"]
    for frame in frames:
        found = (match for form in forms for match in re.finditer(form, frame.code))
        terms = list(dict.fromkeys(next(filter(None, match.groups())) for match in found))
        if len(terms) != 1 and (marked := _marked(frame)):
            terms = [marked]
        if 0 < len(terms) <= _MOST_TERMS:
            yield "` or `".join(terms), frame
        if frame.where not in _LOOKUPS and raised.class_name != "KeyError":
            return


def _marked(frame: Frame) -> str:
    """What is subscripted or called in the part of the code that Python marks by `~~~^^^`."""
    before, length = frame.marks.find("^"), len(frame.marks)
    for start in range(len(frame.code) - length + 1 if before > 0 else 0):
        part = frame.code[start : start + length]
        starts = part[0].isidentifier() and not f" {frame.code}"[start].isidentifier()
        if starts and part[before] in "[(" and part[-1] in ")]":
            return part[:before]
    return ""


# -- who has to change what ------------------------------------------------------------------------


def _of_call(raised: Raised) -> dict[str, str]:
    """Who called what raised it, and which side to change."""
    calls = [f for f in raised.frames if (f.package or not f.in_library) and not f.passes_on]
    calls = [f for f in calls if f.package not in _PASSING] or calls
    if not calls:
        return {"remedy": ""}
    own = calls[-1]
    caller = next((f for f in reversed(calls) if f.package != own.package), None)
    if own.is_plugin:
        return {"remedy": f"{_update(own)}, and the program that loads it, to one time."}
    if not own.package:
        update = "in a program of others update that (`git pull`)"
        return {"remedy": f"The place to change is {own.place}; {update}."}
    if caller is None:
        change = f"{_update(own)}, or go back to the release that worked"
        if re.match(r"_?(?:validate|check|verify)_", own.where):
            fits = f"install the `{own.package}` that its requirements name, or update it"
            change = f"`{own.where}` checks what another program gives: {fits}"
        is_fault = raised.class_name in _FAULTS and not raised.users_frame
        why = "a fault of that release, or of it with this model, data or GPU: "
        # A script of the library's repository calls the release that is installed.
        script = "; for a script of its repository install that checkout (`pip install -e .`)"
        change = f"{why}{change}{script}" if is_fault else change
        return {"remedy": f"No code of yours takes part: {change}."}
    name = f"`{caller.package}`" if caller.package else caller.place
    user = raised.users_frame
    if caller.package and not caller.is_plugin and user and raised.class_name not in _FAULTS:
        # A refusal: what the user's own line gives is more likely than a fault of the caller.
        update = f"{_update(caller)} (its {caller.place} calls it)".replace("Update", "update")
        change = f"Change what {user.place} gives to {name}"
        return {"caller": name, "remedy": f"{change}; where that is right, {update}."}
    change = f"{_update(caller)} (its {caller.place} calls it)" if caller.package else ""
    change = change or f"Change what {name} gives to `{own.package}`"
    return {"caller": name, "remedy": f"{change}, or install the `{own.package}` that fits it."}


def _of_release(
    raised: Raised, found: Mapping[str, str], releases: Mapping[str, str]
) -> dict[str, str]:
    """Who asks for a name that is missing, since which release, and which side to change."""
    key = next((k for k in ("module", "package", "function", "kind") if k in found), "")
    where, name = found.get(key, ""), found.get("name", "")
    # A class with its module: `mujoco._enums.mjtEnableBit`.
    is_module = key in ("module", "package") or (key == "kind" and "." in where)
    asking = [f for f in raised.frames if f.where not in _LOOKUPS and not f.passes_on]
    near = [frame.package for frame in reversed(raised.frames)]
    library = where.partition(".")[0] if is_module else owner(where, near)
    asker = asking[-1] if asking and asking[-1].package else None
    here = installed_versions(libraries()) if _is_of_this_machine(raised, releases) else {}
    lost = lost_name(
        where, name.removeprefix(f"{where}."), releases.get(library) or here.get(library, "")
    )
    library = library or (lost.library if lost else "")
    shared = libraries().get(library, {}).get("shared", "(?!)")
    if lost is None and library not in near and re.fullmatch(shared, where):
        library = ""
    result = {"remedy": _exchange(library, asker, found.get("user", ""), lost, is_module)}
    if lost:
        result |= {"lost": lost.words, "new": lost.new}
    if library in releases:
        result["release"] = f"The log names {library} {releases[library]}."
    elif library in here:
        result["release"] = f"Installed here: {library} {here[library]}."
    if asker and (is_module or asker.package != library):
        result["asker"] = f"`{asker.package}`"
    return result


def _is_of_this_machine(raised: Raised, releases: Mapping[str, str]) -> bool:
    """Whether a file of an installed package or of the user's that the traceback or message names
    is here, and no release that the log names differs from the installed one."""
    named = [frame.path for frame in raised.frames if frame.library or not frame.in_library]
    named += _NAMED_FILE.findall(raised.message)
    installed = installed_versions(releases)
    is_other = any(not installed.get(of, "").startswith(said) for of, said in releases.items())
    roots = {match[0] for path in named if (match := _ROOT.match(path))}
    is_other = is_other or not roots <= {*sys.path}
    return not is_other and any(Path(path).is_absolute() and Path(path).is_file() for path in named)


def _exchange(
    library: str, asker: Frame | None, user: str, lost: Lost | None, is_module: bool
) -> str:
    """Which of two packages to exchange, and for what."""
    kind = "Python" if library in sys.stdlib_module_names else "release"
    other = f"install the {f'`{_pip(library)}`' if _pip(library) else kind} that it was written for"
    if lost and lost.range:
        other = f"run `pip install '{_pip(lost.library)}{lost.range}'`"
    elif breaks := libraries().get(library, {}).get("breaks"):
        other += f" (often `pip install '{_pip(library)}<{breaks}'`)"
    if asker and asker.package == library and is_module:
        again = f"`pip install --force-reinstall {_pip(library)}`"
        return f"Two releases of `{library}` are mixed (an upgrade that broke off): {again}."
    if lost and lost.range.startswith(">"):
        return f"R{other[1:]} (then `pip check`), or the release of the caller that fits the older."
    if asker and asker.package != library:
        return f"{_update(asker)} (it asks for it), or {other}."
    if asker:
        given = "a model's own code, a config, an object of another package"
        return f"Update what `{library}` is given ({given}), or {other}."
    return f"Change {user}, or {other}." if user else f"Update the caller, or {other}."


def _update(frame: Frame) -> str:
    if frame.is_plugin:
        return f"Update the plug-in `{frame.package}`"
    pip = _pip(frame.package)
    return f"`pip install -U {pip}`" if pip else f"Update `{frame.package}` (`git pull`)"


def _pip(package: str) -> str:
    """What pip calls a package; empty for what it does not have, as Python's own modules."""
    other = "" if package in sys.stdlib_module_names else line_forms()["pip"].get(package, package)
    return str(libraries().get(package, {}).get("pip", other))
