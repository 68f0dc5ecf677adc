"""What rules ask of a module: its names, optimizers, schedulers, loaders, softmaxes, and what
stands around a node."""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar, cast

from tpukit.knowledge.calls import name_group
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.rules.roles import LOADS, is_optimizer_step
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    called_name,
    holder,
    method_of,
    nodes_below,
    of_kind,
    run_once,
    source_text,
)

Part = TypeVar("Part")
SCHEDULERS = "torch.optim.lr_scheduler."


@dataclass
class Code:
    """One module."""

    tree: ast.Module
    names: Names
    text: str
    to_xla: bool = False
    """Whether it is to run on torch_xla, which it does not import yet."""
    _activated: dict[str, set[str]] = field(default_factory=dict)
    _parts: dict[type, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.packages = self.names.packages
        self.uses_xla = self.to_xla or "torch_xla" in self.packages

    @cached_property
    def run_once(self) -> set[str]:
        """The functions that run once."""
        return run_once(self.tree)

    def part(self, kind: type[Part]) -> Part:
        """What several rules know of the module together, made once."""
        if kind not in self._parts:
            self._parts[kind] = kind(self)  # type: ignore[call-arg]
        return cast(Part, self._parts[kind])

    # -- what stands around a node ----------------------------------------------------------------
    def body_around(self, node: ast.AST) -> Any:
        """The function around a node; the module where there is none."""
        return next(iter(self.names.outer(node, *FUNCTIONS)), self.tree)

    def conditions(self, node: ast.AST) -> list[tuple[str, ast.If]]:
        """The conditions that must hold for a node to run, outermost first, as texts, and their
        statements."""
        ifs = [(n, inner) for n, inner in self.names.around(node) if isinstance(n, ast.If)][::-1]
        return [(f"not ({self._tests[n]})" if inner in n.orelse else self._tests[n], n)
                for n, inner in ifs if inner is not n.test]  # fmt: skip

    @cached_property
    def _tests(self) -> dict[ast.If, str]:
        return {n: source_text(n.test) for n in of_kind(nodes_below(self.tree), ast.If)}

    def runs_under(self, test: re.Pattern[str], node: ast.AST) -> bool:
        """Whether one of the conditions around a node is such a test."""
        return any(test.search(text) for text, _ in self.conditions(node))

    # -- what names mean --------------------------------------------------------------------------
    def means(self, node: ast.expr, group: str) -> bool:
        """Whether an expression is one of a group of names."""
        wanted = name_group(group)
        if isinstance(node, ast.Attribute) and node.attr not in _lasts(wanted):
            return False
        return any(name in wanted for name in self.names.anywhere(node))

    def is_optimizer_step(self, node: ast.AST) -> bool:
        """By what it is made of; where another module makes it, by its name. A gradient scaler
        steps the optimizer that it is given."""
        if not isinstance(node, ast.Call) or method_of(node) != "step":
            return False
        known = self.names.anywhere(node.func.value)  # type: ignore[attr-defined]
        if any("GradScaler" in name for name in known):
            return bool(node.args)
        known = [name for name in known if name.startswith("torch.")]
        made = any(name.startswith("torch.optim.") for name in known)
        return made and not self.scheduler_of(node) if known else is_optimizer_step(node)

    def scheduler_of(self, node: ast.Call) -> str:
        """The class of the scheduler that a call steps; empty for another call."""
        if method_of(node) != "step":
            return ""
        known = self.names.anywhere(node.func.value)  # type: ignore[attr-defined]
        is_torch = any(name.startswith("torch.") for name in known)
        if not is_torch and not node.args and not node.keywords:
            return "by name" if re.search(r"(?:^|\.)(?:lr_?)?scheduler$", holder(node)) else ""
        return next((name for name in known if name.startswith(SCHEDULERS)), "")

    def reads_a_loader(self, loop: ast.AST) -> bool:
        """By its name, also behind `bar = tqdm(loader)`, or by `next` of an `iter(loader)`."""
        over = loop.iter if isinstance(loop, ast.For | ast.AsyncFor) else ast.Constant(0)
        taken = [n.args[0] for n in nodes_below(loop) if called_name(n) == "next" and n.args]  # type: ignore[attr-defined]
        names = of_kind((*nodes_below(over), *taken), ast.Name)
        values = [value for name in names for value in self.names.possible(name)]
        made = (value for value in values if called_name(value) in ("tqdm", "iter"))
        return is_loader(over) or any(map(is_loader, made))

    # -- softmaxes --------------------------------------------------------------------------------
    def is_activated(self, value: ast.expr, by: str) -> bool:
        """Whether a value is a softmax's (or a sigmoid's), or that of a model whose forward
        returns one."""
        own = value.id if isinstance(value, ast.Name) else ""
        made = [v for v in self.names.possible(value)
                if not own or all(getattr(n, "id", "") != own for n in nodes_below(v))]  # fmt: skip
        return bool(made) and all(self._is_of(v, by, self._classes(by)) for v in made)

    def _is_of(self, value: ast.expr | None, by: str, classes: Iterable[str] = ()) -> bool:
        """classes: those of the module whose forward returns one."""
        if not isinstance(value, ast.Call):
            return False
        if self.means(value.func, by) or method_of(value) == by:
            return True
        if source_text(value.func) == "self":
            return any(c.name in classes for c in self.names.outer(value, ast.ClassDef)[:1])
        for made in self.names.possible(value.func):
            is_sent = method_of(made) in ("to", "cuda")
            model = made.func.value if is_sent else made  # type: ignore[attr-defined]
            last = model.args[-1] if isinstance(model, ast.Call) and model.args else None
            if isinstance(last, ast.Call) and self.means(model, "sequential"):
                return self.means(last, by)
            if called_name(model) in classes:
                return True
        return False

    def _classes(self, by: str) -> set[str]:
        """Classes whose forward returns a softmax (or a sigmoid) in every case."""
        if by in self._activated:
            return self._activated[by]
        found = self._activated[by] = set()
        for node in of_kind(nodes_below(self.tree), ast.ClassDef):
            for part in of_kind(node.body, ast.FunctionDef):
                values = [n.value for n in of_kind(nodes_below(part), ast.Return)]
                if part.name == "forward" and values and all(self._is_of(v, by) for v in values):
                    found.add(node.name)
        return found


@cache
def _lasts(names: frozenset[str]) -> frozenset[str]:
    """The last parts of qualified names."""
    return frozenset(name.rstrip("()").rpartition(".")[2] for name in names)


def is_loader(value: ast.expr) -> bool:
    """By its name."""
    return LOADS.search(source_text(value)) is not None
