"""Finds what CUDA code does without a qualified name (`"cuda"`, `x.cuda()`, `optimizer.step()`),
and torch_xla's device by its name."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain

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


def find_cuda_forms(tree: ast.Module, names: Names) -> Iterator[tuple[ast.expr, str, str]]:
    """(place, row's id, text) of each."""
    roots = names.packages
    # accelerate and Lightning end the step themselves, unless it is written out.
    nodes = nodes_below(tree)
    own = {inner for node in nodes if isinstance(node, ast.ClassDef)
           and any(getattr(part, "name", "") == "training_step" for part in node.body)
           for inner in nodes_below(node)}  # fmt: skip
    backward = (call for call in calls_of("backward", nodes) if call not in own)
    by_hand = any(not call.args for call in backward)
    ends_steps = "torch_xla" in roots or (roots & _ENDS_STEPS and not by_hand)
    kept = {holder(c) for c in calls_of("append", nodes) if _COMES_BACK.search(source_text(c))}
    within = ((node, id) for node, id in _within(tree, names, in_forward=False)
              if id != "cuda-values-shape" or not _is_made_of(kept, node, names))  # fmt: skip
    forms = chain(_arguments(tree, names), within, _made(tree, names))
    # A Trainer's text is not a device, and of the devices of a file CUDA's count.
    by_place = {
        (n.lineno, n.col_offset, n.end_lineno, n.end_col_offset): (n, id)
        for n, id in [*forms][::-1]
    }
    ids = {id for _, id in by_place.values()}
    left_out = {"", "cuda-sync" if ends_steps else "", "mps-text" if ids & _DEVICES else ""}
    once = _steps_once(tree)
    found = [(node, id) for node, id in [*by_place.values()][::-1]
             if id not in left_out and node not in once]  # fmt: skip
    if "cuda-sync" in ids - left_out and "accelerate" not in roots:
        found += [(node, "no-device") for node in _never_sent(tree)]
    if "accelerate" not in roots:  # its prepare() moves both
        found += [(node, "optimizer-before-move") for node in _made_too_early(tree)]
    yield from ((node, id, source_text(node)[:40]) for node, id in found)


def _steps_once(tree: ast.Module) -> set[ast.expr]:
    """The `step` of calls outside of any loop, in functions that run once."""
    once = run_once(tree)
    functions = [n for n in nodes_below(tree) if isinstance(n, ast.FunctionDef) and n.name in once]
    own = chain.from_iterable(own_nodes(f.body, (*LOOPS, *_ELSEWHERE)) for f in functions)
    return {call.func for call in calls_of("step", own)}


def _is_made_of(lists: set[str], form: ast.expr, names: Names) -> bool:
    """Whether `x` of `x[mask]`, `x.unique()` is made of one of some lists."""
    made = names.possible(form.value)  # type: ignore[attr-defined]
    parts = (part for value in made for part in ast.walk(value) if isinstance(part, NAMED))
    return not lists.isdisjoint(map(source_text, parts))


def _never_sent(tree: ast.Module) -> Iterator[ast.expr]:
    """The first model that the file makes and trains, where it names no device anywhere."""
    nodes = nodes_below(tree)
    asked = {id(n.value) for n in nodes if isinstance(n, ast.Attribute) and n.attr in _ASKS}
    words = {
        str(getattr(n, f, "")) for n in nodes for f in ("id", "attr", "arg") if id(n) not in asked
    }
    if {"to", "cuda"} & words or any(re.search("device|mps|gpu", word, re.I) for word in words):
        return
    made = [source_text(t) for n in nodes if isinstance(n, ast.Assign)
            and isinstance(n.value, ast.Call) for t in n.targets]  # fmt: skip
    trained = [call.func for call in calls_of("parameters", nodes)
               if any(f"{holder(call)}.".startswith(f"{name}.") for name in made)]  # fmt: skip
    yield from sorted(trained, key=lambda node: node.lineno)[:1]


def _made_too_early(tree: ast.Module) -> Iterator[ast.expr]:
    """Optimizers of models that are sent to a device later: below, or by a function they go to."""
    functions = [node for node in nodes_below(tree) if isinstance(node, ast.FunctionDef)]
    bodies: list[ast.Module | ast.FunctionDef] = [tree, *functions]
    given: dict[ast.AST, set[str]] = {f: {a.arg for a in f.args.args} for f in functions}
    # A step that moves a global model runs after the optimizer was made.
    shared = {f: {name for n in nodes_below(f) if isinstance(n, ast.Global) and trains(f)
                  for name in n.names} for f in functions}  # fmt: skip
    sent_by = {name for f in functions for name in (given[f] | shared[f]) & set(_sent(f))}
    for where in bodies:
        sent, nodes = _sent(where), list(own_nodes(where.body, _ELSEWHERE))
        for made in nodes:
            if isinstance(made, ast.Call) and MAKES_OPTIMIZER.search(source_text(made.func)):
                for call in calls_of("parameters", nodes_below(made)):
                    model = holder(call)
                    line = sent.get(model, sys.maxsize if model in sent_by else 0)
                    between = range(call.lineno + 1, line + 1)
                    is_other = any(_rebinds(n, model) in between for n in nodes)
                    if line > call.lineno and model not in given.get(where, ()) and not is_other:
                        yield call.func


def _rebinds(node: ast.AST, name: str) -> int:
    """The line that gives a name to another object than one made of the former, or 0."""
    if not isinstance(node, ast.Assign) or name not in map(source_text, node.targets):
        return 0
    return 0 if re.search(rf"\b{re.escape(name)}\b", source_text(node.value)) else node.lineno


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


def _made(tree: ast.Module, names: Names) -> Iterator[tuple[ast.expr, str]]:
    """Tensors that a CUDA type makes, or that become of that type, also by a name for it:
    `T = torch.cuda.FloatTensor if cuda else ...`."""
    for node in nodes_below(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        is_cast = isinstance(node.func, ast.Attribute) and node.func.attr == "type" and node.args
        made_by = names.possible(node.args[0] if is_cast else node.func)
        if any(map(_TENSOR_TYPE.fullmatch, map(source_text, made_by))):
            yield node.func, "cuda-tensor-made"


def _arguments(tree: ast.Module, names: Names) -> Iterator[tuple[ast.expr, str]]:
    """The values of such arguments, also by name; the name where that has other uses as well."""
    nodes = nodes_below(tree)
    known = rule_data("arguments")
    given = [(call, k) for call in nodes if isinstance(call, ast.Call)
             for k in call.keywords if k.arg in known]  # fmt: skip
    loads = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    for call, keyword in given:
        id, wanted = known[str(keyword.arg)]
        if keyword.arg == "precision" and called_name(call) not in ("Trainer", "Fabric", "dict"):
            continue
        of = names.possible(keyword.value)
        constants = (n for value in of for n in ast.walk(value) if isinstance(n, ast.Constant))
        found = [text for text in constants if re.fullmatch(wanted, str(text.value))]
        name = keyword.value.id if isinstance(keyword.value, ast.Name) else ""
        shared = loads[name] > len(names.values(name)) + sum(
            isinstance(k.value, ast.Name) and k.value.id == name for _, k in given
        )
        for text in [keyword.value] if found and shared else found:
            yield text, id


def _within(node: ast.AST, names: Names, *, in_forward: bool) -> Iterator[tuple[ast.expr, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant):
            if isinstance(child.value, str):
                yield from _text(child, child.value, node)
            continue
        inside = in_forward
        if isinstance(child, ast.FunctionDef):
            # Of a function that trains in a loop, the loop is the step.
            steps = any(isinstance(n, LOOPS) and trains(n) for n in ast.walk(child))
            inside |= bool(_FORWARD.fullmatch(child.name)) or (trains(child) and not steps)
        elif isinstance(child, LOOPS):
            inside = in_forward or trains(child)
        elif isinstance(child, ast.JoinedStr):
            first = child.values[0] if child.values else None
            if isinstance(first, ast.Constant) and str(first.value).startswith("cuda:"):
                yield child, "cuda-device-text"
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            yield from _method(child, child.func, names, in_forward=in_forward)
        elif isinstance(child, ast.Subscript) and in_forward and _is_mask(child, names):
            yield child, "cuda-values-shape"
        yield from _within(child, names, in_forward=inside)


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
    call: ast.Call, function: ast.Attribute, names: Names, *, in_forward: bool
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
    elif in_forward and function.attr in _SHAPED_BY_VALUES:
        yield function, "cuda-values-shape"
    elif in_forward and _ON_THE_CPU.fullmatch(source_text(function)):
        yield function, "leaves-the-device"


def _is_own(call: ast.Call, names: Names) -> bool:
    """Whether a class of the module defines the method that a call calls."""
    classes = [n for n, scope in names.scopes.items()
               if isinstance(n, ast.ClassDef) and method_of(call) in scope.bindings]  # fmt: skip
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
