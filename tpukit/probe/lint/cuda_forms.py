"""Finds what CUDA code does without a qualified name (`"cuda"`, `x.cuda()`, `optimizer.step()`),
and torch_xla's device by its name."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from tpukit.knowledge.calls import rule_data
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.rules.roles import MAKES_OPTIMIZER, is_optimizer_step
from tpukit.probe.lint.syntax import (
    LOOPS,
    NAMED,
    called_name,
    calls_of,
    holder,
    method_of,
    nodes_below,
    of_kind,
    own_nodes,
    run_once,
    source_text,
    trains,
)

_ENDS_STEPS = {"accelerate", "lightning", "pytorch_lightning"}
_DEVICES = {"cuda-text", "cuda-device-text", "cuda-method", "move-device-text"}
_DEVICE = re.compile(r"cuda(?::\d+)?|mps(?::\d)?")
_NUMBER = re.compile(r"^(?:\w+\.)*(?:(?:local_)?rank|gpu(?:_id)?|device_id|\d+)$")
"""A device by its number."""
_XLA = re.compile(r"xla(?::\d+|://)?")
"""A device, a backend, or where ranks meet."""
_ELSEWHERE = (ast.FunctionDef, ast.ClassDef)
_LOOKS_UP = re.compile(r"(?:^|\.)(?:getattr|hasattr|get|pop|setdefault|startswith)$")
_SHAPED_BY_VALUES = ("nonzero", "unique", "masked_select", "unique_consecutive", "to_sparse")
_ON_THE_CPU = re.compile(
    r"torch\.(?:linalg\.(?:det|eig|inv|lstsq|matrix_exp|qr|solve)|fft\.\w+|stft|histc|bincount"
    r"|searchsorted|bucketize|median|lgamma|digamma)"
)
"""What torch_xla 2.9 has no lowering for (seen in its counters)."""
_TENSOR_TYPE = re.compile(r"\btorch\.cuda\.\w*Tensor\b")
_FORWARD = re.compile(r"forward|training_step|(?:\w*_)?loss|\w*Loss")
_MASK = re.compile(r"(?:\w*_)?masks?")
_STAYS = re.compile(r"to|\W*cpu\W*|.*\(.cpu.\)|[\w.]*(?:dtype|float\d*|half|double)\w*")
"""What `to()` is given for another type, or to come back from a device."""
_COMES_BACK = re.compile(r"\.(?:cpu|numpy)\(\)")
_ASKS = ("is_available", "device_count")


def find_cuda_forms(names: Names) -> Iterator[tuple[ast.expr, str, str]]:
    """(place, row's id, text) of each."""
    tree = names.tree
    nodes = nodes_below(tree)
    kept = {holder(c) for c in calls_of("append", nodes) if _COMES_BACK.search(source_text(c))}
    within = ((node, id) for node, id in _within(nodes, names)
              if id != "cuda-values-shape" or not _is_made_of(kept, node, names))  # fmt: skip
    # Of one place the first counts: a Trainer's text is not a device.
    by_place: dict[tuple[int, ...], tuple[ast.expr, str]] = {}
    for node, id in chain(_arguments(nodes, names), within, _made(nodes, names)):
        place = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
        by_place.setdefault(place, (node, id))
    ids = {id for _, id in by_place.values()}
    # Of the devices of a file CUDA's count.
    left_out = {"", "cuda-sync" if _ends_steps(nodes, names) else "",
                "mps-text" if ids & _DEVICES else ""}  # fmt: skip
    once = _steps_once(tree)
    found = [(node, id) for node, id in by_place.values()
             if id not in left_out and node not in once]  # fmt: skip
    if "accelerate" not in names.packages:  # its prepare() moves both
        sent = "cuda-sync" not in ids - left_out
        found += [(node, "no-device") for node in (() if sent else _never_sent(nodes))]
        found += [(node, "optimizer-before-move") for node in _made_too_early(tree)]
    yield from ((node, id, source_text(node)[:40]) for node, id in found)


def _ends_steps(nodes: Sequence[ast.AST], names: Names) -> bool:
    """Whether torch_xla, accelerate or Lightning ends the steps, which are not written out."""
    classes = (c for c in of_kind(nodes, ast.ClassDef)
               if any(getattr(part, "name", "") == "training_step" for part in c.body))  # fmt: skip
    own = {inner for each in classes for inner in nodes_below(each)}
    by_hand = any(not c.args and c not in own for c in calls_of("backward", nodes))
    return "torch_xla" in names.packages or bool(names.packages & _ENDS_STEPS and not by_hand)


def _steps_once(tree: ast.Module) -> set[ast.expr]:
    """The `step` of calls outside of any loop, in functions that run once."""
    once = run_once(tree)
    functions = (f for f in of_kind(nodes_below(tree), ast.FunctionDef) if f.name in once)
    own = chain.from_iterable(own_nodes(f.body, (*LOOPS, *_ELSEWHERE)) for f in functions)
    return {call.func for call in calls_of("step", own)}


def _is_made_of(lists: set[str], form: ast.expr, names: Names) -> bool:
    """Whether `x` of `x[mask]`, `x.unique()` is made of one of some lists."""
    made = names.possible(form.value)  # type: ignore[attr-defined]
    parts = (part for value in made for part in ast.walk(value) if isinstance(part, NAMED))
    return not lists.isdisjoint(map(source_text, parts))


def _never_sent(nodes: Sequence[ast.AST]) -> list[ast.expr]:
    """The first model that the file makes and trains, where it names no device anywhere."""
    asked = {n.value for n in of_kind(nodes, ast.Attribute) if n.attr in _ASKS}
    words = {str(getattr(n, f, "")) for n in nodes if n not in asked for f in ("id", "attr", "arg")}
    if {"to", "cuda"} & words or any(re.search("device|mps|gpu", word, re.I) for word in words):
        return []
    assigns = (n for n in of_kind(nodes, ast.Assign) if isinstance(n.value, ast.Call))
    made = tuple(f"{source_text(target)}." for n in assigns for target in n.targets)
    trained = (c.func for c in calls_of("parameters", nodes) if f"{holder(c)}.".startswith(made))
    return sorted(trained, key=lambda node: node.lineno)[:1]


def _made_too_early(tree: ast.Module) -> Iterator[ast.expr]:
    """Optimizers of models that are sent to a device later: below, or by a function they go to."""
    functions = of_kind(nodes_below(tree), ast.FunctionDef)
    given: dict[ast.AST, set[str]] = {f: {a.arg for a in f.args.args} for f in functions}
    sent_by: set[str] = set()
    for f in functions:
        # A step that moves a global model runs after the optimizer was made.
        shared = of_kind(nodes_below(f), ast.Global) if trains(f) else []
        sent_by |= {*given[f], *(name for n in shared for name in n.names)} & set(_sent(f))
    bodies: list[ast.Module | ast.FunctionDef] = [tree, *functions]
    for where in bodies:
        sent, nodes = _sent(where), list(own_nodes(where.body, _ELSEWHERE))
        makers = (
            c for c in of_kind(nodes, ast.Call) if MAKES_OPTIMIZER.search(source_text(c.func))
        )
        for call in (c for maker in makers for c in calls_of("parameters", nodes_below(maker))):
            model = holder(call)
            line = sent.get(model, sys.maxsize if model in sent_by else 0)
            between = range(call.lineno + 1, line + 1)
            is_other = any(_rebinds(n, model) for n in nodes if getattr(n, "lineno", 0) in between)
            if line > call.lineno and model not in given.get(where, ()) and not is_other:
                yield call.func


def _rebinds(node: ast.AST, name: str) -> bool:
    """Whether a statement gives a name to another object than one made of the former."""
    if not isinstance(node, ast.Assign) or name not in map(source_text, node.targets):
        return False
    return not re.search(rf"\b{re.escape(name)}\b", source_text(node.value))


def _sent(where: ast.Module | ast.FunctionDef) -> dict[str, int]:
    """What a body's own statements send to a device, and the first line that does."""
    found: dict[str, int] = {}
    for node in own_nodes(where.body, _ELSEWHERE):
        value = node.value if isinstance(node, ast.Assign) else node
        if isinstance(value, ast.Call) and method_of(value) in ("to", "cuda"):
            given = (*value.args, *(k.value for k in value.keywords if k.arg != "dtype"))
            if _STAYS.fullmatch(", ".join(map(source_text, given)) or method_of(value)):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else []
            for name in (holder(value), *map(source_text, targets)):
                found[name] = min(value.lineno, found.get(name, value.lineno))
    return found


def _made(nodes: Sequence[ast.AST], names: Names) -> Iterator[tuple[ast.expr, str]]:
    """Tensors that a CUDA type makes, or that become of that type, also by a name for it:
    `T = torch.cuda.FloatTensor if cuda else ...`."""
    for node in of_kind(nodes, ast.Call):
        is_cast = method_of(node) == "type" and node.args
        made_by = names.possible(node.args[0] if is_cast else node.func)
        if any(_TENSOR_TYPE.fullmatch(source_text(each)) for each in of_kind(made_by, *NAMED)):
            yield node.func, "cuda-tensor-made"


def _arguments(nodes: Sequence[ast.AST], names: Names) -> Iterator[tuple[ast.expr, str]]:
    """The values of such arguments, also by name; the name where that has other uses as well."""
    known = rule_data("arguments")
    given = [(c, k) for c in of_kind(nodes, ast.Call) for k in c.keywords if k.arg in known]
    loads = Counter(node.id for node in of_kind(nodes, ast.Name))
    for call, keyword in given:
        id, wanted = known[str(keyword.arg)]
        if keyword.arg == "precision" and called_name(call) not in ("Trainer", "Fabric", "dict"):
            continue
        of = names.possible(keyword.value)
        constants = of_kind((n for value in of for n in ast.walk(value)), ast.Constant)
        found = [text for text in constants if re.fullmatch(wanted, str(text.value))]
        name = keyword.value.id if isinstance(keyword.value, ast.Name) else ""
        shared = loads[name] > len(names.values(name)) + sum(
            isinstance(k.value, ast.Name) and k.value.id == name for _, k in given
        )
        for text in [keyword.value] if found and shared else found:
            yield text, id


def _within(nodes: Sequence[ast.AST], names: Names) -> Iterator[tuple[ast.expr, str]]:
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            first = node.values[0] if node.values else None
            if isinstance(first, ast.Constant) and str(first.value).startswith("cuda:"):
                yield node, "cuda-device-text"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _method(node, node.func, names)
        elif isinstance(node, ast.Subscript) and _is_mask(node, names) and _in_step(node, names):
            yield node, "cuda-values-shape"
        for text in of_kind(ast.iter_child_nodes(node), ast.Constant):
            if isinstance(text.value, str):
                yield from _text(text, text.value, node)


def _in_step(node: ast.AST, names: Names) -> bool:
    """Whether a node stands in a forward pass, in a loop that trains, or in a function that trains
    without one."""

    def is_step(outer: Any) -> bool:
        if isinstance(outer, LOOPS):
            return trains(outer)
        has_loop = any(map(trains, of_kind(nodes_below(outer), *LOOPS)))
        return bool(_FORWARD.fullmatch(outer.name)) or (trains(outer) and not has_loop)

    return any(map(is_step, names.outer(node, ast.FunctionDef, *LOOPS)))


def _text(text: ast.Constant, value: str, outer: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    is_numbered = called_name(outer) == "device" and text in outer.args[:-1]  # type: ignore[attr-defined]
    if re.match(r"cuda:(?:$|\{|%)", value) or (is_numbered and value == "cuda"):
        yield text, "cuda-device-text"
    elif _is_looked_up(text, outer):
        return
    elif _XLA.fullmatch(value):
        yield text, "move-device-text"
    elif not _DEVICE.fullmatch(value):
        return
    elif isinstance(outer, ast.keyword) and outer.arg == "map_location":
        yield text, "cuda-map-location"
    else:
        yield text, "mps-text" if value.startswith("mps") else "cuda-text"


def _is_looked_up(text: ast.Constant, outer: ast.AST) -> bool:
    """Whether a text is a key, an attribute's name or a statement of its own."""
    if isinstance(outer, ast.Call):
        return _LOOKS_UP.search(source_text(outer.func)) is not None
    is_key = isinstance(outer, ast.Dict) and text in outer.keys
    return is_key or isinstance(outer, ast.Subscript | ast.Expr)


def _method(
    call: ast.Call, function: ast.Attribute, names: Names
) -> Iterator[tuple[ast.expr, str]]:
    if function.attr == "cuda" and source_text(function.value) != "torch":
        if not _is_own(call, names):
            yield function, "cuda-method"
    elif (
        function.attr == "to"
        and call.args
        and _NUMBER.search(source_text(call.args[0]))
        and "device" not in map(called_name, names.possible(call.args[0]))
    ):
        yield function, "cuda-device-text"
    elif function.attr == "half" and not call.args and not re.search("save|copy", holder(call)):
        yield function, "cuda-half"
    elif is_optimizer_step(call):
        yield function, "cuda-sync"
    elif function.attr in _SHAPED_BY_VALUES:
        if _in_step(call, names):
            yield function, "cuda-values-shape"
    elif _ON_THE_CPU.fullmatch(source_text(function)) and _in_step(call, names):
        yield function, "leaves-the-device"


def _is_own(call: ast.Call, names: Names) -> bool:
    """Whether a class of the module defines the method that a call calls."""
    scopes = names.scopes
    classes = [c for c in of_kind(scopes, ast.ClassDef) if method_of(call) in scopes[c].bindings]
    if holder(call) == "self":
        return any(c.lineno < call.lineno <= (c.end_lineno or 0) for c in classes)
    made = names.possible(call.func.value) if classes else []  # type: ignore[attr-defined]
    return not {c.name for c in classes}.isdisjoint(map(called_name, made))


def _is_mask(taken: ast.Subscript, names: Names) -> bool:
    """`x[y > 0]`, `x[mask]`, unless x is NumPy's; a comparison of numbers alone is none."""
    index = taken.slice.operand if isinstance(taken.slice, ast.UnaryOp) else taken.slice
    values = map(source_text, names.possible(taken.value))
    if any(re.search(r"numpy\(|^np\.|astype\(", value) for value in values):
        return False
    if isinstance(index, ast.Compare):
        column = re.escape(source_text(taken.value)) + r"(?:\.\w+|\['.*'\])"  # of pandas
        is_column = re.fullmatch(column, source_text(index.left))
        return not isinstance(index.left, ast.Constant) and not is_column
    named = (source_text(v) for v in names.possible(index) if isinstance(v, ast.Compare))
    compares = any(not re.search("['\"]|None", text) for text in named)  # tensors with numbers
    return compares or _MASK.fullmatch(source_text(index)) is not None
