"""Writes what the releases of a library lost and gained: tpukit/knowledge/tables/releases/.

    python scripts/compare_releases.py --wheels FOLDER peft transformers ...

FOLDER has the files that `pip download --no-deps` gave (wheels or source archives), one for each
release to compare; nothing is imported. A release is named by its first two numbers (`--numbers`),
of which the newest file counts. Names are those that a module binds (also those that it imports
from its own library, or keeps as deprecated ones), the attributes and arguments of public classes,
and the arguments of public functions. What the older code itself says about a deprecated name (`X`
is deprecated, use `Y`) becomes its successor; a name that is defined in another module afterwards
has moved there.

A line of the table is a module: `<5.0` before the names that 5.0 is the first to lack, `>=5.0`
before those that it is the first to have, `name>new` with the successor (`name>place.` where it
has the same name there). `GLM|Config|Model` are GLMConfig and GLMModel; `.size` belongs to the
class or method of the name before it; `TF[A-Z]*` are all names of that form, which went together.
What comes or goes with its class or method is not listed again, nor what needs no bound
(`is_everywhere`). `skipped` are the releases between those compared, as pip lists them: no bound
is given beyond the first of them.
"""

import argparse
import ast
import fnmatch
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any, TypeGuard

from packaging.requirements import Requirement
from packaging.version import Version

from tpukit.knowledge.releases import libraries

TABLES = Path(__file__).parents[1] / "tpukit/knowledge/tables/releases"
SKIPPED = re.compile(
    r"(?:^|/)(?:tests?|testing|examples|benchmarks?|docs|_?vendor|third_?party)/"
    r"|/test_|convert_|modular_|/conftest|/dummy_\w+_objects"
)
LARGE = re.compile(r"/models/\w+/(?:modeling|(?:image_|video_)?processing)_\w+\.py$")
"""Files of single models, of which only the names at the margin are read."""
INNER = re.compile(
    r"(?<!^jax)\._|testing|conversion_mapping|core_model_loading|mosaic[._]gpu|^transformers\.models\."
    r"|^jax\._src\.(?!pallas)|pallas\.triton"
    r"|\.(?:cli|commands|exporters|continuous_batching|interpret)(?:\.|$)"
    r"|(?:args_doc|auto_docstring|serialization_generated|mypy_plugin|f2py2e)$"
    r"|^peft\.tuners\.(?!lora\b)\w+\."
)
"""Modules whose names nobody's code takes by their place; JAX's kernels have no other one."""
BASES = re.compile(r"Pre[Tt]rained\w*|\w*Base|\w*Mixin")
"""Classes from which others derive."""
MODEL = re.compile(r"[a-z]\w*\d\w*")
"""timm's function for one model, which is asked for by `create_model`."""
NEWEST = ("--python-version", "3.13", "--only-binary", ":all:")
"""pip lists the releases for this Python: the newest ones need a newer one than this script."""
FORMS = {
    "transformers": ("Flax[A-Z]*", "TF[A-Z]*", "*OnnxConfig", "*_ARCHIVE_LIST", "*_ARCHIVE_MAP")
}
"""Library -> forms of names of which one release dropped all."""
PLAIN = re.compile(r"[A-Z]\w*")
WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where a word begins within a class's name."""
ROW = 1000
"""Characters of a line after which the next release has a line of its own."""
TOP_LEVEL = re.compile(r"^(?:class |def )?([A-Za-z]\w*)(?=\(|:| = )", re.MULTILINE)
OFFERED = re.compile(r"^__all__ \+?= \[([^\]]*)\]", re.MULTILINE)
NAME = re.compile(r"[\"'](\w+)[\"']")
DEPRECATED = re.compile(
    r"[`'\"]?([A-Za-z_]\w{2,})(?:\(\))?[`'\"]? "
    r"(?:is|was|has been|are) (?:deprecated|renamed|replaced)"
    r"[^\n]{0,160}?(?:[Uu]se|to|by|favou?r of) [`'\"]([A-Za-z_][\w.]{2,60})(?:\(\))?[`'\"]"
)


@dataclass
class Module:
    """What one file defines."""

    names: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    """Names that it defines itself."""
    exported: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    """Modules of which it passes on everything (`from .core import *`)."""
    public: set[str] = field(default_factory=set)
    """Names that a package's `__init__.py` offers."""
    classes: dict[str, tuple[list[str], set[str]]] = field(default_factory=dict)
    """Class -> its bases, its attributes and (as `method.argument`) its methods' arguments."""
    arguments: set[str] = field(default_factory=set)
    """`function.argument`."""
    successors: dict[str, str] = field(default_factory=dict)


def sources(archive: Path) -> Iterator[tuple[str, bytes]]:
    """(path, text) of each Python file of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                if name.endswith(".py"):
                    yield name, opened.read(name)
        return
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.name.endswith(".py") and (file := opened.extractfile(member)):
                path = member.name.partition("/")[2].removeprefix("src/").removeprefix("python/")
                yield path, file.read()


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those below `if`, `try` and `with`; without what
    only type checkers see where the program has another branch."""
    for node in body:
        if isinstance(node, ast.If) and node.orelse and "TYPE_CHECKING" in ast.dump(node.test):
            yield from statements(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from statements(node.body)
            yield from statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)
        else:
            yield node


def bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return {argument.arg for argument in every} - {"self", "cls"}


def attributes(node: ast.ClassDef) -> set[str]:
    """Attributes of a class's own body, and its methods' arguments."""
    found: set[str] = set()
    for child in statements(node.body):
        found.update(bound(child))
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name == "__init__":
            found |= arguments(child)
        elif not child.name.startswith("_") and child.name != "forward":
            found |= {f"{child.name}.{argument}" for argument in arguments(child)}
        for inner in ast.walk(child):
            is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            if is_set and isinstance(inner.value, ast.Name) and inner.value.id == "self":
                found.add(inner.attr)
    return {name for name in found if not name.startswith("_")}


def read(text: bytes, library: str, path: str) -> Module:
    module = Module()
    if LARGE.search(path):
        code = text.decode(errors="replace")
        module.own = set(TOP_LEVEL.findall(code))
        module.names = set(module.own)
        module.exported = {name for part in OFFERED.findall(code) for name in NAME.findall(part)}
        return module
    passes_on = re.search(r"(?:__init__|utils\w*)\.py$", path) is not None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return module
    for node in statements(tree.body):
        module.own.update(name for name in bound(node) if passes_on or not name.startswith("_"))
        is_inner = isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").startswith(library)
        )
        if isinstance(node, ast.ImportFrom) and not passes_on:
            module.names.update(a.name for a in node.names if is_inner and a.asname == a.name)
        elif is_inner and passes_on:
            module.names.update(alias.asname or alias.name for alias in node.names)
            if any(alias.name == "*" for alias in node.names):
                folder = path.split("/")[: -node.level or None] if node.level else []
                module.passed.add(".".join([*folder, *filter(None, [node.module])]))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = [
                n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for n in node.bases
            ]
            module.classes[node.name] = (bases, attributes(node))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            module.arguments |= {f"{node.name}.{argument}" for argument in arguments(node)}
    module.names |= module.own
    for name, said in deprecated(tree):
        module.names.add(name)
        if new := re.search(r"[Uu]se `?((?:[a-z_]\w*\.)+\w+)", said):
            module.successors[name] = new[1]
    module.exported = exported(tree)
    if path.endswith("__init__.py"):
        module.public = module.names | module.exported
    module.successors |= successors(tree, text.decode(errors="replace"))
    return module


def deprecated(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, text) of each deprecated name that a module still has, as JAX keeps them: a table
    from names to (text, value)."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and "_deprecations" in ast.dump(node.targets[0]):
            rows = node.value if isinstance(node.value, ast.Dict) else ast.Dict([], [])
            for key, row in zip(rows.keys, rows.values, strict=True):
                value = row.elts[-1] if isinstance(row, ast.Tuple) else None
                is_gone = isinstance(value, ast.Constant) and value.value is None
                if _is_text(key) and not is_gone:
                    yield key.value, ast.unparse(row)


def exported(tree: ast.Module) -> set[str]:
    """The texts of `__all__` and of a table of lazy imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
            head = ast.dump(node)[:160]
            if "__all__" in head or "import_structure" in head:
                found |= {
                    n.value
                    for n in ast.walk(node)
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
    return {name for name in found if name.isidentifier()}


def _is_text(node: ast.AST) -> TypeGuard[Any]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def successors(tree: ast.Module, text: str) -> dict[str, str]:
    """What the code says about its deprecated names."""
    found = {m[1]: m[2] for m in DEPRECATED.finditer(text) if m[1] != m[2]}
    for node in ast.walk(tree) if "deprecate_kwarg" in text else ():
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "deprecate_kwarg":
            new = [
                k.value.value for k in node.keywords if k.arg == "new_name" and _is_text(k.value)
            ]
            if new and node.args and _is_text(node.args[0]):
                found[node.args[0].value] = new[0]
    return found


@dataclass
class Release:
    """The names of one release."""

    number: str
    modules: dict[str, Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bases: dict[str, tuple[list[str], set[str]]] = {}
        self.attributes: dict[str, set[str]] = {}

    def finish(self, library: str) -> None:
        root = self.modules.setdefault(library, Module())
        for name, module in self.modules.items():
            if name == library or ".models." in name or "pipelines." in name:
                root.names |= module.exported & (
                    module.names if name != library else module.exported
                )
            if module.exported:
                module.names |= module.exported
            parent = self.modules.get(name.rpartition(".")[0])
            if parent and ".models." in name:
                parent.names |= module.exported
            self.bases.update(module.classes)
        for module in [*self.modules.values()] * 3:
            for passed in filter(None, map(self.modules.get, module.passed)):
                module.names |= {name for name in passed.names if not name.startswith("_")}
        self.everywhere = set().union(*(m.names for m in self.modules.values()))
        self.public = set().union(*(m.public for m in self.modules.values()))
        self.arguments = set().union(*(m.arguments for m in self.modules.values()))
        self.places = defaultdict(list)
        for name, module in self.modules.items():
            for own in module.own if "._" not in name else ():
                self.places[own].append(name)
        self.tokens = set(self._tokens())

    def every_attribute(self, name: str) -> set[str]:
        if name not in self.attributes:
            bases, own = self.bases.get(name, ([], set()))
            self.attributes[name] = own
            self.attributes[name] = own.union(*map(self.every_attribute, bases))
        return self.attributes[name]

    def _tokens(self) -> Iterator[tuple[str, str]]:
        for name, module in self.modules.items():
            parent, _, last = name.rpartition(".")
            yield parent, last
            for token in module.names:
                yield name, token
            for token in module.arguments:
                if token.partition(".")[0] in self.public:
                    yield name, token
            for kind, (_, own) in module.classes.items():
                for attribute in own if kind in self.public else ():
                    yield name, f"{kind}.{attribute}"

    def has(self, module: str, token: str) -> bool:
        """Whether a name, or a class's or function's attribute, is there (inherited, too)."""
        if (module, token) in self.tokens:
            return True
        first, dot, rest = token.partition(".")
        if not dot:
            return f"{module}.{token}" in self.modules
        if first in self.bases:
            return rest in self.every_attribute(first)
        return token in self.arguments

    def knows(self, module: str, token: str) -> bool:
        """Whether the module, and the class or function, are there at all."""
        first, dot, _ = token.partition(".")
        if dot:
            return first in self.everywhere
        return module in self.modules or module == ""

    def defined_in(self, name: str) -> str:
        """The shortest module that defines a name itself; empty if none or too many do."""
        places = self.places.get(name, [])
        return min(places, key=lambda m: (m.count("."), len(m))) if 0 < len(places) <= 3 else ""


def release(number: str, archive: Path, library: str, cache: dict[str, Module]) -> Release:
    found = Release(number)
    for path, text in sources(archive):
        if not path.startswith(f"{library}/") or SKIPPED.search(path):
            continue
        key = hashlib.sha1(path.encode() + text).hexdigest()
        if key not in cache:
            cache[key] = read(text, library, path)
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = cache[key]
        found.modules[name] = replace(module, names=set(module.names))
    found.finish(library)
    return found


def numbered(folder: Path, distribution: str, numbers: int) -> dict[str, Path]:
    """Release -> its newest file, the oldest release first."""
    name = re.escape(distribution).replace("_", "[-_.]")
    stem = re.compile(rf"{name}-(\d[\w.]*?)(?:\+\w+)?(?:-(?:py|cp)|\.tar)", re.IGNORECASE)
    files = [(m[1], path) for path in folder.iterdir() if (m := stem.match(path.name))]
    files.sort(key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])])
    return {".".join(number.split(".")[:numbers]): path for number, path in files}


Rows = dict[str, dict[tuple[str, str], set[str]]]
"""Module -> (`<` or `>=`, release) -> names."""


def compare(releases: list[Release]) -> Rows:
    """What each release has no more (`<`), and what it is the first to have (`>=`)."""
    gone: dict[tuple[str, str], str] = {}
    came: dict[tuple[str, str], str] = {}
    moved: dict[tuple[str, str], str] = {}
    said: dict[str, str] = {}
    for before, after in pairwise(releases):
        for known in before.modules.values():
            said.update(known.successors)
        for module, token in before.tokens - after.tokens:
            if after.has(module, token):
                continue
            gone[module, token] = after.number
            place = after.defined_in(token)
            is_moved = place not in ("", module) and "." not in token
            moved[module, token] = f"{place}.{token}" if is_moved else ""
        for module, token in after.tokens - before.tokens:
            gone.pop((module, token), None)
            if before.knows(module, token) and not before.has(module, token):
                came.setdefault((module, token), after.number)
    last = releases[-1]
    rows: Rows = defaultdict(lambda: defaultdict(set))
    for (module, token), number in gone.items():
        if last.has(module, token) or (not last.knows(module, token) and "." in token):
            continue
        if module not in last.modules and module and "." not in token and not moved[module, token]:
            continue
        new = moved[module, token] or said.get(token.rpartition(".")[2], "")
        is_none = new in ("", token, f"{module}.{token}") or ".experimental." in new
        rows[module]["<", number].add(token if is_none else f"{token}>{new}")
    for (module, token), number in came.items():
        if (module, token) not in gone:
            rows[module][">=", number].add(token)
    return rows


def is_noise(sign: str, module: str, token: str) -> bool:
    """Whether no code outside of the library asks for the name."""
    last = token.rpartition(".")[2]
    is_model = re.match(r"timm$|timm\.models(?!\.layers)", module) is not None
    return (
        len(last) < 2
        or last in ("logger", "args", "kwargs")
        or token.startswith(("T_", "is_torch_greater"))
        or (sign == ">=" and last.startswith("_"))
        or (is_model and MODEL.fullmatch(token) is not None)
    )


def is_everywhere(bound: tuple[str, str], module: str, library: str) -> bool:
    """Whether names that came need no bound: every release that tpukit takes has them, or they have
    a shorter place for users. Of a library with `breaks` each counts: what is not known to be new
    is taken for old there."""
    sign, number = bound
    if sign == "<" or "breaks" in libraries().get(library, {}):
        return False
    return Version(number) < required(library) or (module.count(".") > 1 and "pallas" not in module)


@cache
def required(library: str) -> Version:
    """The first release of a library that tpukit takes."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    wanted = map(Requirement, project["project"]["dependencies"])
    first = (s.version for each in wanted if each.name == library for s in each.specifier)
    return min(map(Version, first), default=Version("0"))


def kept(rows: Rows, library: str) -> Rows:
    """The names that somebody may ask for, each once: an attribute of a class or an argument of a
    method that comes or goes with it is not listed."""
    found: Rows = defaultdict(dict)
    for module, names_of in rows.items():
        for bound, names in names_of.items() if not INNER.search(module) else ():
            if is_everywhere(bound, module, library):
                continue
            own = set()
            for name in names:
                token = name.partition(">")[0]
                parts = token.split(".")
                # Who derives from a base that went, or has another name now, lacks its attributes.
                is_base = bound[0] == "<" and BASES.fullmatch(parts[0]) is not None
                owners = [".".join(parts[:end]) for end in range(1, len(parts)) if not is_base]
                if not is_noise(bound[0], module, token) and names.isdisjoint(owners):
                    own.add(name)
            if own:
                found[module][bound] = own
    return found


def by_form(rows: Rows, library: str) -> Rows:
    """Puts a form in the place of the names of it that one release dropped."""
    found = {
        module: {bound: {*names} for bound, names in of.items()} for module, of in rows.items()
    }
    for form in FORMS.get(library, ()):
        lost = {
            b: {*fnmatch.filter(names, form)} for b, names in found[library].items() if b[0] == "<"
        }
        most = max(lost, key=lambda bound: len(lost[bound]))
        found[library][most] = found[library][most] - lost[most] | {form}
    return found


def folded(names: Iterable[str]) -> Iterator[str]:
    """The names in the form of the table, which `unfolded` of tpukit.knowledge.releases reads."""
    for is_plain, group in groupby(sorted(names), lambda name: bool(PLAIN.fullmatch(name))):
        fold = _families if is_plain else _of_owners
        yield from fold([*group])


def _of_owners(names: list[str]) -> Iterator[str]:
    before = ""
    for word in names:
        name, moved, new = word.partition(">")
        owner, dot, last = name.rpartition(".")
        place, _, new_last = new.rpartition(".")
        new = f"{place}." if place and new_last == last else new
        yield f"{f'.{last}' if dot and owner == before else name}{moved}{new}"
        before = owner


def _families(names: list[str]) -> Iterator[str]:
    """Of the stems of the first name the one that saves most."""
    while names:
        stems = [names[0][: match.start()] for match in WORD.finditer(names[0])]
        runs = {s: [*takewhile(re.compile(rf"{s}[A-Z]").match, names)] for s in stems}
        stem = max(runs, key=lambda s: ((len(runs[s]) - 1) * len(s), len(s)), default="")
        family = runs[stem] if stem and len(runs[stem]) > 1 else names[:1]
        yield "|".join([stem, *(n[len(stem) :] for n in family)]) if len(family) > 1 else names[0]
        del names[: len(family)]


def lines_of(rows: Rows) -> Iterator[str]:
    """The lines of the table, by module; of one module the newest release first."""

    def newest(bound: tuple[str, str]) -> tuple[list[int], str]:
        return [-int(n) for n in bound[1].split(".")], bound[0]

    for module, names_of in sorted(rows.items()):
        line = f"{module}:"
        for sign, number in sorted(names_of, key=newest):
            part = f" {sign}{number} {' '.join(folded(names_of[sign, number]))}"
            if len(line) + len(part) > ROW and line[-1] != ":":
                yield line
                line = f"{module}:"
            line += part
        yield line


def between(distribution: str, compared: list[str]) -> list[str]:
    """The releases that pip lists between the first and the last compared, as they are named."""
    command = [sys.executable, "-m", "pip", "index", "versions", *NEWEST, distribution]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    versions = re.findall(r"[\d.]+", listed.partition("Available versions:")[2].partition("\n")[0])
    numbers = max(number.count(".") for number in compared) + 1
    parts = [version.split(".") for version in versions]
    named = {".".join(part[:numbers]) for part in parts if len(part) >= numbers}

    def key(number: str) -> list[int]:
        return [int(n) for n in number.split(".")]

    first, last = key(compared[0]), key(compared[-1])
    return sorted((n for n in named - {*compared} if first < key(n) < last), key=key)


def write(library: str, compared: list[str], skipped: list[str], rows: Rows) -> Path:
    TABLES.mkdir(exist_ok=True)
    path = TABLES / f"{library}.toml"
    lines = [
        "# By scripts/compare_releases.py: names that a release is the first to lack or to have.",
        f'library = "{library}"',
        f"compared = {json.dumps(compared)}",
        f"skipped = {json.dumps(skipped)}",
        "names = '''",
        *lines_of(by_form(kept(rows, library), library)),
        "'''",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--numbers", type=int, default=2)
    parser.add_argument("libraries", nargs="+")
    options = parser.parse_args()
    for library in options.libraries:
        cache: dict[str, Module] = {}
        found = [
            release(number, path, library, cache)
            for number, path in numbered(options.wheels, library, options.numbers).items()
        ]
        if len(found) < 2:
            raise SystemExit(f"{options.wheels}: fewer than two releases of {library}")
        compared = [one.number for one in found]
        path = write(library, compared, between(library, compared), compare(found))
        print(library, len(found), path.stat().st_size)


if __name__ == "__main__":
    main()
