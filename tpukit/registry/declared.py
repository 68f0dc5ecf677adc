"""What a task declares, read from its source: neither the task nor torch is imported.

Tasks register by entry points of the group `tpukit.tasks`, `name = "package.module:MyTask"`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Optional

GROUP = "tpukit.tasks"
OWN = "tpukit.tasks."
"""The package of the tasks that come along."""
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
TYPES: Mapping[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "Path": Path, "Literal": Literal,
    "Optional": Optional, "__builtins__": {},
}  # fmt: skip
"""Names that the annotation of an option may use."""


@cache
def registered() -> Mapping[str, str]:
    """Name of each installed task -> `package.module:CLASS`."""
    found = {point.name: point.value for point in entry_points(group=GROUP)}
    if PROJECT.is_file():  # a checkout, whose metadata may be older than the code
        found = {name: value for name, value in found.items() if not value.startswith(OWN)}
        found |= tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"][
            GROUP
        ]
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class OptionField:
    """An option as the source has it."""

    name: str
    hint: Any
    """Its type; Any where that is none of `TYPES`."""
    default: Any
    """MISSING where it must be given; `...` where it is another expression."""
    text: str = ""


@dataclass(frozen=True)
class ClassSource:
    """A class in a source file."""

    file: Path
    tree: ast.Module
    definition: ast.ClassDef
    module: str | None = None
    """Its module; None: the file is imported by its path."""

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.definition) or ""

    def load(self) -> Any:
        """The class, imported."""
        from tpukit.train.user_code import import_user_file

        if self.module is None:
            module = import_user_file(self.file, "--task")
        else:
            module = importlib.import_module(self.module)
        return getattr(module, self.definition.name)

    def member(self, name: str) -> Any:
        """The value of a class attribute, its bases' included: a literal, a ClassSource for the
        name of a class, or a dict of these; None where it cannot be read."""
        for source in self.lineage():
            for statement in source.definition.body:
                if name in _targets(statement):
                    return source._value(statement.value)  # type: ignore[attr-defined]
        return None

    def lineage(self) -> Iterator[ClassSource]:
        """The class, then its bases as far as they are found."""
        yield self
        for base in self.definition.bases:
            found = self._named(base.id) if isinstance(base, ast.Name) else None
            if found is not None:
                yield from found.lineage()

    def fields(self) -> list[OptionField]:
        """The fields of a dataclass, its bases' first."""
        found: dict[str, OptionField] = {}
        for source in reversed([*self.lineage()]):
            body = source.definition.body
            for field, after in zip(body, [*body[1:], None], strict=True):
                if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                    continue
                name = field.target.id
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        text = " ".join(text.split())
                    case _:
                        text = ""
                if not ast.unparse(field.annotation).startswith("ClassVar"):
                    hint, default = _hint(field.annotation), _default(field.value)
                    found[name] = OptionField(name, hint, default, text)
        return [*found.values()]

    def constructor(self) -> list[OptionField]:
        """The parameters of the constructor, as options."""
        for source in self.lineage():
            for method in source.definition.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return list(_parameters(method.args))
        return []

    def _value(self, value: ast.expr | None) -> Any:
        match value:
            case ast.Name(id=name):
                return self._named(name)
            case ast.Dict(keys=keys, values=values):
                return {
                    key.value: self._value(part)
                    for key, part in zip(keys, values, strict=True)
                    if isinstance(key, ast.Constant)
                }
            case ast.Constant() | ast.Tuple():
                with suppress(ValueError):
                    return ast.literal_eval(value)
        return None

    def _named(self, name: str) -> ClassSource | None:
        return _class_in(self.file, self.tree, name, self.module)


@cache
def current_name(spec: str) -> str:
    """The name that a task has now, where `spec` is its name in an earlier version."""
    if spec.isidentifier() and spec not in registered():
        for name in registered():
            source = find_source(name)
            if source is not None and spec in (source.member("earlier_names") or ()):
                return name
    return spec


def find_source(spec: str) -> ClassSource | None:
    """The class of a registered name, `FILE:CLASS` or `[FOLDER:]MODULE:CLASS`.

    None where there is no such task, or its source cannot be read.
    """
    spec = current_name(spec)
    place, _, name = registered().get(spec, spec).rpartition(":")
    if place.endswith(".py"):
        return _read(Path(place).resolve(), name, None)
    folder, _, module = place.rpartition(":")
    file = _file_of(module, Path(folder)) if module else None
    return _read(file, name, module) if file else None


def source_of(cls: type) -> ClassSource:
    """The source of a class of this package."""
    file = Path(inspect.getfile(cls))
    found = _class_in(file, _tree_of(file), cls.__name__, cls.__module__)
    assert found is not None, f"{cls.__name__} is in a file of its module"
    return found


@cache
def _tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def setting_fields(source: ClassSource) -> list[OptionField]:
    """The settings of a task: the fields of its `options`, else its constructor's parameters."""
    options = source.member("options")
    return options.fields() if isinstance(options, ClassSource) else source.constructor()


def task_of_run(path: Path) -> str | None:
    """What names the task of a run folder or of one checkpoint in it; None: it cannot be read."""
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    with suppress(OSError, ValueError, KeyError):
        table = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["task"]
        source = str(table.get("source", ""))
        is_there = source and Path(source.partition(":")[0]).exists()
        return source if is_there else str(table["name"])
    return None


def _read(file: Path, name: str, module: str | None) -> ClassSource | None:
    with suppress(OSError, ValueError, SyntaxError):
        return _class_in(file, ast.parse(file.read_text(encoding="utf-8")), name, module)
    return None


def _class_in(file: Path, tree: ast.Module, name: str, module: str | None) -> ClassSource | None:
    """A class that a file defines, or imports by name."""
    for statement in tree.body:
        match statement:
            case ast.ClassDef(name=defined) if defined == name:
                return ClassSource(file, tree, statement, module)
            case ast.ImportFrom(module=origin, names=names, level=level):
                for alias in names:
                    if (alias.asname or alias.name) == name and alias.name != "Task":
                        return _imported(file, module, origin or "", level, alias.name)
    return None


def _imported(
    file: Path, module: str | None, origin: str, level: int, name: str
) -> ClassSource | None:
    if level:
        package = (module or "").split(".")[: None if file.name == "__init__.py" else -1]
        package = package[: len(package) - level + 1]
        origin = ".".join([*package, *filter(None, [origin])])
    found = _file_of(origin, file.parent)
    return _read(found, name, origin) if found and found != file else None


def _file_of(module: str, folder: Path) -> Path | None:
    """The file of a module, below `folder` or installed; nothing of it is imported."""
    top, *rest = module.split(".")
    roots = [folder / top]
    if not (roots[0].is_dir() or roots[0].with_suffix(".py").is_file()):
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(top)
            if spec is not None and spec.origin and not rest:
                return Path(spec.origin)
            roots = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    for root in roots:
        path = root.joinpath(*rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _targets(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _parameters(given: ast.arguments) -> Iterator[OptionField]:
    names = [*given.posonlyargs, *given.args]
    required: list[ast.expr | None] = [None] * (len(names) - len(given.defaults))
    pairs = [*zip(names, [*required, *given.defaults], strict=True)][1:]
    pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    for name, value in pairs:
        yield OptionField(name.arg, _hint(name.annotation), _default(value))


def _hint(annotation: ast.expr | None) -> Any:
    if annotation is None:
        return Any
    try:
        return eval(ast.unparse(annotation), dict(TYPES))
    except Exception:
        return Any


def _default(value: ast.expr | None) -> Any:
    match value:
        case None:
            return MISSING
        case ast.Call(func=ast.Name(id="setting"), args=[default, *_]):
            value = default
    with suppress(ValueError):
        return ast.literal_eval(value)
    return ...
