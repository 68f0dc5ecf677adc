"""Names and arguments that the installed release does not have, and what it has instead.

In the order of trust: the tables' replacement where the package has it; the same name elsewhere in
the package, in a place for users; for an argument the nested config, or the annotation, that owns
it; an upgrade of the package that asks; the tables' release where everything installed takes it; a
name that differs by a slip; nothing.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from tpukit.knowledge.releases import Lost, libraries, lost_name
from tpukit.probe.logs.place import source
from tpukit.probe.logs.place.installed import Installed
from tpukit.probe.logs.tracebacks import Frame, Raised

_FORMS = {
    "name": r"cannot import name '(?P<name>\w+)' from '(?P<place>[\w.]+)'(?: \((?P<file>.+?)\))?",
    "module": r"No module named '(?P<place>[\w.]+)\.(?P<name>\w+)'",
    "attribute": r"module '(?P<place>[\w.]+)' has no attribute '(?P<name>\w+)'",
}
_KEYWORD = re.compile(
    r"(?:(?P<owner>[\w.<>]+)\.)?(?P<function>\w+)\(\) got an unexpected keyword argument "
    r"'(?P<name>\w+)'"
)
_OF_OBJECT = re.compile(
    r"(?:type object )?'(?P<owner>[\w.]+)'(?: object)? has no attribute '(?P<name>\w+)'"
)
_CONFIG = r"[A-Z]\w*(?:Config|Configuration|Arguments|Args|Kwargs|Options|Plugin)\b"
_SLIP = 0.88
"""How alike two names are of which one is a slip of the other."""
_MOST_NAMES = 4


@dataclass(frozen=True)
class Advice:
    """What the place says of an exception."""

    why: str
    fix: str
    id: str = ""
    leads: bool = True
    """Whether it replaces what the tables say; else it stands below."""
    is_weak: bool = False
    """Whether it replaces the tables' word on a family alone: it found nothing to use instead."""


def lost(raised: Raised, installed: Installed) -> Advice | None:
    """What the installed packages say of a name that is missing; None for another exception."""
    return (
        _lost_import(raised, installed)
        or _lost_argument(raised, installed)
        or _lost_attribute(raised, installed)
    )


def _lost_import(raised: Raised, installed: Installed) -> Advice | None:
    match = next((m for form in _FORMS.values() if (m := re.match(form, raised.message))), None)
    asker = next((frame for frame in reversed(raised.frames) if not frame.passes_on), None)
    if match is None or asker is None:
        return None
    place, name = match["place"], match["name"]
    package = place.partition(".")[0]
    file = match.groupdict().get("file") or ""
    is_foreign = file and not any(file.startswith(root) for root in installed.roots)
    if (
        hasattr(builtins, name)
        or package in sys.stdlib_module_names
        or not installed.has(package)
        or is_foreign
    ):
        return None
    names = _missing_on_line(asker, installed, name) or [name]
    found = {each: _elsewhere(installed, package, each, place) for each in names[:_MOST_NAMES]}
    if found.get(name) == place:
        return None  # it is there: an import in a circle, or an optional part
    release = f"{package} {installed.version(package)}".strip()
    lacking = ", ".join(f"`{each}`" for each in names[:_MOST_NAMES])
    is_others = bool(asker.package) and asker.package != package
    who = f"`{asker.package}` {installed.version(asker.package)}" if is_others else asker.place
    module = release if place == package else f"`{place}` of {release}"
    why = f"{module} has no {lacking}, which {who} asks for."
    if is_others:
        return Advice(why, _update(asker.package, package, place, name, installed))
    if asker.package == package:
        return None  # two releases mixed, which the tables explain
    ways = [_instead(installed, place, each, found[each]) for each in found]
    suggested = re.search(r"Did you mean:? '(\w+)'", raised.message)
    fix = "; ".join(text for text, _ in ways)
    if suggested and suggested[1] not in fix:
        fix += f" (Python suggests `{suggested[1]}`)"
    return Advice(why, f"In {asker.place}: {fix}.", is_weak=not any(used for _, used in ways))


def _missing_on_line(frame: Frame, installed: Installed, name: str) -> list[str]:
    """All names of an import that the package does not have: `name`, of which Python speaks, and
    others of that line."""
    node = source.smallest(frame.path, frame.line, ast.ImportFrom)
    if node is None or node.module is None:
        return []
    package, inside = node.module.partition(".")[0], f"{node.module}."
    # What is defined within the module may be there by `from .part import *`.
    return [
        alias.name
        for alias in node.names
        if alias.name == name
        or not any(f"{m}.".startswith(inside) for m in installed.places(package, alias.name))
    ]


def _elsewhere(installed: Installed, package: str, name: str, place: str) -> str:
    """The public module that has the name; its own place where that has it."""
    places = installed.places(package, name)
    if place in places:
        return place
    public = [module for module in places if not re.search(r"(?:^|\.)_|\.core\b", module)]
    return next(iter(public), "")


def _update(asker: str, package: str, place: str, name: str, installed: Installed) -> str:
    """What to do where a package asks another one for a name that it does not have."""
    version = installed.version(package)
    wanted = [w for who, w in installed.requirements_on(package) if who == asker.lower()]
    refused = next((w for w in wanted if version and not w.specifier.contains(version, True)), None)
    if refused is not None:
        return (
            f"`pip install '{refused.name}{refused.specifier}'`: {asker} "
            f"{installed.version(asker)} requires it; or `pip install -U {asker}`."
        )
    known = lost_name(place, name, version)
    pin = _pin(installed, known) if known else ""
    return f"`pip install -U {asker}`, whose code asks for it{f', or {pin}' if pin else ''}."


def _instead(installed: Installed, place: str, name: str, elsewhere: str) -> tuple[str, bool]:
    """What to write in place of a name that its module does not have, and whether that is known."""
    package = place.partition(".")[0]
    release = f"{package} {installed.version(package)}".strip()
    known = lost_name(place, name, installed.version(package))
    new = known.new if known else ""
    last = re.findall(r"\w+", new.partition("(")[0])[-1:]
    of = new.partition(".")[0] if "." in new else package
    if last and (not installed.has(of) or installed.places(of, last[0])):
        return f"`{new}` replaces `{name}`", True
    if elsewhere:
        return f"`from {elsewhere} import {name}`", True
    pin = _pin(installed, known) if known else ""
    if pin and known:
        return f"`{name}` is nowhere in {release} ({known.words}): {pin}", True
    if near := _slip(name, installed.names(place)):
        return f"`{near}` in place of `{name}`", True
    return f"`{name}` is nowhere in {release}: leave it out, or see its release notes", False


def _slip(name: str, names: Iterable[str]) -> str:
    """The name that differs by a slip; a removed name is not like its successor."""
    return next(iter(difflib.get_close_matches(name, set(names) - {name}, 1, _SLIP)), "")


# -- releases that fit -----------------------------------------------------------------------------
def _pin(installed: Installed, known: Lost) -> str:
    """The command for a release that has the name; empty where something installed refuses it."""
    if not known.range or refusing(installed, known.library, known.range):
        return ""
    return f"`pip install '{known.library}{known.range}'`"


def refusing(installed: Installed, library: str, pin: str) -> str:
    """The first requirement of an installed package that no release of this pin meets."""
    try:
        wanted = SpecifierSet(pin)
    except InvalidSpecifier:
        return ""
    for name, requirement in installed.requirements_on(library):
        if _exclude(wanted, requirement.specifier) or _exclude(requirement.specifier, wanted):
            return f"{name} {installed.version(name)} requires {requirement}"
    return ""


def _exclude(first: SpecifierSet, second: SpecifierSet) -> bool:
    """Whether the lower bounds of one lie above the upper bounds of the other."""
    lower = [Version(s.version) for s in first if s.operator in (">=", ">", "~=")]
    exact = [Version(s.version) for s in first if s.operator == "==" and "*" not in s.version]
    upper = SpecifierSet(",".join(str(s) for s in second if s.operator in ("<", "<=", "==", "!=")))
    return any(not upper.contains(version, prereleases=True) for version in [*lower, *exact])


# -- arguments and attributes ----------------------------------------------------------------------
def _lost_argument(raised: Raised, installed: Installed) -> Advice | None:
    match = _KEYWORD.match(raised.message)
    user = raised.users_frame
    if match is None or not raised.frames:
        return None
    owner, function, name = match["owner"] or "", match["function"], match["name"]
    owner = owner.rpartition(".")[2]
    called = owner if owner and function == "__init__" else f"{owner}.{function}".lstrip(".")
    last = owner if function == "__init__" else function
    found = _owner(raised, installed, called, last)
    if found is None:
        return None
    package, parameters = found
    call = source.call_on(user.path, user.line, last) if user else None
    given = [keyword.arg for keyword in call.keywords if keyword.arg] if call else []
    bad = list(dict.fromkeys([name, *(g for g in given if g not in parameters)]))
    release = f"{package} {installed.version(package)}".strip()
    place = f" ({user.place})" if user else ""
    takes = ", ".join(list(parameters)[:12]) + (" ..." if len(parameters) > 12 else "")
    lacking = ", ".join(f"`{each}`" for each in bad)
    why = f"`{last}` of {release} does not take {lacking}{place}. It takes {takes}."
    caller = next((frame for frame in reversed(raised.frames) if not frame.passes_on), None)
    if caller and caller.package not in ("", package):
        return Advice(why, _update(caller.package, package, called, name, installed))
    ways = [_argument_instead(installed, package, called, b, parameters) for b in bad]
    fix = f"{'; '.join(ways)}."
    return Advice(why, fix[:1].upper() + fix[1:])


def _owner(
    raised: Raised, installed: Installed, called: str, last: str
) -> tuple[str, Mapping[str, str]] | None:
    """(package, parameters) of what was called: imported by the user's file, or a frame's."""
    imported = list(_imported(raised))
    first = [module for name, module in imported if name == last]
    frames = [frame.package for frame in reversed(raised.frames)]
    for package in dict.fromkeys([*first, *frames, *(module for _, module in imported)]):
        parameters = installed.parameters(package, called) if package else None
        if parameters:
            return package, parameters
    return None


def _imported(raised: Raised) -> Iterator[tuple[str, str]]:
    """(name, package) of each import in the files of the user that the traceback names."""
    for path in dict.fromkeys(frame.path for frame in raised.frames if frame.is_users):
        for node in source.parents(path):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield alias.name, node.module.partition(".")[0]
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.asname or alias.name, alias.name.partition(".")[0]


def _argument_instead(
    installed: Installed, package: str, called: str, name: str, parameters: Mapping[str, str]
) -> str:
    for parameter, annotation in parameters.items():
        for config in re.findall(_CONFIG, annotation):
            if config != called and name in (installed.parameters(package, config) or ()):
                return f"`{name}` belongs to the `{config}` that is given as `{parameter}`"
    plain = name.replace("_", "").lower()
    for parameter, annotation in parameters.items():
        if len(name) > 3 and plain in annotation.replace("_", "").lower():
            return f"`{parameter}=` in place of `{name}=`"
    known = lost_name(f"{called}.__init__", name, installed.version(package))
    successors = (known.new if known else "", libraries().get(package, {}).get("new", {}).get(name))
    for new in successors:
        if new in parameters:
            return f"`{new}=` in place of `{name}=`"
    longer = [p for p in parameters if p.startswith(f"{name}_") or p.endswith(f"_{name}")]
    if near := _slip(name, parameters) or (longer[0] if len(longer) == 1 else ""):
        return f"`{near}=` in place of `{name}=`"
    pin = _pin(installed, known) if known else ""
    if pin and known:
        return f"leave out `{name}` ({known.words}), or {pin}"
    return f"leave out `{name}`: nothing there is like it"


def _lost_attribute(raised: Raised, installed: Installed) -> Advice | None:
    match = _OF_OBJECT.match(raised.message)
    user = raised.users_frame
    asker = next((frame for frame in reversed(raised.frames) if not frame.passes_on), None)
    if match is None or user is None or asker is not user:
        return None
    owner, name = match["owner"].rpartition(".")[2], match["name"]
    packages: Sequence[str] = [frame.package for frame in reversed(raised.frames)]
    for package in dict.fromkeys([*packages, *(module for _, module in _imported(raised))]):
        attributes = installed.attributes(package, owner) if package else set()
        known = lost_name(owner, name, installed.version(package)) if attributes else None
        new = known.new if known and known.new in attributes else _slip(name, attributes)
        if new:
            release = f"{package} {installed.version(package)}".strip()
            why = f"`{owner}` of {release} has no `{name}` ({user.place})."
            return Advice(why, f"`{new}` in place of `{name}`.")
    return None
