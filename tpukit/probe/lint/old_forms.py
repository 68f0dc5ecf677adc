"""Finds old forms without a qualified name: `x.add_(1, y)`, `dataiter.next()`, `loss.data[0]`."""

import ast
import re
from collections.abc import Iterator

from tpukit.knowledge.calls import rule_data
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.syntax import nodes_below, of_kind, source_text

_POSITIONAL = {"add_": 2, "sub_": 2, "addcmul_": 3, "addcdiv_": 3}
"""In-place method -> number of positional arguments of the form with the scalar first."""
_LOSS_ITEM = re.compile(r"loss\w*\.data\[0\]$", re.I)


def find_old_forms(names: Names) -> Iterator[tuple[ast.expr, str, str]]:
    """(place, row's id, text) of each."""
    of_tokenizers = rule_data("methods")
    for child in nodes_below(names.tree):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            method = child.func.attr
            given = len(child.args)
            if given == _POSITIONAL.get(method) and not child.keywords:
                yield child.func, "scalar-first", f"x.{method}(scalar, y)"
            elif method in of_tokenizers and not _is_of_its_class(child.func, names):
                yield child.func, of_tokenizers[method], f"tokenizer.{method}()"
            elif method == "next" and _iterates_a_loader(child, names):
                yield child.func, "iterator-next", source_text(child)[:40]
        elif isinstance(child, ast.Subscript) and _LOSS_ITEM.search(source_text(child)):
            yield child, "loss-data-item", source_text(child)


def _is_of_its_class(method: ast.Attribute, names: Names) -> bool:
    """Whether `self.method` or `super().method` stands in a class that defines the method."""
    if source_text(method.value) not in ("self", "super()"):
        return False
    outer = next((n for n, _ in names.around(method) if isinstance(n, ast.ClassDef)), None)
    functions = of_kind(outer.body, ast.FunctionDef) if outer else []
    return method.attr in [function.name for function in functions]


def _iterates_a_loader(call: ast.Call, names: Names) -> bool:
    """Whether `.next()` is called on `iter(loader)`; torch_xla's own iterators do have it."""
    if call.args or call.keywords or not isinstance(call.func, ast.Attribute):
        return False
    return all(_is_iter(value, names) for value in names.possible(call.func.value))


def _is_iter(node: ast.expr, names: Names) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) != 1:
        return False
    if not isinstance(node.func, ast.Name) or node.func.id != "iter":
        return False
    meanings = names.anywhere(node.args[0])
    if meanings:
        return all(meaning == "torch.utils.data.DataLoader()" for meaning in meanings)
    text = source_text(node.args[0]).lower()
    return "loader" in text and "device_loader" not in text
