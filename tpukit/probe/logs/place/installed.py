"""What is installed where an exception was raised: names and parameters, read without import."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from tpukit.probe.logs.place import source
from tpukit.probe.logs.tracebacks import Raised

_ROOT = re.compile(r".*?[/\\](?:site|dist)-packages(?=[/\\])")
_NAMED_FILE = re.compile(r"\((/[^()\n]{3,400}\.py)\)")
_LEFT_OUT = re.compile(r"(?:tests?|testing|_vendor|__pycache__)$|dummy_|test_")
"""Folders and files whose names are for no user."""
_TABLE = re.compile(r"__all__|import_structure|import_map|lazy")
"""Variables of an `__init__.py` that list names."""
_MOST_BASES = 4
_MOST_FILES = 6000


@dataclass(frozen=True)
class Installed:
    """The packages below some folders."""

    roots: tuple[str, ...]

    def version(self, package: str) -> str:
        found = self.distribution(package)
        return found.version if found else ""

    def distribution(self, package: str) -> importlib.metadata.Distribution | None:
        """The distribution that an imported package belongs to."""
        found = importlib.metadata.Distribution.discover(name=package, path=list(self.roots))
        return next(iter(found), None) or _by_import(self.roots, package)

    def has(self, package: str) -> bool:
        return self.folder(package) is not None

    def folder(self, package: str) -> Path | None:
        """The package's folder, or its only file."""
        for root in self.roots:
            for path in (Path(root, package), Path(root, f"{package}.py")):
                if path.exists():
                    return path
        return None

    def requirements_on(self, library: str) -> Iterator[tuple[str, Requirement]]:
        """(distribution, what it requires of a library) of each that is installed."""
        for name, found in _distributions(self.roots).items():
            for text in found.requires or ():
                if _normal(library) in _normal(text):
                    with suppress(InvalidRequirement):
                        wanted = Requirement(text)
                        is_it = _normal(wanted.name) == _normal(library)
                        if is_it and (not wanted.marker or wanted.marker.evaluate({"extra": ""})):
                            yield name, wanted

    def places(self, package: str, name: str) -> list[str]:
        """Modules of a package from which a name can be imported, public and short ones first."""
        return _places(self.folder(package), package, name)

    def parameters(self, package: str, name: str) -> Mapping[str, str] | None:
        """Parameter -> annotation of a function, a class or its method (`Owner.method`); None where
        it is not found, or takes any keyword."""
        return _parameters(self, package, name, 0)

    def names(self, module: str) -> set[str]:
        """The names that a module's `__init__.py` has, and those that its files define."""
        folder = self.folder(module.partition(".")[0])
        inner = folder.joinpath(*module.split(".")[1:]) if folder else None
        if inner is None or not inner.is_dir():
            return set()
        defined = {
            name.decode()
            for path in inner.glob("*.py")
            for name in re.findall(
                rb"^(?:class|def) ([A-Za-z]\w+)", path.read_bytes(), re.MULTILINE
            )
        }
        return public_names(str(inner / "__init__.py")) | defined

    def attributes(self, package: str, name: str) -> set[str]:
        """Methods and attributes that a class's own body has."""
        node = _definition(self.folder(package), name)
        inner = list(ast.walk(node)) if isinstance(node, ast.ClassDef) else []
        stored = {n.attr for n in inner if isinstance(n, ast.Attribute) and _is_stored(n)}
        return stored | {n.name for n in inner if isinstance(n, source.Function)}


def installed_for(raised: Raised, path: Sequence[str] = ()) -> Installed:
    """The packages that a program could import: by its record, else by the files that it names."""
    named = [frame.path for frame in raised.frames]
    named += _NAMED_FILE.findall(f"{raised.message}\n{raised.details}")
    roots = [match[0] for text in named if (match := _ROOT.match(text)) and Path(match[0]).is_dir()]
    own = [folder for folder in (path or sys.path) if _ROOT.match(f"{folder}/")]
    if path or not roots or set(roots) & set(own):
        roots += own
    return Installed(tuple(dict.fromkeys(roots)))


# -- distributions ---------------------------------------------------------------------------------
def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


@cache
def _distributions(roots: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    found = importlib.metadata.distributions(path=list(roots))
    return {_normal(d.name): d for d in reversed(list(found)) if d.name}


def _by_import(roots: tuple[str, ...], package: str) -> importlib.metadata.Distribution | None:
    """The distribution that lists the package among its top-level names."""
    for found in _distributions(roots).values():
        if package in (found.read_text("top_level.txt") or "").split():
            return found
    return None


# -- names -----------------------------------------------------------------------------------------
@cache
def _files(folder: Path | None) -> Sequence[tuple[Path, bytes]]:
    if folder is None or folder.suffix == ".py":
        return [(folder, folder.read_bytes())] if folder else []
    kept: list[tuple[Path, bytes]] = []
    for inner, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _LEFT_OUT.match(name))
        for name in sorted(names):
            if name.endswith(".py") and not _LEFT_OUT.match(name) and len(kept) < _MOST_FILES:
                with suppress(OSError):
                    path = Path(inner, name)
                    kept.append((path, path.read_bytes()))
    return kept


def _module(path: Path, folder: Path, package: str) -> str:
    inner = path.relative_to(folder).with_suffix("").parts if path != folder else ()
    return ".".join((package, *inner)).removesuffix(".__init__")


@cache
def _places(folder: Path | None, package: str, name: str) -> list[str]:
    if folder is None:
        return []
    form = rf"^(?:class|def|async def) {re.escape(name)}\b|^{re.escape(name)}\s*(?::[^=\n]+)?=[^=]"
    defined, exported, word = [], [], name.encode()
    for path, text in _files(folder):
        if word not in text:
            continue
        if re.search(form.encode(), text, re.MULTILINE):
            defined.append(_module(path, folder, package))
        elif path.name == "__init__.py" and name in public_names(str(path)):
            exported.append(_module(path, folder, package))
    shown = [m for m in exported if not defined or any(d.startswith(f"{m}.") for d in defined)]
    return sorted(
        [*shown, *defined],
        key=lambda m: (sum(p.startswith("_") for p in m.split(".")), m.count("."), len(m)),
    )


@cache
def public_names(path: str) -> set[str]:
    """What an `__init__.py` imports, or lists in `__all__` or a table of lazy imports."""
    found: set[str] = set()
    for node in source.parents(path):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and _TABLE.search(ast.unparse(node.targets[0])):
            texts = (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))
            found |= {text for text in texts if isinstance(text, str)}
    return found


@cache
def _definition(folder: Path | None, name: str) -> ast.ClassDef | source.Function | None:
    """The class or function of this name, the first at the top level of a file."""
    word, form = name.encode(), re.compile(rf"^(?:class|def) {name}\b".encode(), re.MULTILINE)
    for path, text in _files(folder):
        if word in text and form.search(text):
            for node in getattr(source.tree(str(path)), "body", []):
                if isinstance(node, ast.ClassDef | source.Function) and node.name == name:
                    return node
    return None


def _parameters(installed: Installed, package: str, name: str, depth: int) -> dict[str, str] | None:
    owner, _, method = name.rpartition(".")
    node = _definition(installed.folder(package), owner or method)
    if node is None:
        return None
    wanted = (method,) if owner and method != "__init__" else ("__init__", "__new__")
    made = node if isinstance(node, source.Function) else None
    for inner in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(inner, ast.FunctionDef) and inner.name in wanted:
            made = made or inner
    if made is not None:
        found = {p.arg: _annotation(p.annotation) for p in source.parameters_of(made)}
        return found if made.args.kwarg is None else None
    assert isinstance(node, ast.ClassDef)
    found = {
        inner.target.id: _annotation(inner.annotation)
        for inner in node.body
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
    }
    for base in node.bases if depth < _MOST_BASES else ():
        last = ".".join(filter(None, (ast.unparse(base).rpartition(".")[2], owner and method)))
        others = [of for of in (package, "transformers", "torch") if installed.has(of)]
        of_base = (_parameters(installed, of, last, depth + 1) or {} for of in others)
        found = {**next(filter(None, of_base), {}), **found}
    return found or None


def _annotation(node: ast.expr | None) -> str:
    return ast.unparse(node) if node is not None else ""


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)
