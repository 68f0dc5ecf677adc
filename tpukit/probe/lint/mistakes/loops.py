"""Mistakes of loops: gradients, losses, clipping and schedulers of the step, and evaluations that
are never entered, never left, or keep gradients."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from tpukit.probe.lint.mistakes.training_code import Mistake, TrainingCode
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    LOOPS,
    argument,
    called_here,
    called_name,
    calls_of,
    holder,
    is_without_gradients,
    method_of,
    nodes_below,
    own_nodes,
    source_text,
    trains,
)

_NO_GRADIENTS = re.compile(
    r"no_grad|inference_mode|set_grad_enabled|requires_grad|(?<!zero_)grad\("
)
_EVALUATION = re.compile(r"\.train\((?:mode=)?(?:True|False|\w*(?:mode|train)\w*)\)|\.training\b")
_CLEARS = re.compile(r"zero_grad|\.grad\b|set_to_none")
_EVALUATES = re.compile(
    r"(?:^|[^a-z])(?:val|valid|test|eval|dev)(?:[_A-Z]\w*)?(?:load|dl\b|dataload)", re.I
)
_SCALES = re.compile("scaler|accelerator|fabric|deepspeed|engine|bf16|bfloat16", re.I)
_FP16 = ("torch.float16", "torch.half")
_STEPS = (*LOOPS, *FUNCTIONS)
_ELSEWHERE = (*FUNCTIONS, ast.ClassDef, ast.Lambda)
_own = partial(own_nodes, without=_ELSEWHERE)
_OTHER_MODEL = re.compile(r"ema|teacher|target|averag|swa|frozen|lpips", re.I)
"""A model that a loop does not train."""


def in_loop(
    code: TrainingCode, loop: ast.For | ast.While | ast.AsyncFor, classes: Sequence[ast.ClassDef]
) -> Iterator[Mistake]:
    """classes: those of the module; an optimizer of one's own is cleared there."""
    inner = list(_own(loop.body))
    backward = calls_of("backward", inner)
    if not backward:
        return
    steps = [call for call in calls_of("step", inner) if code.is_optimizer_step(call)]
    own = [c for c in classes if c.lineno < loop.lineno <= (c.end_lineno or 0)]
    is_own = own and not own[0].bases and source_text(steps[0]).startswith("self.") if steps else ()
    if steps and not _CLEARS.search(ast.unparse(own[0]) if is_own else code.text):
        yield steps[0].func, "no-zero-grad", f"{source_text(steps[0])} in a loop"
    if not _SCALES.search(code.text):
        for item in (i for n in inner if isinstance(n, ast.With) for i in n.items):
            if _is_fp16(code, item.context_expr):
                yield item.context_expr, "autocast-unscaled", source_text(item.context_expr)[:60]
    losses = {text for call in backward for text in _losses_of(call)}
    yield from _kept_losses(list(own_nodes(loop.body, (*_ELSEWHERE, *LOOPS))), losses)


def _is_fp16(code: TrainingCode, context: ast.expr) -> bool:
    """Whether a context is a GPU's autocast to fp16, its default."""
    if not isinstance(context, ast.Call) or not code.means(context.func, "autocast"):
        return False
    is_cuda = code.means(context.func, "cuda-autocast")
    dtype = argument(context, "dtype", 1)
    enabled, device = argument(context, "enabled", 0 if is_cuda else None), context.args[:1]
    device = device or [k.value for k in context.keywords if k.arg == "device_type"]
    on_gpu = is_cuda or any("cuda" in source_text(value) for value in device)
    is_off = isinstance(enabled, ast.Constant) and not enabled.value
    return on_gpu and not is_off and (not dtype or source_text(dtype) in _FP16)


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
    bare = _without_gradients(nodes)
    kept: list[tuple[ast.expr | ast.stmt, ast.expr]] = [
        (node, node.value)
        for node in nodes
        if isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and source_text(node.target) not in losses
        and id(node) not in bare
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
def in_statements(code: TrainingCode, block: Sequence[ast.stmt]) -> Iterator[Mistake]:
    """Mistakes of one list of statements."""
    calls = [(n, s.value) for n, s in enumerate(block)
             if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]  # fmt: skip
    backward = [n for n, call in calls if method_of(call) == "backward"]
    steps = [(n, call) for n, call in calls if code.is_optimizer_step(call)]
    for n, call in calls:
        method = method_of(call) or source_text(call.func).rpartition(".")[2]
        if method == "zero_grad":
            before = [b for b in backward if b < n][-1:]
            own = [at for at, s in steps if holder(call) in (holder(s), *map(source_text, s.args))]
            after = next((at for at in own if at > n), None)
            used = any(before and before[0] < at < n for at in own)
            if before and after and not used and not any(n < b < after for b in backward):
                yield call.func, "gradients-cleared", f"{source_text(call)} after backward()"
        elif method.startswith("clip_grad_") and backward:
            earlier = [at for at, _ in steps if backward[-1] < at < n]
            if earlier and not any(at > n for at, _ in steps):
                yield call.func, "clip-after-step", source_text(call)[:60]
        elif _is_given_a_loss(code, call):
            yield call.func, "scheduler-given-loss", source_text(call)[:60]
        elif (
            code.scheduler_of(call)
            and not _steps_below(code, block[:n])
            and _steps_below(code, block[n + 1 :])
        ):
            yield call.func, "scheduler-first", source_text(call)
    if "unscale_" not in code.text:
        yield from _scaled_clip(block)


def _is_given_a_loss(code: TrainingCode, step: ast.Call) -> bool:
    """Whether a scheduler that counts epochs takes a metric for the epoch."""
    scheduler = code.scheduler_of(step)
    is_metric = step.args and re.search("loss|acc|metric|score", source_text(step.args[0]), re.I)
    return bool(scheduler and is_metric) and "Plateau" not in scheduler


def _steps_below(code: TrainingCode, block: Sequence[ast.stmt]) -> bool:
    return any(code.is_optimizer_step(n) for s in block for n in nodes_below(s))


def _scaled_clip(block: Sequence[ast.stmt], *, is_scaled: bool = False) -> Iterator[Mistake]:
    """is_scaled: a scaled backward pass stands before the block."""
    texts = [source_text(s.value) if isinstance(s, ast.Expr) else "" for s in block]
    for n, text in enumerate(texts):
        if isinstance(inner := block[n], ast.If) and is_scaled:
            yield from _scaled_clip(inner.body, is_scaled=True)
        is_scaled |= bool(re.search(r"\.scale\(.*\)\.backward\(", text))
        is_clip = is_scaled and re.match(r"(?:\w+\.)*clip_grad_\w+\(", text)
        if is_clip and any(".step(" in t for t in texts[n:]):
            yield block[n], "clip-scaled", text[:60]


# -- evaluations ---------------------------------------------------------------------------------
def never_in_eval(code: TrainingCode) -> Iterator[Mistake]:
    """The first loop over a loader without gradients that runs the model that is trained, in a
    file without `eval()`."""
    if _EVALUATION.search(code.text):
        return
    nodes = nodes_below(code.tree)
    trained = {_model_called(n) for n in nodes if isinstance(n, _STEPS) and trains(n)}
    bare = _without_gradients(nodes)
    found = [
        (loop.iter, model)
        for loop in nodes
        if isinstance(loop, ast.For)
        and (
            id(loop) in bare
            or _EVALUATES.search(source_text(loop.iter))
            or any(map(is_without_gradients, loop.body))
        )
        and code.reads_a_loader(loop)
        and not trains(loop)
        and not _calibrates(loop)
        and (model := _model_called(loop)) in trained - {""}
    ]
    for place, model in sorted(found, key=lambda each: each[0].lineno)[:1]:
        yield place, "never-in-eval", f"{model} without eval()"


def _without_gradients(nodes: Iterable[ast.AST]) -> set[int]:
    """The identities of the nodes there, and below them."""
    return {id(n) for node in nodes if is_without_gradients(node) for n in nodes_below(node)}


def eval_not_left(code: TrainingCode) -> Iterator[Mistake]:
    """The first `eval()` in a loop that trains, or in what it calls, where nothing trains again."""
    if re.search(r"\.train\(|\btraining\s*=", code.text):
        return
    nodes = list(nodes_below(code.tree))
    evaluations = {f.name: _evaluations(f) for f in nodes if isinstance(f, FUNCTIONS)}
    for loop in nodes:
        inner = list(_own(loop.body)) if isinstance(loop, LOOPS) else []
        if calls_of("backward", inner):
            left = [call for call in calls_of("eval", inner) if not call.args]
            left += [call for n in inner for call in evaluations.get(called_name(n), ())]
            left = [call for call in left if not _OTHER_MODEL.search(holder(call))]
            if left:
                first = min(left, key=lambda call: call.lineno)
                yield first.func, "eval-not-left", source_text(first)


def with_gradients(
    code: TrainingCode, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
) -> Iterator[Mistake]:
    """A function or a script that calls `eval()`, then reads a loader, with gradients."""
    name = getattr(node, "name", "")
    evaluates = sorted(_evaluations(node), key=lambda call: call.lineno)
    if not evaluates or name in _called_without_gradients(code):
        return
    loops = [n for n in _own(node.body) if isinstance(n, LOOPS) and code.reads_a_loader(n)]
    # Of a script, another loop may be without gradients.
    whole, bare = (node, set()) if name else (None, _without_gradients(nodes_below(code.tree)))
    for call in evaluates:
        behind = [n for n in loops if (n.end_lineno or 0) > call.lineno
                  and (n.lineno > call.lineno or not trains(n))]  # fmt: skip
        loop = min(behind, key=lambda n: n.lineno, default=None)
        model = holder(call).partition(".")[0]
        if loop and id(loop) not in bare and _keeps_gradients(code, model, loop, whole or loop):
            where = f"{name}()" if name else "the script"
            yield call.func, "eval-with-gradients", f"{where} evaluates"
            return


def _keeps_gradients(code: TrainingCode, model: str, loop: ast.AST, around: ast.AST) -> bool:
    """Whether a loop runs a model, trains nothing, and nothing around it switches them off."""
    if model not in {n.id for n in nodes_below(loop) if isinstance(n, ast.Name)}:
        return False
    called = {called_here(n) for n in nodes_below(loop)} - {""}
    parts = [n for n in nodes_below(code.tree) if getattr(n, "name", "") in called]
    if trains(loop) or any(isinstance(n, FUNCTIONS) and trains(n) for n in parts):
        return False
    return not any(map(_NO_GRADIENTS.search, map(ast.unparse, [around, *parts])))


def _evaluations(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) -> list[ast.Call]:
    """The calls of `eval()` in a function's own body."""
    return [call for call in calls_of("eval", _own(node.body)) if not call.args]


def _called_without_gradients(code: TrainingCode) -> set[str]:
    """Functions that the module calls where no gradients are recorded."""

    def is_bare(node: ast.AST) -> bool:
        around = [*getattr(node, "decorator_list", ()), *getattr(node, "items", ())]
        return any(map(_NO_GRADIENTS.search, map(ast.unparse, around)))

    bare = filter(is_bare, nodes_below(code.tree))
    return {called_name(n) for node in bare for n in nodes_below(node)} - {""}


def _model_called(loop: ast.AST) -> str:
    """What a loop calls that is named as a model: `model(x)`, `net.loss(x)`."""
    calls = (n.func for n in nodes_below(loop) if isinstance(n, ast.Call))
    roots = (
        re.match(r"(?:self\.)?(\w*(?:model|net|classif)\w*)\b", source_text(f), re.I) for f in calls
    )
    return next((root[1] for root in roots if root), "")


def _calibrates(loop: ast.AST) -> bool:
    """Whether a loop only runs the model, for its batch statistics: no result is used."""
    nodes = nodes_below(loop)
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
    used = [n.value for n in nodes if isinstance(n, kinds) and n.value]
    used += [value for call in calls_of("append", nodes) for value in call.args]
    return not any(
        re.search(r"(?:model|net|classif)\w*\.?\w*\(", source_text(u), re.I) for u in used
    )
