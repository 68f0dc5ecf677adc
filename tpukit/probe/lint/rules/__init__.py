"""The rules that look for no name, and the walk that hands them the nodes of a module."""

import ast

from tpukit.probe.lint.finding import ModuleFinding
from tpukit.probe.lint.names import Names
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


def find_by_rules(module: Module, names: Names, *, to_xla: bool = False) -> list[ModuleFinding]:
    """What the rules find in a parsed module.

    to_xla: the module is to run on torch_xla, which it does not import yet: the rules for a TPU.
    """
    assert module.tree is not None
    code = Code(module.tree, names, module.text, to_xla)
    kinds = (*RANKS, *ON_TPU) if to_xla else RULES
    rules = [kind(code) for kind in kinds if kind.concerns(code)]
    places = _Walk(code, rules).found() if rules else ()
    found = [_finding(rule, module.span(node), old) for rule, (node, old) in places]
    return list(dict.fromkeys(found))


def _finding(rule: Rule, span: tuple[int, int, int, int], old: str) -> ModuleFinding:
    status = "removed" if rule.effect == "raises" else "habit"
    return ModuleFinding(*span, rule.id, old, rule.new, "XLA", status, effect=rule.effect)  # type: ignore[arg-type]


class _Walk:
    """One walk over a module, with the function and the conditions around each node."""

    def __init__(self, code: Code, rules: list[Rule]) -> None:
        self._code = code
        self._rules = rules
        self._found: list[tuple[Rule, Found]] = []
        kinds = {kind for rule in rules for kind in rule.nodes} | {*FUNCTIONS, ast.If}
        self._visitors = {kind: [r for r in rules if kind in r.nodes] for kind in kinds}

    def found(self) -> list[tuple[Rule, Found]]:
        self._visit(self._code.tree)
        for rule in self._rules:
            self._found += ((rule, each) for each in rule.end())
        return self._found

    def _visit(self, node: ast.AST) -> None:
        code = self._code
        outer = code.function
        if isinstance(node, FUNCTIONS):
            code.function = node
        for rule in self._visitors.get(type(node), ()):
            self._found += ((rule, each) for each in rule.visit(node))
        if isinstance(node, ast.If):
            self._branches(node)
        else:
            self._below(node)
        code.function = outer

    def _below(self, node: ast.AST) -> None:
        for child in children(node):
            if type(child) in self._visitors:
                self._visit(child)
            else:
                self._below(child)

    def _branches(self, node: ast.If) -> None:
        test, under = source_text(node.test), self._code.under
        self._below(ast.Expression(node.test))
        for body, text in ((node.body, test), (node.orelse, f"not ({test})")):
            self._code.under = (*under, (text, node))
            self._below(ast.Module(body, []))
        self._code.under = under
