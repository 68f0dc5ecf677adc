"""Finds what CUDA code does without a qualified name (`"cuda"`, `x.cuda()`, `optimizer.step()`),
and torch_xla's device by its name."""

import ast
import re
from collections.abc import Iterator
from itertools import chain

from tpukit.probe.lint.names import Names, nodes_below, source_text, trains

_ENDS_STEPS = ("torch_xla", "accelerate", "lightning", "pytorch_lightning")
_DEVICE = re.compile(r"cuda(?::\d+)?")
_NUMBER = re.compile(r"^(?:\w+\.)*(?:(?:local_)?rank|gpu(?:_id)?|device_id|\d+)$")
"""A device by its number."""
_XLA = re.compile(r"xla(?::\d+|://)?")
"""A device, a backend, or where ranks meet."""
_OPTIMIZER = re.compile(r"(?:^|[._])(?:\w*opt(?:im(?:izer)?)?s?\w*|\w*scaler)(?:\[[^]]*\])?$", re.I)
_SCHEDULER = re.compile(r"sched|options?$", re.I)
_LOOKS_UP = re.compile(r"(?:^|\.)(?:getattr|hasattr|get|pop|setdefault|startswith)$")
_SHAPED_BY_VALUES = ("nonzero", "unique", "masked_select", "unique_consecutive")
_TENSOR_TYPE = re.compile(r"\btorch\.cuda\.\w*Tensor\b")
_LOOPS = (ast.For, ast.While)
_FORWARD = re.compile(r"forward|training_step|(?:\w*_)?loss|\w*Loss")
_MASK = re.compile(r"~?(?:\w*_)?masks?")


def find_cuda_forms(tree: ast.Module, names: Names) -> Iterator[tuple[ast.expr, str, str]]:
    """(place, row's id, text) of each."""
    bound = (b.name or "" for found in names.module.bindings.values() for b in found)
    # accelerate and Lightning end the step themselves.
    ends_steps = any(name.partition(".")[0] in _ENDS_STEPS for name in bound)
    types = _tensor_types(tree)
    for node, id in chain(_within(tree, in_forward=False), _made(tree, types)):
        if id != "cuda-sync" or not ends_steps:
            yield node, id, source_text(node)[:40]


def _tensor_types(tree: ast.Module) -> set[str]:
    """Names of types of CUDA tensors: `T = torch.cuda.FloatTensor if cuda else ...`."""
    assigned = (node for node in nodes_below(tree) if isinstance(node, ast.Assign))
    return {
        source_text(target)
        for node in assigned
        if isinstance(node.value, ast.IfExp | ast.Attribute | ast.BoolOp)
        and _TENSOR_TYPE.search(source_text(node.value))
        for target in node.targets
        if isinstance(target, ast.Name | ast.Attribute)
    }


def _made(tree: ast.Module, types: set[str]) -> Iterator[tuple[ast.expr, str]]:
    """Tensors that such a type makes, or that become of that type."""
    for node in nodes_below(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        is_cast = isinstance(node.func, ast.Attribute) and node.func.attr == "type" and node.args
        text = source_text(node.args[0] if is_cast else node.func)
        if text in types or _TENSOR_TYPE.fullmatch(text):
            yield node.func, "cuda-tensor-made"


def find_xla_texts(tree: ast.Module) -> Iterator[tuple[ast.expr, str, str]]:
    """As `find_cuda_forms`: torch_xla's device, as a text."""
    for holder in ast.walk(tree):
        for child in ast.iter_child_nodes(holder):
            if not isinstance(child, ast.Constant) or not isinstance(child.value, str):
                continue
            if _XLA.fullmatch(child.value) and not _is_looked_up(child, holder):
                yield child, "move-device-text", repr(child.value)


def _within(node: ast.AST, *, in_forward: bool) -> Iterator[tuple[ast.expr, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant):
            if isinstance(child.value, str) and _DEVICE.fullmatch(child.value):
                yield from _text(child, node)
            elif isinstance(child.value, str) and re.match(r"cuda:(?:$|\{|%)", child.value):
                yield child, "cuda-device-text"
            continue
        inside = in_forward
        if isinstance(child, ast.keyword) and child.arg == "accelerator":
            texts = (n for n in ast.walk(child.value) if isinstance(n, ast.Constant))
            yield from ((text, "cuda-accelerator") for text in texts if text.value == "gpu")
        elif isinstance(child, ast.FunctionDef):
            # Of a function that trains in a loop, the loop is the step.
            steps = any(isinstance(n, _LOOPS) and trains(n) for n in ast.walk(child))
            inside |= bool(_FORWARD.fullmatch(child.name)) or (trains(child) and not steps)
        elif isinstance(child, _LOOPS):
            inside = in_forward or trains(child)
        elif isinstance(child, ast.JoinedStr):
            first = child.values[0] if child.values else None
            if isinstance(first, ast.Constant) and str(first.value).startswith("cuda:"):
                yield child, "cuda-device-text"
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            yield from _method(child, child.func, in_forward=in_forward)
        elif isinstance(child, ast.Subscript) and in_forward and _is_mask(child):
            yield child, "cuda-values-shape"
        yield from _within(child, in_forward=inside)


def _text(text: ast.Constant, holder: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(holder, ast.keyword) and holder.arg == "map_location":
        yield text, "cuda-map-location"
    elif not _is_looked_up(text, holder):
        yield text, "cuda-text"


def _is_looked_up(text: ast.Constant, holder: ast.AST) -> bool:
    """Whether a text is a key, an attribute's name or a statement of its own."""
    if isinstance(holder, ast.Call):
        return _LOOKS_UP.search(source_text(holder.func)) is not None
    is_key = isinstance(holder, ast.Dict) and text in holder.keys
    return is_key or isinstance(holder, ast.Subscript | ast.Expr)


def _method(
    call: ast.Call, function: ast.Attribute, *, in_forward: bool
) -> Iterator[tuple[ast.expr, str]]:
    holder = source_text(function.value)
    if function.attr == "cuda" and holder != "torch":
        yield function, "cuda-method"
    elif function.attr == "to" and call.args and _NUMBER.search(source_text(call.args[0])):
        yield function, "cuda-device-text"
    elif function.attr == "half" and not call.args:
        yield function, "cuda-half"
    elif is_optimizer_step(call):
        yield function, "cuda-sync"
    elif in_forward and function.attr in _SHAPED_BY_VALUES:
        yield function, "cuda-values-shape"


def is_optimizer_step(call: ast.Call) -> bool:
    """`optimizer.step()`, by the name of what is stepped."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    holder = source_text(call.func.value)
    return bool(_OPTIMIZER.search(holder)) and not _SCHEDULER.search(holder)


def _is_mask(taken: ast.Subscript) -> bool:
    """`x[y > 0]`, `x[mask]`; a comparison with `==` of numbers alone is none."""
    index = taken.slice
    if isinstance(index, ast.Compare):
        return not isinstance(index.left, ast.Constant)
    is_read = isinstance(taken.ctx, ast.Load)
    return is_read and _MASK.fullmatch(source_text(index)) is not None
