"""The rules that look for no name, and the one walk that hands them the nodes of a module."""

import ast

from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.rules import evaluation, making, ranks, steps, training, xla
from tpukit.probe.lint.rules.code import Code
from tpukit.probe.lint.rules.rule import Rule
from tpukit.probe.lint.source import Module
from tpukit.probe.lint.syntax import nodes_below

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


def find_by_rules(module: Module, names: Names, *, to_xla: bool = False) -> list[Finding]:
    """What the rules find in a parsed module.

    to_xla: the module is to run on torch_xla, which it does not import yet: the rules for a TPU.
    """
    assert module.tree is not None
    code = Code(module.tree, names, module.text, to_xla)
    kinds = (*RANKS, *ON_TPU) if to_xla else RULES
    rules = [each(code) for each in kinds if each.concerns(code)]
    by_kind: dict[type[ast.AST], list[Rule]] = {}
    for rule in rules:
        for kind in rule.nodes:
            by_kind.setdefault(kind, []).append(rule)
    found: dict[Finding, None] = {}
    for node in nodes_below(module.tree) if rules else ():
        for rule in by_kind.get(type(node), ()):
            for place, old in rule.visit(node):
                found[_finding(rule, module.span(place), old)] = None
    return list(found)


def _finding(rule: Rule, span: tuple[int, int, int, int], old: str) -> Finding:
    status = "removed" if rule.effect == "raises" else "habit"
    return Finding(*span, rule.id, old, rule.new, "XLA", status, effect=rule.effect)  # type: ignore[arg-type]
