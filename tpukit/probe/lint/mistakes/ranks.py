"""Mistakes of scripts on several devices: wrapped models, loaders, launchers, accelerate."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence

from tpukit.knowledge.calls import name_group
from tpukit.probe.lint.mistakes.training_code import Mistake, TrainingCode
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    calls_of,
    method_of,
    nodes_below,
    own_nodes,
    source_text,
)

_ASKS_FOR_WRAP = re.compile(
    r"hasattr|isinstance|parallel|distributed|ddp|gpus|n_?gpu|cuda|world|-1|module|\bn?dp\b|multi",
    re.I,
)
_ASKED = re.compile(r"\b(?!(?:not|and|or|is|in|None|len|int)\b)[A-Za-z_][\w.]*")
"""What a condition asks for: `args.standalone`."""
_CAUGHT = ast.Name("hasattr")
_BY_ENVIRONMENT = re.compile(
    r"LOCAL_RANK|deepspeed|^[^#\n]*local_rank\s*=(?!=|\s*\w+\.local_rank)|--local-rank|SLURM_", re.M
)


def in_module(code: TrainingCode) -> Iterator[Mistake]:
    """The mistakes whose words the text shows."""
    nodes = nodes_below(code.tree)
    if "--local_rank" in code.text:
        yield from _launched(code, nodes)
    if ".prepare(" in code.text:
        yield from _prepared(nodes)
    if "DataParallel" in code.text:
        yield from _wrapped(code, nodes)


def _wrapped(code: TrainingCode, nodes: Sequence[ast.AST]) -> Iterator[Mistake]:
    """Attributes of the model that are asked of its wrapper."""
    wraps = {n: source_text(n.targets[0]) for n in nodes if isinstance(n, ast.Assign)
             and isinstance(n.value, ast.Call) and code.means(n.value.func, "wrapper")}  # fmt: skip
    for scope in nodes if wraps else ():
        if isinstance(scope, (ast.Module, *FUNCTIONS)):
            own = list(own_nodes(scope.body, (*FUNCTIONS, ast.ClassDef)))
            for wrap in wraps.keys() & set(own):
                yield from _attributes(wrap, wraps[wrap], own)


def _attributes(wrap: ast.Assign, name: str, nodes: Sequence[ast.AST]) -> Iterator[Mistake]:
    """What the wrapper lacks, behind the wrap and before the name is another's."""
    assigns = [n for n in nodes if isinstance(n, ast.Assign)]
    targets = [(n, t) for n in assigns for t in n.targets]
    known = name_group("of-wrappers")
    own = {t.attr for _, t in targets if isinstance(t, ast.Attribute)}
    line = wrap.end_lineno or 0
    others = [n.lineno for n, t in targets if n.lineno > line and source_text(t) == name
              and method_of(n.value) not in ("to", "cuda")]  # fmt: skip
    end = min(others, default=sys.maxsize)
    tests = [n for n in nodes if isinstance(n, ast.Try | ast.If | ast.IfExp)]
    asked = {n: source_text(getattr(n, "test", _CAUGHT)) for n in tests}
    around = (n for n in tests if n.lineno <= wrap.lineno <= (n.end_lineno or 0))
    wrapped_if = {word for n in around for word in _ASKED.findall(asked[n])}
    guards = [n for n in tests if not wrapped_if.isdisjoint(_ASKED.findall(asked[n]))
              or _ASKS_FOR_WRAP.search(asked[n])]  # fmt: skip
    guarded = {line for g in guards for line in range(g.lineno, (g.end_lineno or 0) + 1)}
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and line < node.lineno < end
            and node.lineno not in guarded
            and not (node.attr in known or node.attr in own or node.attr.startswith("_"))
            and source_text(node.value) == name
        ):
            yield node, "wrapper-attribute", source_text(node)


def _launched(code: TrainingCode, nodes: Sequence[ast.AST]) -> Iterator[Mistake]:
    """A launcher's argument that no launcher passes."""
    if re.search(r"\.local_rank\b", code.text) and not _BY_ENVIRONMENT.search(code.text):
        for call in calls_of("add_argument", nodes):
            if [a.value for a in call.args if isinstance(a, ast.Constant)] == ["--local_rank"]:
                yield call, "local-rank-argument", 'add_argument("--local_rank")'


def _prepared(nodes: Sequence[ast.AST]) -> Iterator[Mistake]:
    """What accelerate prepares, taken in another order."""
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Tuple) and method_of(node.value) == "prepare":  # type: ignore[attr-defined]
            taken, given = ([source_text(e) for e in part]
                            for part in (target.elts, node.value.args))  # type: ignore[attr-defined]  # fmt: skip
            if taken != given and sorted(taken) == sorted(given):
                text = f"{', '.join(taken)} = prepare({', '.join(given)})"
                yield node, "prepare-order", text[:80]  # type: ignore[misc]
