"""Decides which DataLoaders feed training: `drop_last` elsewhere would lose rows of the result."""

import ast
import re
from collections.abc import Iterator

from tpukit.probe.lint.rules.code import Code
from tpukit.probe.lint.rules.roles import EVALUATION_DATA, TRAINING_DATA
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    argument,
    called_name,
    is_without_gradients,
    nodes_below,
    of_kind,
    source_text,
    trains,
)

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SHUFFLES = re.compile(r"(?:Distributed|Random)Sampler\((?!.*shuffle=(?!True))")
_ROWS = {"MNIST": 60_000, "FashionMNIST": 60_000, "CIFAR10": 50_000, "CIFAR100": 50_000}
"""Data set -> samples for training."""
_DATA = ("dataset", "sampler")


class Loaders:
    """The calls of DataLoader in one module, and what surrounds them."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._names = code.names

    def feeds_training(self, call: ast.Call) -> bool:
        """Whether names around it, its `shuffle` or a loop with a backward pass show that."""
        words = " ".join(self._words(call))
        is_counted = called_name(self._names.parents.get(call, call)) == "len"  # and no more
        if EVALUATION_DATA.search(words) or is_counted or self._one_batch(call):
            return False
        loops = self._loops_over(call)
        around = (self._names.outer(loop, ast.AST) for loop in loops)
        if loops and all(any(map(is_without_gradients, each)) for each in around):
            return False
        shuffle = argument(call, "shuffle", 2)
        values = self._names.possible(shuffle) if shuffle else []
        shuffles = any(isinstance(value, ast.Constant) and value.value for value in values)
        sampler = argument(call, "sampler")
        shares = self._names.possible(sampler) if sampler else []
        shuffles |= any(_SHUFFLES.search(source_text(value)) for value in shares)
        return bool(TRAINING_DATA.search(words)) or shuffles or any(map(trains, loops))

    def fills_batches(self, call: ast.Call) -> bool:
        """Whether none is smaller: batches of 1 (also by a command line's default) or of a size
        that divides a public data set."""
        size, data = argument(call, "batch_size", 1), argument(call, "dataset", 0)
        option = getattr(size, "attr", "\0").replace("_", "[-_]")
        defaults = re.findall(rf"--{option}[\"'][^)]*default\s*=\s*(\d+)\b", self._code.text)
        sizes = set(defaults or (map(source_text, self._names.possible(size)) if size else ()))
        values = self._names.possible(data) if data and not argument(call, "sampler") else ()
        made = [_ROWS.get(called_name(value), 0) for value in values]
        divides = (s.isdigit() and n > 0 and n % int(s) == 0 for n in made or [0] for s in sizes)
        return sizes <= {"1", "None"} or all(divides)

    def _words(self, call: ast.Call) -> Iterator[str]:
        """Names of what it is assigned to, of its data, and of the function around it."""
        data = [*call.args[:1], *(k.value for k in call.keywords if k.arg in _DATA)]
        yield from (_words_of(name) for value in data for name in _names_in(value))
        for node, inner in self._names.around(call):
            if isinstance(node, FUNCTIONS):
                name = _words_of(node.name)
                yield "" if TRAINING_DATA.search(name) and EVALUATION_DATA.search(name) else name
                return
            if isinstance(node, ast.Assign):
                yield from (_words_of(name) for t in node.targets for name in _names_in(t))
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                yield from (_words_of(name) for name in _names_in(node.target))
            elif isinstance(node, ast.keyword) and node.arg:
                yield _words_of(node.arg)
            elif isinstance(node, ast.Dict):
                keys = [k for k, v in zip(node.keys, node.values, strict=True) if v is inner]
                yield from (_words_of(name) for key in keys if key for name in _names_in(key))
            elif isinstance(node, ast.DictComp):
                yield from (_words_of(n) for g in node.generators for n in _names_in(g.iter))

    def _targets(self, call: ast.Call) -> set[str]:
        """The plain names that hold the loader."""
        statements = self._names.outer(call, ast.stmt)[:1]
        targets = (t for n in of_kind(statements, ast.Assign) for t in n.targets)
        return {target.id for target in of_kind(targets, ast.Name)}

    def _one_batch(self, call: ast.Call) -> bool:
        """Whether `next(iter(loader))` is its only use."""
        targets = self._targets(call)
        uses: list[ast.expr] = [n for n in of_kind(nodes_below(self._code.tree), ast.Name)
                                if n.id in targets and isinstance(n.ctx, ast.Load)]  # fmt: skip
        calls = (self._names.outer(use, ast.AST)[:2] for use in uses or [call])
        return all(list(map(called_name, two)) == ["iter", "next"] for two in calls)

    def _loops_over(self, call: ast.Call) -> list[ast.For]:
        targets = self._targets(call)
        loops = of_kind(nodes_below(self._code.tree), ast.For)
        return [loop for loop in loops if targets & set(_names_in(loop.iter))]


def _names_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value[:80]


def _words_of(name: str) -> str:
    """`validLoader` as `valid_loader`."""
    return _CAMEL.sub("_", name).lower()
