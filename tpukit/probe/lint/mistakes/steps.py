"""Mistakes of the training step: gradients, losses, clipping and schedulers."""

import ast
import re
from collections.abc import Iterator, Sequence

from tpukit.probe.lint.mistakes.facts import Facts, Mistake
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    calls_of,
    holder,
    method_of,
    nodes_below,
    own_nodes,
    source_text,
)

_ELSEWHERE = (*FUNCTIONS, ast.ClassDef, ast.Lambda)


def in_loop(facts: Facts, loop: ast.For | ast.While | ast.AsyncFor) -> Iterator[Mistake]:
    inner = list(own_nodes(loop.body, _ELSEWHERE))
    backward = calls_of("backward", inner)
    if not backward:
        return
    steps = [call for call in calls_of("step", inner) if facts.is_optimizer_step(call)]
    if steps and not re.search(r"zero_grad|\.grad\b|set_to_none", facts.text):
        yield steps[0].func, "no-zero-grad", f"{source_text(steps[0])} in a loop"
    yield from _kept_losses(inner, {text for call in backward for text in _losses_of(call)})


def _losses_of(backward: ast.Call) -> Iterator[str]:
    """`loss` of its own `backward()`, of a scaled one's, and of `accelerator.backward(loss)`."""
    on = backward.func.value  # type: ignore[attr-defined]
    yield source_text(on)
    is_scaled = method_of(on) == "scale"
    if is_scaled or re.search(r"accelerator|fabric|engine", source_text(on)):
        yield from map(source_text, on.args if is_scaled else backward.args)


def _kept_losses(nodes: Sequence[ast.AST], losses: set[str]) -> Iterator[Mistake]:
    numbers = {
        source_text(target)
        for node in nodes
        if isinstance(node, ast.Assign)
        and re.search(r"\.(?:item|detach|tolist|cpu|data)\b|^float\(", source_text(node.value))
        for target in node.targets
    }
    kept: list[tuple[ast.expr | ast.stmt, ast.expr]] = [
        (node, node.value)
        for node in nodes
        if isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and source_text(node.target) not in losses
    ]
    kept += [(call, call.args[0]) for call in calls_of("append", nodes) if call.args]
    for node, value in kept:
        if set(map(source_text, _terms(value))) & losses - numbers:
            yield node, "loss-keeps-graph", source_text(node)[:60]  # type: ignore[arg-type]


def _terms(value: ast.expr) -> Iterator[ast.expr]:
    """What a sum, product or list is made of, where it is a name: `loss * n` has two."""
    if isinstance(value, ast.BinOp):
        yield from _terms(value.left)
        yield from _terms(value.right)
    elif isinstance(value, ast.List | ast.Tuple):
        for element in value.elts:
            yield from _terms(element)
    elif isinstance(value, ast.Name | ast.Attribute):
        yield value


# -- statements in their order -------------------------------------------------------------------
def in_order(facts: Facts, block: Sequence[ast.stmt]) -> Iterator[Mistake]:
    """Mistakes of one list of statements."""
    calls = [(n, s.value) for n, s in enumerate(block)
             if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]  # fmt: skip
    backward = [n for n, call in calls if method_of(call) == "backward"]
    steps = [(n, call) for n, call in calls if facts.is_optimizer_step(call)]
    for n, call in calls:
        method = method_of(call) or source_text(call.func).rpartition(".")[2]
        if method == "zero_grad":
            before = [b for b in backward if b < n][-1:]
            own = [at for at, s in steps if holder(s) == holder(call)]
            after = next((at for at in own if at > n), None)
            used = any(before and before[0] < at < n for at in own)
            if before and after and not used and not any(n < b < after for b in backward):
                yield call.func, "gradients-cleared", f"{source_text(call)} after backward()"
        elif method.startswith("clip_grad_") and backward:
            earlier = [at for at, _ in steps if backward[-1] < at < n]
            if earlier and not any(at > n for at, _ in steps):
                yield call.func, "clip-after-step", source_text(call)[:60]
        elif facts.is_scheduler_step(call) and _is_given_a_loss(facts, call):
            yield call.func, "scheduler-given-loss", source_text(call)[:60]
        elif (
            facts.is_scheduler_step(call)
            and not _steps_below(facts, block[:n])
            and _steps_below(facts, block[n + 1 :])
        ):
            yield call.func, "scheduler-first", source_text(call)
    if "unscale_" not in facts.text:
        yield from _scaled_clip(block)


def _is_given_a_loss(facts: Facts, step: ast.Call) -> bool:
    """Whether a scheduler that counts epochs takes a metric for the epoch."""
    known = facts.names.anywhere(step.func.value)  # type: ignore[attr-defined]
    is_metric = step.args and re.search("loss|acc|metric|score", source_text(step.args[0]), re.I)
    return bool(is_metric) and not any("Plateau" in name for name in known)


def _steps_below(facts: Facts, block: Sequence[ast.stmt]) -> bool:
    return any(facts.is_optimizer_step(n) for s in block for n in nodes_below(s))


def _scaled_clip(block: Sequence[ast.stmt]) -> Iterator[Mistake]:
    texts = [source_text(s.value) if isinstance(s, ast.Expr) else "" for s in block]
    scaled = [n for n, t in enumerate(texts) if re.search(r"\.scale\(.*\)\.backward\(", t)]
    for n, text in enumerate(texts):
        is_clip = re.match(r"(?:\w+\.)*clip_grad_\w+\(", text)
        if is_clip and scaled and scaled[0] < n and any(".step(" in t for t in texts[n:]):
            yield block[n], "clip-scaled", text[:60]
