"""Mistakes of the step of a loop: gradients, losses, clipping, schedulers."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from tpukit.probe.lint.rules.code import Code
from tpukit.probe.lint.rules.rule import BLOCKS, Found, Rule, blocks_of
from tpukit.probe.lint.syntax import (
    ELSEWHERE,
    LOOPS,
    argument,
    called_name,
    calls_of,
    holder,
    is_constant,
    method_of,
    nodes_below,
    of_kind,
    own_code,
    own_nodes,
    source_text,
    without_gradients,
)

_CLEARS = re.compile(r"zero_grad|\.grad\b|set_to_none")
_SCALES = re.compile("scaler|accelerator|fabric|deepspeed|engine|bf16|bfloat16", re.I)
_FP16 = ("torch.float16", "torch.half")
_NUMBERS = re.compile(r"\.(?:item|detach|tolist|cpu|data)\b|^float\(")


class _OfLoop(Rule):
    """A rule for loops with a backward pass."""

    nodes = LOOPS
    words: ClassVar[tuple[str, ...]] = (".backward(", "step(")

    def visit(self, node: Any) -> Iterator[Found]:
        inner = list(own_code(node.body))
        if calls_of("backward", inner):
            yield from self.in_step(node, inner)

    def in_step(self, loop: ast.For | ast.While, nodes: Sequence[ast.AST]) -> Iterator[Found]:
        """nodes: those of the loop's own code."""
        raise NotImplementedError


class NoZeroGrad(_OfLoop):
    """`backward()` adds to `.grad`. A loop that calls it and the optimizer's `step()`, in a file
    that clears gradients nowhere, steps along the sum of all gradients so far. Call
    `optimizer.zero_grad()` in each step."""

    id = "no-zero-grad"
    effect = "gradients add up over all steps"
    new = "optimizer.zero_grad() in each step"
    wrong = "for x in loader:\n    model(x).backward()\n    optimizer.step()"
    right = wrong.replace(":\n", ":\n    optimizer.zero_grad()\n")

    def in_step(self, loop: ast.For | ast.While, nodes: Sequence[ast.AST]) -> Iterator[Found]:
        for call in filter(self.code.is_optimizer_step, calls_of("step", nodes)):
            classes = self.code.names.outer(loop, ast.ClassDef)
            # A class without bases clears what it has itself.
            is_own = classes and not classes[-1].bases and holder(call).startswith("self.")
            if not _CLEARS.search(ast.unparse(classes[-1]) if is_own else self.code.text):
                yield call.func, f"{source_text(call)} in a loop"
            return


class AutocastUnscaled(_OfLoop):
    """On a GPU `autocast` computes in fp16 unless `dtype` says otherwise. Gradients below 6e-8
    become zero without a `torch.amp.GradScaler`. Use one, or `dtype=torch.bfloat16`."""

    id = "autocast-unscaled"
    effect = "small gradients become zero in fp16"
    new = "torch.amp.GradScaler around backward() and step(), or dtype=torch.bfloat16"
    words = (".backward(", "step(", "autocast")
    wrong = (
        'for x in loader:\n    with torch.autocast("cuda"):\n        loss = model(x)\n'
        "    loss.backward()"
    )
    right = wrong.replace('"cuda"', '"cuda", dtype=torch.bfloat16')

    def in_step(self, loop: ast.For | ast.While, nodes: Sequence[ast.AST]) -> Iterator[Found]:
        if not _SCALES.search(self.code.text):
            for item in (i for n in of_kind(nodes, ast.With) for i in n.items):
                if self._is_fp16(item.context_expr):
                    yield item.context_expr, source_text(item.context_expr)[:60]

    def _is_fp16(self, context: ast.expr) -> bool:
        """Whether a context is a GPU's autocast to fp16, its default."""
        if not isinstance(context, ast.Call) or not self.code.means(context.func, "autocast"):
            return False
        is_cuda = self.code.means(context.func, "cuda-autocast")
        dtype = argument(context, "dtype", 1)
        enabled = argument(context, "enabled", 0 if is_cuda else None)
        device = argument(context, "device_type", 0)
        on_gpu = is_cuda or (device is not None and "cuda" in source_text(device))
        is_off = is_constant(enabled, False)
        return on_gpu and not is_off and (not dtype or source_text(dtype) in _FP16)


class LossKeepsGraph(_OfLoop):
    """`total += loss` or `losses.append(loss)` with the loss that `backward()` was called on keeps
    each step's graph alive, and memory grows. Add `loss.detach()`; `loss.item()` waits for the
    device."""

    id = "loss-keeps-graph"
    effect = "keeps each step's graph: memory grows"
    new = "loss.detach() (.item() waits for the device)"
    wrong = "for x in loader:\n    loss = model(x)\n    loss.backward()\n    losses.append(loss)"
    right = wrong.replace("append(loss)", "append(loss.detach())")

    def in_step(self, loop: ast.For | ast.While, nodes: Sequence[ast.AST]) -> Iterator[Found]:
        losses = {text for call in calls_of("backward", nodes) for text in _losses_of(call)}
        nodes = list(own_nodes(loop.body, (*ELSEWHERE, *LOOPS)))
        made = (n for n in of_kind(nodes, ast.Assign) if _NUMBERS.search(source_text(n.value)))
        numbers = {source_text(target) for node in made for target in node.targets}
        bare = without_gradients(nodes)
        kept: list[tuple[ast.expr | ast.stmt, ast.expr]] = [
            (node, node.value)
            for node in of_kind(nodes, ast.AugAssign)
            if isinstance(node.op, ast.Add)
            and source_text(node.target) not in losses
            and node not in bare
        ]
        kept += [(call, call.args[0]) for call in calls_of("append", nodes) if call.args]
        for place, value in kept:
            if set(map(source_text, _terms(value))) & losses - numbers:
                yield place, source_text(place)[:60]  # type: ignore[arg-type]


def _losses_of(backward: ast.Call) -> Iterator[str]:
    """`loss` of its own `backward()`, of a scaled one's, and of `accelerator.backward(loss)`."""
    on = backward.func.value  # type: ignore[attr-defined]
    yield source_text(on)
    is_scaled = method_of(on) == "scale"
    if is_scaled or re.search(r"accelerator|fabric|engine", source_text(on)):
        yield from map(source_text, on.args if is_scaled else backward.args)


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
class StatementBlock:
    """A list of statements: its calls by their place in it, backward passes, optimizer steps."""

    def __init__(self, code: Code, statements: Sequence[ast.stmt]) -> None:
        self.statements = statements
        values = [s.value if isinstance(s, ast.Expr) else None for s in statements]
        self.calls = [(n, value) for n, value in enumerate(values) if isinstance(value, ast.Call)]
        self.backward = [n for n, call in self.calls if method_of(call) == "backward"]
        self.steps = [(n, call) for n, call in self.calls if code.is_optimizer_step(call)]


class _OfBlock(Rule):
    """A rule for lists of statements."""

    nodes = BLOCKS
    words: ClassVar[tuple[str, ...]] = (".backward(", "step(")

    def visit(self, node: Any) -> Iterator[Found]:
        for block in (StatementBlock(self.code, statements) for statements in blocks_of(node)):
            for number, call in block.calls:
                if (old := self.in_block(block, number, call)) is not None:
                    yield call.func, old

    def in_block(self, block: StatementBlock, number: int, call: ast.Call) -> str | None:
        """What stands in a call that is a statement, if it is a mistake there."""
        raise NotImplementedError


class GradientsCleared(_OfBlock):
    """`zero_grad()` stands between `backward()` and `step()` of the same optimizer: the step sees
    no gradients. Move it before `backward()` or behind `step()`."""

    id = "gradients-cleared"
    effect = "the step has no gradients"
    new = "zero_grad() before backward() or after step(), not between them"
    words = (".backward(", "step(", "zero_grad")
    wrong = "loss.backward()\noptimizer.zero_grad()\noptimizer.step()"
    right = "optimizer.zero_grad()\nloss.backward()\noptimizer.step()"

    def in_block(self, block: StatementBlock, number: int, call: ast.Call) -> str | None:
        before = [b for b in block.backward if b < number][-1:]
        if called_name(call) != "zero_grad" or not before:
            return None
        own = [at for at, step in block.steps
               if holder(call) in (holder(step), *map(source_text, step.args))]  # fmt: skip
        after = next((at for at in own if at > number), 0)
        used = any(before[0] < at < number for at in own)
        again = any(number < b < after for b in block.backward)
        return f"{source_text(call)} after backward()" if after and not (used or again) else None


class ClipAfterStep(_OfBlock):
    """`clip_grad_norm_` behind `optimizer.step()`, with no step after it, changes gradients that
    nothing reads."""

    id = "clip-after-step"
    effect = "clips nothing"
    new = "clip_grad_norm_ between backward() and step()"
    words = (".backward(", "step(", "clip_grad_")
    wrong = "loss.backward()\noptimizer.step()\nnn.utils.clip_grad_norm_(model.parameters(), 1)"
    right = "loss.backward()\nnn.utils.clip_grad_norm_(model.parameters(), 1)\noptimizer.step()"

    def in_block(self, block: StatementBlock, number: int, call: ast.Call) -> str | None:
        if not called_name(call).startswith("clip_grad_") or not block.backward:
            return None
        earlier = any(block.backward[-1] < at < number for at, _ in block.steps)
        later = any(at > number for at, _ in block.steps)
        return source_text(call)[:60] if earlier and not later else None


class SchedulerGivenLoss(_OfBlock):
    """Only `ReduceLROnPlateau` takes a metric. Any other scheduler takes the argument of `step`
    for the epoch: a loss of 0.3 sets the rate back to its start. Call `scheduler.step()`."""

    id = "scheduler-given-loss"
    effect = "takes the loss for the number of the epoch"
    new = "scheduler.step(); only ReduceLROnPlateau takes a metric"
    wrong = "loss.backward()\noptimizer.step()\nscheduler.step(loss)"
    right = "loss.backward()\noptimizer.step()\nscheduler.step()"

    def in_block(self, block: StatementBlock, number: int, call: ast.Call) -> str | None:
        return source_text(call)[:60] if _is_given_a_loss(self.code, call) else None


class SchedulerFirst(_OfBlock):
    """A scheduler's `step()` before the optimizer's first one skips the first value of the
    schedule (torch warns of it once). Call it after `optimizer.step()`, or after the epoch's
    batches."""

    id = "scheduler-first"
    effect = "the first rate is skipped"
    new = "scheduler.step() after optimizer.step()"
    wrong = (
        "for epoch in range(9):\n    scheduler.step()\n    for x in loader:\n"
        "        model(x).backward()\n        optimizer.step()"
    )
    right = wrong.replace("    scheduler.step()\n", "") + "\n    scheduler.step()"

    def in_block(self, block: StatementBlock, number: int, call: ast.Call) -> str | None:
        if not self.code.scheduler_of(call) or _is_given_a_loss(self.code, call):
            return None
        before, behind = block.statements[:number], block.statements[number + 1 :]
        is_first = not self._steps_in(before) and self._steps_in(behind)
        return source_text(call) if is_first else None

    def _steps_in(self, statements: Sequence[ast.stmt]) -> bool:
        return any(self.code.is_optimizer_step(n) for s in statements for n in nodes_below(s))


def _is_given_a_loss(code: Code, step: ast.Call) -> bool:
    """Whether a scheduler that counts epochs takes a metric for the epoch."""
    scheduler = code.scheduler_of(step)
    is_metric = step.args and re.search("loss|acc|metric|score", source_text(step.args[0]), re.I)
    return bool(scheduler and is_metric) and "Plateau" not in scheduler


class ClipScaled(Rule):
    """With a `GradScaler` the gradients are scaled until `scaler.unscale_(optimizer)` (or
    `scaler.step`). Clipping before it compares the limit with the scaled norm, and cuts nearly
    every step."""

    id = "clip-scaled"
    effect = "clips gradients that are still scaled"
    new = "scaler.unscale_(optimizer) before clip_grad_norm_"
    wrong = (
        "scaler.scale(loss).backward()\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
        "scaler.step(optimizer)"
    )
    right = wrong.replace("\nnn", "\nscaler.unscale_(optimizer)\nnn")
    nodes = BLOCKS
    words = (".backward(", "step(", "clip_grad_", ".scale(")

    def visit(self, node: Any) -> Iterator[Found]:
        if "unscale_" not in self.code.text:
            for block in blocks_of(node):
                yield from self._clips(block)

    def _clips(self, block: Sequence[ast.stmt], *, is_scaled: bool = False) -> Iterator[Found]:
        """is_scaled: a scaled backward pass stands before the block."""
        texts = [source_text(s.value) if isinstance(s, ast.Expr) else "" for s in block]
        for n, text in enumerate(texts):
            if isinstance(inner := block[n], ast.If) and is_scaled:
                yield from self._clips(inner.body, is_scaled=True)
            is_scaled |= bool(re.search(r"\.scale\(.*\)\.backward\(", text))
            is_clip = is_scaled and re.match(r"(?:\w+\.)*clip_grad_\w+\(", text)
            if is_clip and any(".step(" in t for t in texts[n:]):
                yield block[n], text[:60]
