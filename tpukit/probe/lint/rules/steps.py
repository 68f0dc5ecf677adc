"""Waits for the device in each training step: reads on the host, barriers, shapes that grow."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from tpukit.probe.lint.guards import ends
from tpukit.probe.lint.rules.code import Code
from tpukit.probe.lint.rules.roles import LOADS_DATA, LOSS, MODEL, off_tpu
from tpukit.probe.lint.rules.rule import TPU, XLA, Found, Rule
from tpukit.probe.lint.syntax import (
    ELSEWHERE,
    FUNCTIONS,
    LOOPS,
    called_name,
    calls_in,
    calls_of,
    children,
    holder,
    is_constant,
    method_of,
    nodes_below,
    of_kind,
    own_nodes,
    source_text,
)

_READS = ("item", "tolist", "numpy", "cpu")
_SELDOM = re.compile(
    r"%(?! 1\b)|log|print|verbose|debug|report|every|interval|eval|profil|random\(\) ?<=? ?0?\.\d"
    r"|\b(?:\w*step|\w*iter|\w*idx|\w*batch|i|it)(?: \+ 1)? ?== |(?:<=?|==) ?[1-9]\d*$",
    re.I,
)
_ON_HOST = re.compile(r"(?:np|numpy|math)\.|torch\.(?:t|\w*T)ensor\(")
_SENDS = re.compile(r"device|cuda|\.to\(")
_OF_OBJECTS = (ast.Is, ast.IsNot, ast.In, ast.NotIn)
_NUMBER_TESTS = ("isnan", "isinf", "isfinite")
_TESTS = (ast.If, ast.While, ast.IfExp, ast.Assert)
_BINDS = (ast.Assign, ast.AugAssign)
_BODIES = (*LOOPS, *FUNCTIONS)
_OWN_BODY = (*LOOPS, *ELSEWHERE)
_OVER = ("iter", "target")
_JOINS = ("cat", "concat", "hstack")
_PARTS = re.compile(r"layer|block|module|conv|stage|\bups?\b|zip\(|file|path|folder", re.I)
"""A loop over a network's layers, or the files of a data set."""
_ACTS = re.compile(r"(?:select|choose|take|sample|get)_?actions?|act(?:ion)?", re.I)
"""Functions that reinforcement learning calls at each step of an environment."""


class Steps:
    """The loops and functions of a module that run a training step."""

    def __init__(self, code: Code) -> None:
        self._code = code

    def is_step(self, node: Any) -> bool:
        """Whether the own body of a loop or a function is one."""
        name = getattr(node, "name", "") if self._code.uses_xla else ""
        if name == "training_step" or _ACTS.fullmatch(name):
            return True
        is_function = isinstance(node, FUNCTIONS)
        if is_function and node.name in self._code.run_once:
            return False
        return any(self._runs_step(n, is_function) for n in of_kind(_own(node.body), ast.Call))

    def is_body(self, node: Any) -> bool:
        """Also of a loop over a loader, which may validate."""
        is_loop = isinstance(node, ast.For) and re.search("loader", source_text(node.iter), re.I)
        return self.is_step(node) or bool(is_loop)

    def _runs_step(self, call: ast.Call, is_function: bool) -> bool:
        """Whether a call is a backward pass, or in a loop a sync or a function with such a pass."""
        code = self._code
        if self._is_backward(call) or (code.uses_xla and code.is_optimizer_step(call)):
            return True  # the latter with the backward pass in a loop over micro-batches
        if is_function:
            return False
        # Also under another name, and what `compile` makes of it.
        for made in code.names.possible(call.func):
            parts = made.args if "compile" in called_name(made) else [made]  # type: ignore[attr-defined]
            if {source_text(p).removeprefix("self.") for p in parts} & self._step_functions:
                return True
        return code.uses_xla and code.means(call.func, "ends-a-step")

    def _is_backward(self, call: ast.Call) -> bool:
        if method_of(call) != "backward" or len(call.args) > 1:
            return False  # a network's takes more
        return self._code.uses_xla or "accelerator" in holder(call).lower()

    @cached_property
    def _step_functions(self) -> set[str]:
        """Functions that run one backward pass."""
        functions = of_kind(nodes_below(self._code.tree), *FUNCTIONS)
        calls = {f.name: of_kind(_own(f.body), ast.Call) for f in functions}
        return {name for name, own in calls.items() if any(map(self._is_backward, own))}

    def every_step(self, body: Sequence[ast.AST]) -> Iterator[ast.AST]:
        """The nodes of a body, without what runs only sometimes (logging), ends the loop, or runs
        off a TPU."""
        stack = list(body)
        while stack:
            node = stack.pop()
            # `for key in losses:` within the step is a part of it.
            is_part = isinstance(node, ast.For) and not LOADS_DATA.search(source_text(node.iter))
            if isinstance(node, _OWN_BODY) and not is_part:
                continue
            if isinstance(node, ast.If):
                test = source_text(node.test)
                # Gradients that are accumulated: `if (i + 1) % n == 0: optimizer.step()`.
                steps = any(map(self._code.is_optimizer_step, nodes_below(node)))
                if _SELDOM.search(test) and not steps:
                    continue
                if ends(node.body):
                    yield node
                    stack += (node.test, *node.orelse)
                    continue
                if (is_off := off_tpu(test)) is not None:
                    stack += node.orelse if is_off else (node.test, *node.body)
                    continue
            yield node
            stack += children(node)


class _OfSteps(Rule):
    """A rule for scripts that reach a TPU by torch_xla or accelerate."""

    nodes: ClassVar[tuple[type[ast.AST], ...]] = _BODIES
    packages: ClassVar[tuple[str, ...]] = TPU


class ReadInStep(_OfSteps):
    """`loss.item()`, `float(loss)`, `print(loss)` or a test of the loss in each step waits until
    the device has computed it, and the next step begins late. Read it every 50 steps, say, after
    the sync."""

    id = "read-in-step"
    effect = "waits each step"
    new = "read when logging, after the sync: each read waits for the device"
    wrong = (
        "import torch_xla\nfor step, x in enumerate(loader):\n    loss = model(x)\n"
        "    loss.backward()\n    optimizer.step()\n    torch_xla.sync()\n    print(loss.item())"
    )
    right = wrong.replace("    print(", "    if step % 50 == 0:\n        print(")
    nodes = (*_BODIES, ast.Lambda)

    def visit(self, node: Any) -> Iterator[Found]:
        if isinstance(node, ast.Lambda):
            yield from self._of_lambda(node) if self.code.uses_xla else ()
        elif self.code.part(Steps).is_step(node):
            nodes = list(self.code.part(Steps).every_step(node.body))
            loads_on_host = self.code.packages.isdisjoint(TPU)
            taken = node.target if loads_on_host and isinstance(node, ast.For) else None
            yield from _reads(nodes, _on_host(taken, nodes))

    def _of_lambda(self, node: ast.Lambda) -> Iterator[Found]:
        """A function of a loss that reads it: a library calls it with each step's."""
        given = {argument.arg for argument in node.args.args}
        call = node.body
        if isinstance(call, ast.Call) and _is_read(call, set()):
            of = {n.id for n in of_kind(nodes_below(call), ast.Name)} & given
            if any(map(LOSS.search, of)) and "print" not in source_text(call.func):
                yield call, f"{source_text(call)[:40]} in the step"


class WaitInStep(_OfSteps):
    """A barrier, `xm.rendezvous`, `mesh_reduce` or `sync(wait=True)` in each step: the host waits
    for the device, and every rank for the slowest. Leave it out, or wait once an epoch."""

    id = "wait-in-step"
    effect = "waits each step"
    new = "omit it, or wait once an epoch: the step waits for the device and every rank"
    wrong = (
        "import torch_xla\nfor x in loader:\n    model(x).backward()\n    optimizer.step()\n"
        "    torch_xla.sync(wait=True)"
    )
    right = wrong.replace("wait=True", "")

    def visit(self, node: Any) -> Iterator[Found]:
        steps = self.code.part(Steps)
        if steps.is_body(node):
            for call in filter(self._waits, of_kind(steps.every_step(node.body), ast.Call)):
                yield call.func, f"{source_text(call)[:40]} in each step"

    def _waits(self, node: ast.Call) -> bool:
        if self.code.means(node.func, "syncs"):
            given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "wait")]
            return any(is_constant(value, True) for value in given)
        return self.code.means(node.func, "waits") or method_of(node) == "wait_for_everyone"


class SyncInStep(_OfSteps):
    """A sync between the forward and the backward pass cuts the step into two programs, with what
    the backward pass needs kept between them. Once, after `optimizer.step()`, is enough."""

    id = "sync-in-step"
    effect = "cuts the step in two"
    new = "once, after optimizer.step(): here it cuts the step into two programs"
    wrong = (
        "import torch_xla\nfor x in loader:\n    loss = model(x)\n    torch_xla.sync()\n"
        "    loss.backward()\n    optimizer.step()"
    )
    right = wrong.replace("    torch_xla.sync()\n", "") + "\n    torch_xla.sync()"
    packages = XLA

    def visit(self, node: Any) -> Iterator[Found]:
        if not self.code.part(Steps).is_body(node):
            return
        forward, cut = False, None
        for call in of_kind((getattr(s, "value", None) for s in node.body), ast.Call):
            if self.code.means(call.func, "syncs"):
                cut = call if forward else None
            elif method_of(call) == "backward":
                if cut is not None:
                    yield cut.func, f"{source_text(cut)[:40]} before backward()"
                return
            else:
                forward |= MODEL.search(source_text(call.func)) is not None


class GrowingShape(_OfSteps):
    """`x = torch.cat([x, y])` in a loop makes a tensor of another shape in each pass, and each
    shape is compiled. Make one tensor of the full length, and move a position through it."""

    id = "growing-shape"
    effect = "recompiles for each length"
    new = (
        "a tensor of the full length, and a position that moves through it: each new shape is "
        "compiled"
    )
    wrong = (
        "import torch_xla\nfor _ in range(9):\n    tokens = torch.cat([tokens, model(tokens)], 1)"
    )
    right = "import torch_xla\nfor at in range(9):\n    tokens[:, at] = model(tokens)"
    nodes = LOOPS
    packages = XLA

    def visit(self, node: Any) -> Iterator[Found]:
        over, target = (source_text(getattr(node, part, ast.Constant(""))) for part in _OVER)
        for call in () if _PARTS.search(over) else _grown(node.body, {target}):
            yield call.func, source_text(call)[:60]


def _reads(nodes: Sequence[ast.AST], on_host: Mapping[str, int]) -> Iterator[Found]:
    """on_host: names of what the host holds, and the last line where it does."""
    read = _names_read(nodes)
    roots = {call: re.split(r"\W", source_text(call), maxsplit=1)[0]
             for call in of_kind(nodes, ast.Call) if _is_read(call, read)}  # fmt: skip
    calls = [call for call, root in roots.items() if call.lineno > on_host.get(root, 0)]
    # `loss.cpu().item()` is one read: the outermost.
    inner = {n for call in calls for n in nodes_below(call)[1:]}
    losses = {holder(call) for call in calls_of("backward", nodes)} - read
    texts = of_kind(nodes, ast.BinOp, ast.FormattedValue)
    shown = [text for text in texts if not losses.isdisjoint(_formatted(text))]
    for place in (*calls, *shown):
        if place not in inner:
            yield place, f"{source_text(place)[:40]} in the step"
    tensors = _losses_computed(nodes) - read
    for test in (n.test for n in nodes if isinstance(n, _TESTS)):
        if _tests_a_tensor(test, tensors):
            yield test, f"if {source_text(test)[:40]} in the step"


def _grown(block: Sequence[ast.stmt], made: set[str]) -> Iterator[ast.Call]:
    """`x = torch.cat([x, y])` on the device, of an x that is not `made` anew around the block."""
    assigns = [s for s in block if isinstance(s, ast.Assign) and called_name(s.value) not in _JOINS]
    made = made | {name for s in assigns for name in _bound(s)
                   if not source_text(s.value).startswith((f"{name}.", f"{name}["))}  # fmt: skip
    for statement in block:
        call = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(call, ast.Call) and called_name(call) in _JOINS:
            parts = [source_text(p) for a in call.args[:1] for p in getattr(a, "elts", ())]
            is_moved = re.search(r"cpu\(|numpy|\b[np][pd]\.", source_text(call))
            if source_text(statement.targets[0]) in {*parts} - made and not is_moved:  # type: ignore[attr-defined]
                yield call
        if not isinstance(statement, _OWN_BODY):
            for name in ("body", "orelse", "finalbody"):
                yield from _grown(getattr(statement, name, ()), made)


def _on_host(taken: ast.expr | None, nodes: Sequence[ast.AST]) -> dict[str, int]:
    """What a loop takes from a loader, also unpacked, and tensors made of numbers: the line that
    sends each to a device or binds its name anew."""
    given = ast.walk(taken) if taken else ()
    found = {n.id: sys.maxsize for n in given if isinstance(n, ast.Name)}
    for node in sorted((n for n in nodes if isinstance(n, _BINDS)), key=lambda n: n.lineno):
        value = node.value.value if isinstance(node.value, ast.Subscript) else node.value
        text = source_text(value)
        is_made = isinstance(value, ast.Call) and _ON_HOST.match(text) and not _SENDS.search(text)
        is_kept = is_made or isinstance(value, ast.Constant) or found.get(text, 0) > node.lineno
        for name in _bound(node):
            if is_kept:
                found.setdefault(name, sys.maxsize)
            else:
                found[name] = min(found.get(name, 0), node.lineno)
    for call in (n.value for n in nodes if isinstance(n, ast.Expr)):
        if method_of(call) in ("to", "cuda") and (name := holder(call)) in found:  # type: ignore[arg-type]
            found[name] = min(found[name], call.lineno)
    return found


def _names_read(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that hold a Python number: assigned from a read in the step."""
    found: set[str] = set()
    for node in of_kind(nodes, *_BINDS):
        if any(_is_read(call, set()) for call in calls_in(node.value)):
            found |= set(_bound(node))
    return found


def _losses_computed(nodes: Sequence[ast.AST]) -> set[str]:
    """Names of losses that the step computes."""
    made = (n for n in of_kind(nodes, ast.Assign) if not isinstance(n.value, ast.Constant))
    return {name for node in made for name in _bound(node) if LOSS.search(name)}


def _bound(node: ast.Assign | ast.AugAssign) -> list[str]:
    """What an assignment binds, as code."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = (part for outer in targets for part in getattr(outer, "elts", [outer]))
    return list(map(source_text, parts))


def _formatted(text: ast.BinOp | ast.FormattedValue) -> list[str]:
    """What `"%.3f" % loss` or `f"{loss}"` shows, as code."""
    if isinstance(text, ast.FormattedValue):
        return [source_text(text.value)]
    is_text = isinstance(getattr(text.left, "value", None), str)
    return [source_text(e) for e in getattr(text.right, "elts", [text.right])] if is_text else []


def _tests_a_tensor(test: ast.expr, tensors: set[str]) -> bool:
    """`loss > 10`, `torch.isnan(loss)`."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], _OF_OBJECTS):
            sides = [node.left, *node.comparators]
            kinds = {type(s.value) for s in sides if isinstance(s, ast.Constant)}
            if kinds <= {int, float} and not tensors.isdisjoint(map(source_text, sides)):
                return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = map(source_text, node.args)
            if node.func.attr in _NUMBER_TESTS and not tensors.isdisjoint(given):
                return True
            if node.func.attr in ("any", "all") and not node.args:
                return True  # `if not mask.all()`
    return False


def _is_read(node: ast.Call, numbers: set[str]) -> bool:
    """`loss.item()`, `float(loss)`, `print(loss)`. numbers: names that were read already."""
    function = node.func
    if isinstance(function, ast.Name):
        return function.id in ("float", "print") and _takes_a_loss(node, numbers)
    if not isinstance(function, ast.Attribute) or function.attr not in _READS or node.args:
        return False
    base = source_text(function.value)
    is_known = base in numbers and function.attr != "item"
    return not is_known and (not _ON_HOST.match(base) or bool(_SENDS.search(base)))


def _takes_a_loss(call: ast.Call, numbers: set[str]) -> bool:
    """Not in a read of its own, which is found there; `losses.avg` is a number."""
    inner = [n for argument in call.args for n in nodes_below(argument)]
    calls = of_kind(inner, ast.Call)
    methods = {n.func for n in calls}
    fields = {n.value for n in of_kind(inner, ast.Attribute) if n.attr != "data"} - {
        n.value for n in methods if isinstance(n, ast.Attribute)
    }
    names = {n.id for n in of_kind(inner, ast.Name) if n not in fields}
    shows_loss = any(LOSS.search(name) for name in names - numbers)
    return shows_loss and not any(_is_read(n, set()) for n in calls)


def _own(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a body, without those of functions, classes and loops defined in it."""
    return own_nodes(body, _OWN_BODY)
