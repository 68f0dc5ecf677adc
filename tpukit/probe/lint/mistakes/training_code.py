"""What a module shows about its training: optimizers, schedulers, loaders, softmaxes."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tpukit.probe.lint.cuda_forms import is_optimizer_step
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.syntax import method_of, nodes_below, source_text

Mistake = tuple[ast.expr | ast.stmt, str, str]
"""Place, rule's id, what stands there."""
SCHEDULERS = "torch.optim.lr_scheduler."
_LOADS = re.compile(r"load|dl\b|batches|_iter\b", re.I)
_SOFTMAX = ("torch.nn.functional.softmax", "torch.softmax", "torch.nn.Softmax()")


@dataclass
class TrainingCode:
    """One module."""

    tree: ast.Module
    names: Names
    text: str

    def means(self, node: ast.expr, wanted: Sequence[str]) -> bool:
        last = node.attr if isinstance(node, ast.Attribute) else ""
        if last and not any(name.rstrip("()").endswith(f".{last}") for name in wanted):
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
        made = any(name.startswith("torch.optim.") for name in known)
        return made and not self.scheduler_of(node) if known else is_optimizer_step(node)

    def scheduler_of(self, node: ast.Call) -> str:
        """The class of the scheduler that a call steps; empty for another call."""
        known = self.names.anywhere(node.func.value) if method_of(node) == "step" else []  # type: ignore[attr-defined]
        return next((name for name in known if name.startswith(SCHEDULERS)), "")

    # -- loaders ----------------------------------------------------------------------------------
    def reads_a_loader(self, loop: ast.AST) -> bool:
        """By its name, also behind `bar = tqdm(loader)`."""
        over = loop.iter if isinstance(loop, ast.For | ast.AsyncFor) else None
        return over is not None and (
            is_loader(over)
            or any(isinstance(n, ast.Name) and n.id in self._bars for n in nodes_below(over))
        )

    @cached_property
    def _bars(self) -> set[str]:
        """Names of progress bars over a loader."""
        return {
            source_text(node.targets[0])
            for node in self.assignments
            if isinstance(node.value, ast.Call)
            and "tqdm" in source_text(node.value.func)
            and any(map(is_loader, node.value.args))
        }

    @cached_property
    def assignments(self) -> list[ast.Assign]:
        return [node for node in nodes_below(self.tree) if isinstance(node, ast.Assign)]

    # -- softmaxes --------------------------------------------------------------------------------
    def is_softmax(self, value: ast.expr) -> bool:
        """Whether a value is a softmax's, or that of a model whose forward returns one."""
        if isinstance(value, ast.Name):
            made = [a.value for a in self.assignments
                    if any(source_text(t) == value.id for t in a.targets)
                    and value.id not in _names_in(a.value)]  # fmt: skip
            others = [v for v in made if not isinstance(v, ast.Name)]
            return bool(made) and all(map(self.is_softmax, others))
        if not isinstance(value, ast.Call):
            return False
        called = source_text(value.func)
        return (
            self.means(value.func, _SOFTMAX)
            or method_of(value) == "softmax"
            or called in self._stacks
            or self._instances.get(called) in self._softmax_classes
            or (called == "self" and self._class_around(value) in self._softmax_classes)
        )

    def _class_around(self, node: ast.expr) -> str:
        """The innermost class that holds a node; empty outside of classes."""
        around = [c for c in nodes_below(self.tree) if isinstance(c, ast.ClassDef)
                  and c.lineno <= node.lineno <= (c.end_lineno or 0)]  # fmt: skip
        return max(around, key=lambda each: each.lineno).name if around else ""

    @cached_property
    def _stacks(self) -> set[str]:
        return self.softmax_stacks(self.tree)

    @cached_property
    def _instances(self) -> dict[str, str]:
        """Name -> the class that it is made of, also with `.to(device)` behind it."""
        found: dict[str, str] = {}
        for node in self.assignments:
            made = re.match(r"(\w+)\(", source_text(node.value))
            if made and isinstance(node.targets[0], ast.Name | ast.Attribute):
                found.setdefault(source_text(node.targets[0]), made[1])
        return found

    @cached_property
    def _softmax_classes(self) -> set[str]:
        """Classes whose forward returns a softmax in every case."""
        forwards = [
            (node, part)
            for node in nodes_below(self.tree)
            if isinstance(node, ast.ClassDef)
            for part in node.body
            if isinstance(part, ast.FunctionDef) and part.name == "forward"
        ]
        return {node.name for node, forward in forwards if self._ends_in_softmax(node, forward)}

    def _ends_in_softmax(self, holder: ast.ClassDef, forward: ast.FunctionDef) -> bool:
        values = [n.value for n in nodes_below(forward) if isinstance(n, ast.Return)]
        return bool(values) and all(
            isinstance(value, ast.Call)
            and (
                self.means(value.func, _SOFTMAX)
                or source_text(value.func) in self.softmax_stacks(holder)
            )
            for value in values
        )

    def softmax_stacks(self, within: ast.AST) -> set[str]:
        """What holds a `Sequential` that ends in a softmax."""
        found: set[str] = set()
        for node in nodes_below(within):
            value = node.value if isinstance(node, ast.Assign) else None
            while method_of(value) in ("to", "cuda"):  # type: ignore[arg-type]
                value = value.func.value  # type: ignore[union-attr]
            last = value.args[-1] if isinstance(value, ast.Call) and value.args else None
            if isinstance(value, ast.Call) and isinstance(last, ast.Call):
                is_stack = self.means(value.func, ("torch.nn.Sequential",))
                if is_stack and self.means(last.func, ("torch.nn.Softmax",)):
                    found.update(source_text(t) for t in node.targets)  # type: ignore[attr-defined]
        return found


def is_loader(value: ast.expr) -> bool:
    """By its name."""
    return _LOADS.search(source_text(value)) is not None


def _names_in(value: ast.expr) -> set[str]:
    return {node.id for node in nodes_below(value) if isinstance(node, ast.Name)}
