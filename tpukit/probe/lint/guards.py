"""Recognises guards: tests of a release or of a feature, and the packages that they are about.

Only a guard about the package of a finding keeps it from being reported: `hasattr(xm, "x")` says
nothing about timm, and `args.version` or `hasattr(self.data, "x")` about no package at all.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from tpukit.knowledge.calls import OldCall
from tpukit.probe.lint.names import Names, Scope, imported_packages
from tpukit.probe.lint.syntax import called_name, of_kind, source_text

_LARGE = ("torch", "numpy", "transformers")
"""Large packages: a guard about one of their names does not cover the others."""
_PACKAGES = ("torch_xla", "torch", "timm", "accelerate", "transformers", "numpy", "lightning")
_SPELLINGS = {"np": "numpy", "xla": "torch_xla", "pl": "lightning", "pytorch": "torch"}
_VERSION_WORD = re.compile(r"version|greater|less_|(?<=\d)_\d|_?(?:ge|lt|gt|le)_?\d", re.IGNORECASE)
_MISSING = ("ImportError", "ModuleNotFoundError", "AttributeError")
_TESTS = (ast.If, ast.IfExp, ast.BoolOp)
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Guard:
    """The packages and releases that a test is about."""

    package: str
    name: str = ""
    """The name in it that is tested for; empty: the release."""
    of_module: bool = False
    """It tests a small package: one new name stands for the release."""

    def covers(self, row: OldCall, qualified: str) -> bool:
        """Whether the guard lets a use of this row run only in releases where it is right."""
        root = _root(qualified)
        if root != self.package and not (self.package == "torch" and root == "torch_xla"):
            return False
        if not self.name:
            return True
        related = re.split(r"\W+", f"{qualified} {row.new}")
        return self.name in related or (self.of_module and root == self.package)


def is_guarded(names: Names, node: ast.AST, row: OldCall, qualified: str) -> bool:
    """Whether a use of a row runs only in releases where it is right."""
    return any(guard.covers(row, qualified) for guard in _guards_around(names, node))


def _guards_around(names: Names, node: ast.AST) -> Iterator[Guard]:
    """Those of the tests that decide whether a node runs, also early returns and assertions above
    it, and of the other half of a `try` that supports old releases."""
    for outer, inner in names.around(node):
        reader = _Reader(names, names.scope_of(outer))
        for block in (getattr(outer, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and inner in block:
                for test in filter(None, map(early_test, block[: block.index(inner)])):
                    yield from reader.of_test(test)
        if isinstance(outer, _TESTS):
            # Also `hasattr(xm, "x") and xm.x()`.
            test = outer.values[0] if isinstance(outer, ast.BoolOp) else outer.test
            yield from reader.of_test(test)
        elif isinstance(outer, ast.Try) and inner in _fallbacks(outer):
            yield from reader.of_body(outer.body)
        elif isinstance(outer, ast.Try) and inner in outer.body:
            # `try: n = xm.old() except AttributeError: n = xr.new()`
            for handler in _fallbacks(outer):
                if _catches(handler, ("AttributeError",)):
                    yield from reader.of_body(handler.body)


@dataclass(frozen=True)
class _Reader:
    """Reads the guards of tests in a scope."""

    names: Names
    scope: Scope

    def _meanings(self, node: ast.expr) -> list[str]:
        return self.names.resolve(node, self.scope)

    def of_test(self, test: ast.expr, depth: int = 3) -> Iterator[Guard]:
        """`hasattr(xm, "x")`, `version.parse(torch.__version__) < ...`, `is_torch_version(...)`."""
        for node in ast.walk(test):
            if isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.Attribute) and node.attr == "__version__":
                yield from (Guard(_root(name)) for name in self._meanings(node.value))
            elif isinstance(node, ast.Attribute):
                yield from _of_word(node.attr)
            elif isinstance(node, ast.Name):
                yield from self._of_name(node, depth)
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                yield from _of_variable(node.left)

    def _of_call(self, node: ast.Call) -> list[Guard]:
        function = source_text(node.func).rpartition(".")[2]
        texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if function == "hasattr" and len(node.args) == 2:
            modules = self._meanings(node.args[0])
            small = {m for m in modules if "(" not in m and _root(m) not in _LARGE}
            return [Guard(_root(m), str(text), m in small) for m in modules for text in texts]
        if function in ("version", "get_distribution") and texts:
            # `importlib.metadata.version("torch")`
            return [Guard(_root(str(texts[0]).replace("-", "_")))]
        if function in ("get", "getenv") and node.args:
            return _of_variable(node.args[0])
        return []

    def _of_name(self, node: ast.Name, depth: int) -> list[Guard]:
        found = _of_word(node.id)
        if node.id in self.names.followed:
            meanings = self._meanings(node)
            found += [Guard(_root(m)) for m in meanings if m.endswith(".__version__")]
        elif not found and depth:
            # `new = hasattr(xm, "x")`, and `if new` below.
            for value in filter(_is_test, self.names.values(node.id)):
                found += self.of_test(value, depth - 1)
        return found

    def of_body(self, body: Iterable[ast.stmt]) -> Iterator[Guard]:
        """The packages that the body of a `try` imports or uses: its handler is about those."""
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from map(Guard, map(_root, imported_packages(node)))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield from map(Guard, map(_root, self._meanings(node)))


def has_alternative(names: Names, node: ast.AST) -> bool:
    """Whether a `try` around a node has a handler for old releases that does not raise, or a test
    expects the node to raise."""
    if any(isinstance(n, ast.With) and _expects_an_error(n) for n, _ in names.around(node)):
        return True
    tries = [(n, i) for n, i in names.around(node) if isinstance(n, ast.Try) and i in n.body]
    handlers = (handler for each, _ in tries for handler in _fallbacks(each))
    return any(not isinstance(handler.body[-1], ast.Raise) for handler in handlers)


def _expects_an_error(block: ast.With) -> bool:
    """`with pytest.raises(ImportError):`, `with self.assertRaises(...):`."""
    calls = of_kind([item.context_expr for item in block.items], ast.Call)
    return any(called_name(call) in ("raises", "assertRaises") for call in calls)


def _fallbacks(node: ast.Try) -> list[ast.ExceptHandler]:
    """Handlers for a missing name, which support old releases."""
    return [h for h in node.handlers if _catches(h, _MISSING) or _imports_instead(h)]


def _imports_instead(handler: ast.ExceptHandler) -> bool:
    """A handler for everything that imports something."""
    catches_all = handler.type is None or _catches(handler, ("Exception",))
    return catches_all and any(isinstance(s, ast.Import | ast.ImportFrom) for s in handler.body)


def _catches(handler: ast.ExceptHandler, wanted: Sequence[str]) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in wanted for kind in kinds)


def _of_variable(node: ast.expr) -> list[Guard]:
    """`"COLAB_TPU_ADDR" in os.environ`."""
    text = node.value if isinstance(node, ast.Constant) else None
    return [Guard(text)] if isinstance(text, str) and text.isupper() else []


def early_test(node: ast.AST) -> ast.expr | None:
    """The test of an early return, or of an assertion."""
    if isinstance(node, ast.If) and not (ends(node.body) or ends(node.orelse)):
        return None
    return node.test if isinstance(node, ast.Assert | ast.If) else None


def ends(body: Sequence[ast.stmt]) -> bool:
    """Whether nothing behind a body runs after it: it returns, raises or exits."""
    last = body[-1] if body else None
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return source_text(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return isinstance(last, _ENDS)


def _is_test(value: ast.expr | None) -> TypeGuard[ast.expr]:
    """Whether a value may be a guard's: a comparison, `hasattr(...)`, a parsed version."""
    if isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp):
        return True
    if isinstance(value, ast.Attribute):
        return value.attr == "__version__"
    return isinstance(value, ast.Call) and bool(
        re.search(r"hasattr|version", source_text(value)[:200], re.IGNORECASE)
    )


def _of_word(word: str) -> list[Guard]:
    """`is_torch_version`, `TORCH_2_0`, `_torch_greater_equal_1_13`: package and release."""
    if not _VERSION_WORD.search(word):
        return []
    lower = word.lower()
    known = next((package for package in _PACKAGES if package in lower), "")
    if known:
        return [Guard(known)]
    parts = set(re.split(r"[\W_]+", lower))
    return [Guard(package) for short, package in _SPELLINGS.items() if short in parts]


def _root(name: str) -> str:
    root = name.partition(".")[0].rstrip("()")
    return "lightning" if root == "pytorch_lightning" else root
