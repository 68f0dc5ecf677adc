"""Evaluations that are never entered, never left, or keep gradients."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from tpukit.probe.lint.rules.roles import EVALUATION_LOADER, MODEL, OTHER_MODEL
from tpukit.probe.lint.rules.rule import Found, Rule
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    LOOPS,
    called_here,
    called_name,
    calls_in,
    calls_of,
    holder,
    is_without_gradients,
    nodes_below,
    of_kind,
    own_code,
    source_text,
    trains,
    without_gradients,
)

_NO_GRADIENTS = re.compile(
    r"no_grad|inference_mode|set_grad_enabled|requires_grad|(?<!zero_)grad\("
)
_EVALUATION = re.compile(r"\.train\((?:mode=)?(?:True|False|\w*(?:mode|train)\w*)\)|\.training\b")
_OF_A_MODEL = re.compile(rf"(?:self\.)?({MODEL.pattern})\b", re.I)
_RUNS_A_MODEL = re.compile(rf"{MODEL.pattern}\.?\w*\(", re.I)


class NeverInEval(Rule):
    """A loop over a loader under `torch.no_grad()` runs the model that the file trains, and
    nothing in the file calls `eval()`. `no_grad` switches gradients off, not drop-out or batch
    statistics: the metric is that of a model in training. Call `model.eval()` before the loop and
    `model.train()` after it. A loop that uses no result of the model (it renews batch statistics)
    is not an evaluation."""

    id = "never-in-eval"
    effect = "measures with drop-out and batch statistics of its own"
    new = "model.eval() before the evaluation, model.train() after it"
    wrong = (
        "def test(model, loader):\n    with torch.no_grad():\n        for x in loader:\n"
        "            total += model(x)\n"
        "for x in loader:\n    model(x).backward()\n    optimizer.step()"
    )
    right = wrong.replace("with", "model.eval()\n    with")
    words = (".backward(", "step(")

    def visit(self, node: Any) -> Iterator[Found]:
        if ".eval()" in self.code.text or _EVALUATION.search(self.code.text):
            return
        nodes = nodes_below(node)
        trained = {_model_called(n) for n in of_kind(nodes, *LOOPS, *FUNCTIONS) if trains(n)}
        bare = without_gradients(nodes)
        for loop in sorted(of_kind(nodes, ast.For), key=lambda each: each.iter.lineno):
            is_evaluation = (
                loop in bare
                or EVALUATION_LOADER.search(source_text(loop.iter))
                or any(map(is_without_gradients, loop.body))
            )
            if not is_evaluation or trains(loop) or not self.code.reads_a_loader(loop):
                continue
            if not _calibrates(loop) and (model := _model_called(loop)) in trained - {""}:
                yield loop.iter, f"{model} without eval()"
                return


class EvalNotLeft(Rule):
    """The loop that trains calls `model.eval()`, and nothing in the file calls `train()`: from the
    second epoch on there is no drop-out, and batch statistics do not change. Call `model.train()`
    at the beginning of each epoch."""

    id = "eval-not-left"
    effect = "trains without drop-out and with fixed batch statistics from then on"
    new = "model.train() before the next epoch"
    wrong = (
        "for epoch in range(9):\n    for x in loader:\n"
        "        model(x).backward()\n    model.eval()"
    )
    right = wrong.replace(":\n    for", ":\n    model.train()\n    for")
    words = (".backward(", "step(", ".eval()")

    def visit(self, node: Any) -> Iterator[Found]:
        if re.search(r"\.train\(|\btraining\s*=", self.code.text):
            return
        nodes = nodes_below(node)
        evaluations = {f.name: _evaluations(f) for f in of_kind(nodes, *FUNCTIONS)}
        for loop in of_kind(nodes, *LOOPS):
            inner = list(own_code(loop.body))
            if calls_of("backward", inner):
                left = _evaluations(loop)
                left += [call for n in inner for call in evaluations.get(called_name(n), ())]
                left = [call for call in left if not OTHER_MODEL.search(holder(call))]
                for first in sorted(left, key=lambda call: call.lineno)[:1]:
                    yield first.func, source_text(first)


class EvalWithGradients(Rule):
    """A function or script calls `model.eval()` and runs a loader without `torch.no_grad()` or
    `inference_mode()`, neither in it nor around its calls in this file. `eval()` does not switch
    gradients off: every batch keeps its activations for a backward pass."""

    id = "eval-with-gradients"
    effect = "keeps activations for a backward pass that never comes"
    new = "with torch.no_grad(): (or inference_mode) around the evaluation"
    wrong = "def validate(model, loader):\n    model.eval()\n    for x in loader:\n        model(x)"
    right = f"@torch.no_grad()\n{wrong}"
    nodes = (*FUNCTIONS, ast.Module)
    words = (".eval()",)
    sign = re.compile(
        r"(?i)\.eval\(\)\n[\s\S]*"
        r"(?:for .{0,200}(?:load|batches|dl\b|_iter\b|iterator)|\bnext\(\w+\))"
    )

    def visit(self, node: Any) -> Iterator[Found]:
        """A function or a script that calls `eval()`, then reads a loader."""
        name = getattr(node, "name", "")
        evaluates = sorted(_evaluations(node), key=lambda call: call.lineno)
        if not evaluates or name in self._called_without_gradients():
            return
        loops = list(filter(self.code.reads_a_loader, of_kind(own_code(node.body), *LOOPS)))
        loops.sort(key=lambda loop: loop.lineno)
        # Of a script, another loop may be without gradients.
        bare = set() if name else without_gradients(nodes_below(node))
        for call in evaluates:
            behind = (n for n in loops if n.end_lineno > call.lineno
                      and (n.lineno > call.lineno or not trains(n)))  # fmt: skip
            loop = next(behind, None)
            model = holder(call).partition(".")[0]
            if loop and loop not in bare and self._keeps(model, loop, node if name else loop):
                yield call.func, f"{name}() evaluates" if name else "the script evaluates"
                return

    def _keeps(self, model: str, loop: ast.AST, around: ast.AST) -> bool:
        """Whether a loop runs a model, trains nothing, and nothing around it switches them off."""
        if model not in {n.id for n in of_kind(nodes_below(loop), ast.Name)}:
            return False
        called = {called_here(n) for n in nodes_below(loop)} - {""}
        parts = [n for n in nodes_below(self.code.tree) if getattr(n, "name", "") in called]
        if trains(loop) or any(map(trains, of_kind(parts, *FUNCTIONS))):
            return False
        return not any(map(_NO_GRADIENTS.search, map(ast.unparse, [around, *parts])))

    def _called_without_gradients(self) -> set[str]:
        """Functions that the module calls where no gradients are recorded."""

        def is_bare(node: ast.AST) -> bool:
            around = [*getattr(node, "decorator_list", ()), *getattr(node, "items", ())]
            return any(map(_NO_GRADIENTS.search, map(ast.unparse, around)))

        bare = filter(is_bare, nodes_below(self.code.tree))
        return {called_name(n) for node in bare for n in nodes_below(node)} - {""}


def _evaluations(node: Any) -> list[ast.Call]:
    """The calls of `eval()` in the own body of a function, a loop or a module."""
    return [call for call in calls_of("eval", own_code(node.body)) if not call.args]


def _model_called(loop: ast.AST) -> str:
    """What a loop calls that is named as a model: `model(x)`, `net.loss(x)`."""
    functions = (source_text(call.func) for call in calls_in(loop))
    return next((root[1] for root in map(_OF_A_MODEL.match, functions) if root), "")


def _calibrates(loop: ast.AST) -> bool:
    """Whether a loop only runs the model, for its batch statistics: no result is used."""
    nodes = nodes_below(loop)
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
    used = [n.value for n in of_kind(nodes, *kinds) if n.value]
    used += [value for call in calls_of("append", nodes) for value in call.args]
    return not any(map(_RUNS_A_MODEL.search, map(source_text, used)))
