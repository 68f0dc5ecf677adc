"""The rules that look for no name, and the walk that hands them the nodes of a module."""

import ast
from collections.abc import Iterable, Iterator

from tpukit.probe.lint.finding import ModuleFinding
from tpukit.probe.lint.names import Names, Scope
from tpukit.probe.lint.rules import evaluation, making, ranks, steps, training, xla
from tpukit.probe.lint.rules.code import Code
from tpukit.probe.lint.rules.rule import Found, Rule
from tpukit.probe.lint.source import Module
from tpukit.probe.lint.syntax import FUNCTIONS, children, source_text

MISTAKES: tuple[type[Rule], ...] = (
    training.NoZeroGrad, training.GradientsCleared, training.SchedulerFirst, evaluation.EvalNotLeft,
    evaluation.EvalWithGradients, evaluation.NeverInEval, training.LossKeepsGraph,
    making.SoftmaxBeforeLoss, making.SchedulerUnused, training.SchedulerGivenLoss,
    making.LoaderCycled, making.SamplerWithShuffle, making.SamplerWithoutEpoch,
    training.ClipAfterStep, training.ClipScaled, making.ModulesInList, making.EpochEndOutputs,
    making.OptimizerIndex, making.DropoutAlwaysOn, making.BestStateShared,
    training.AutocastUnscaled, ranks.WrapperAttribute, ranks.LocalRankArgument, ranks.PrepareOrder,
)  # fmt: skip
"""Rules for any PyTorch code."""
RANKS: tuple[type[Rule], ...] = (
    ranks.CollectiveUnderMaster, ranks.RankLeavesLoop, ranks.SavesOnEveryRank,
)  # fmt: skip
"""Rules for code that runs on several ranks."""
ON_TPU: tuple[type[Rule], ...] = (
    steps.ReadInStep, steps.WaitInStep, steps.SyncInStep, steps.GrowingShape,
    xla.PaddingToLongest, xla.NoDropLast, xla.ScalerOnXla, xla.Fp16Accelerator,
    xla.UnsynchronisedGradients,
)  # fmt: skip
"""Slow or wrong on a TPU."""
RULES = (*MISTAKES, *RANKS, *ON_TPU)


def may_hold(group: Iterable[type[Rule]], text: str) -> bool:
    """Whether a file may hold a finding of a group of rules, by its text."""
    return any(rule.is_worth_parsing(text) for rule in group)


def find_by_rules(module: Module, names: Names, *, to_xla: bool = False) -> list[ModuleFinding]:
    """What the rules find in a parsed module.

    to_xla: the module is to run on torch_xla, which it does not import yet: the rules for a TPU.
    """
    assert module.tree is not None
    code = Code(module.tree, names, module.text, to_xla)
    groups = (RANKS, ON_TPU) if to_xla else (MISTAKES, RANKS, ON_TPU)
    # What one rule of a group is about concerns the others.
    kinds = (kind for group in groups if to_xla or may_hold(group, module.text) for kind in group)
    rules = [kind(code) for kind in kinds if kind.concerns(code)]
    places = ((r, *each) for r, each in _Walk(code, rules).found()) if rules else ()
    found = [_finding(rule, module.span(node), old) for rule, node, old in places]
    return list(dict.fromkeys(found))


def _finding(rule: Rule, span: tuple[int, int, int, int], old: str) -> ModuleFinding:
    status = "removed" if rule.effect == "raises" else "habit"
    return ModuleFinding(*span, rule.id, old, rule.new, "XLA", status, effect=rule.effect)  # type: ignore[arg-type]


class _Walk:
    """One walk over a module, with the scope, the function and the conditions around each node."""

    def __init__(self, code: Code, rules: list[Rule]) -> None:
        self._code = code
        self._rules = rules
        self._visitors: dict[type, list[Rule]] = {}
        for rule in rules:
            for kind in rule.nodes:
                self._visitors.setdefault(kind, []).append(rule)

    def found(self) -> Iterator[tuple[Rule, Found]]:
        yield from self._visit(self._code.tree)
        yield from self._below(self._code.tree, self._code.names.module)
        for rule in self._rules:
            yield from ((rule, each) for each in rule.end())

    def _visit(self, node: ast.AST) -> Iterator[tuple[Rule, Found]]:
        for rule in self._visitors.get(type(node), ()):
            for each in rule.visit(node):
                yield rule, each

    def _below(self, node: ast.AST, scope: Scope) -> Iterator[tuple[Rule, Found]]:
        code = self._code
        for child in children(node):
            inner = code.names.scopes.get(child, scope)
            outer = code.function
            if isinstance(child, FUNCTIONS):
                code.function = child
            code.scope = inner
            if type(child) in self._visitors:
                yield from self._visit(child)
            if isinstance(child, ast.If):
                yield from self._branches(child, inner)
            else:
                yield from self._below(child, inner)
            code.function = outer

    def _branches(self, node: ast.If, scope: Scope) -> Iterator[tuple[Rule, Found]]:
        test, under = source_text(node.test), self._code.under
        yield from self._below(ast.Expression(node.test), scope)
        for body, text in ((node.body, test), (node.orelse, f"not ({test})")):
            self._code.under = (*under, (text, node, scope))
            yield from self._below(ast.Module(body, []), scope)
        self._code.under = under
