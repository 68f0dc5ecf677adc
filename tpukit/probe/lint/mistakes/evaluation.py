"""Mistakes of evaluation: never entered, never left, with gradients."""

import ast
import re
from collections.abc import Iterator
from functools import partial

from tpukit.probe.lint.mistakes.facts import Facts, Mistake
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    LOOPS,
    calls_of,
    nodes_below,
    own_nodes,
    source_text,
    trains,
)

_NO_GRADIENTS = re.compile(
    r"no_grad|inference_mode|set_grad_enabled|requires_grad|(?<!zero_)grad\("
)
_EVALUATION = re.compile(
    r"\.eval\(|\.train\((?:mode=)?(?:True|False|\w*(?:mode|train)\w*)\)|\.training\b"
)
_own = partial(own_nodes, without=(*FUNCTIONS, ast.ClassDef, ast.Lambda))


def never_in_eval(facts: Facts) -> Iterator[Mistake]:
    """The first loop over a loader without gradients that runs the model that is trained."""
    if _EVALUATION.search(facts.text):
        return
    nodes = list(nodes_below(facts.tree))
    trained = {_model_called(n) for n in nodes if isinstance(n, LOOPS) and trains(n)}
    found = [
        (loop.iter, model)
        for node in nodes
        if _is_without_gradients(node)
        for loop in nodes_below(node)
        if isinstance(loop, ast.For)
        and facts.reads_a_loader(loop)
        and not trains(loop)
        and not _calibrates(loop)
        and (model := _model_called(loop)) in trained - {""}
    ]
    for place, model in sorted(found, key=lambda each: each[0].lineno)[:1]:
        yield place, "never-in-eval", f"{model} without eval()"


def _is_without_gradients(node: ast.AST) -> bool:
    """A `with torch.no_grad():`, or a function under such a decorator."""
    around = [i.context_expr for i in node.items] if isinstance(node, ast.With) else []
    around += getattr(node, "decorator_list", ())
    return any(re.search(r"\b(?:no_grad|inference_mode)\b", source_text(a)) for a in around)


def eval_not_left(facts: Facts) -> Iterator[Mistake]:
    """The first `eval()` in a loop that trains, or in what it calls, where nothing trains again."""
    if re.search(r"\.train\(|\btraining\s*=", facts.text):
        return
    nodes = list(nodes_below(facts.tree))
    evaluations = {f.name: _evaluations(f) for f in nodes if isinstance(f, FUNCTIONS)}
    for loop in nodes:
        inner = list(_own(loop.body)) if isinstance(loop, LOOPS) else []
        if calls_of("backward", inner):
            called = [source_text(n.func).rpartition(".")[2] for n in inner
                      if isinstance(n, ast.Call)]  # fmt: skip
            left = [call for call in calls_of("eval", inner) if not call.args]
            left += [call for name in called for call in evaluations.get(name, ())]
            if left:
                first = min(left, key=lambda call: call.lineno)
                yield first.func, "eval-not-left", source_text(first)


def with_gradients(
    facts: Facts, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
) -> Iterator[Mistake]:
    """A function or a script that calls `eval()`, then reads a loader, with gradients."""
    evaluates = _evaluations(node)
    if not evaluates:
        return
    name = getattr(node, "name", "")
    loops = [n for n in _own(node.body) if isinstance(n, LOOPS) and facts.reads_a_loader(n)]
    line = evaluates[0].lineno
    loops = [n for n in loops if n.lineno > line or ((n.end_lineno or 0) > line and not trains(n))]
    if not loops or any(map(trains, loops)) or name in _called_without_gradients(facts):
        return
    if not _NO_GRADIENTS.search(ast.unparse(node)):
        where = f"{name}()" if name else "the script"
        yield evaluates[0].func, "eval-with-gradients", f"{where} evaluates"


def _evaluations(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) -> list[ast.Call]:
    """The calls of `eval()` in a function's own body."""
    return [call for call in calls_of("eval", _own(node.body)) if not call.args]


def _called_without_gradients(facts: Facts) -> set[str]:
    """Functions that the module calls where no gradients are recorded."""
    return {
        source_text(call.func).rpartition(".")[2]
        for node in nodes_below(facts.tree)
        if isinstance(node, ast.With)
        and any(_NO_GRADIENTS.search(source_text(i.context_expr)) for i in node.items)
        for call in nodes_below(node)
        if isinstance(call, ast.Call)
    }


def _model_called(loop: ast.AST) -> str:
    """What a loop calls that is named as a model: `model(x)`, `net.loss(x)`."""
    calls = (n.func for n in nodes_below(loop) if isinstance(n, ast.Call))
    roots = (re.match(r"(?:self\.)?(\w*model|net\w*)\b", source_text(f), re.I) for f in calls)
    return next((root[1] for root in roots if root), "")


def _calibrates(loop: ast.AST) -> bool:
    """Whether a loop only runs the model, for its batch statistics: no result is used."""
    return not any(
        isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return)
        and re.search(r"(?:model|net)\w*\.?\w*\(", source_text(n.value) if n.value else "", re.I)
        for n in nodes_below(loop)
    )
