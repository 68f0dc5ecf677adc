"""Mistakes in the making of modules, loaders, samplers and losses."""

import ast
import re
from collections.abc import Iterator, Sequence

from tpukit.probe.lint.mistakes.training_code import SCHEDULERS, Mistake, TrainingCode, is_loader
from tpukit.probe.lint.syntax import (
    argument,
    calls_of,
    holder,
    method_of,
    nodes_below,
    source_text,
)

_HOOKS = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")
_CONTAINERS = (ast.List, ast.ListComp, ast.Dict, ast.DictComp)
_MODULES = re.compile(
    r"torch\.nn\.(?!Parameter|functional|init|utils|ModuleList|Sequential)[A-Z]\w+"
)
_SETS_EPOCH = re.compile(r"^[^#\n]*(?:set_epoch|(?<!def )\btrain\w*\([^()]*sampler)", re.M)
"""In a function of another module, perhaps, that takes the sampler."""
_EPOCHS = re.compile(r"for \w+ in .*epoch|for epoch\b(?! in range\(1\))")


def in_class(code: TrainingCode, node: ast.ClassDef) -> Iterator[Mistake]:
    is_lightning = any(code.means(base, "lightning") for base in node.bases)
    if not is_lightning and not any(code.means(b, "module") for b in node.bases):
        return
    nodes = list(nodes_below(node))
    appended = [call for call in calls_of("append", nodes) if call.args]
    for inner in nodes:
        if isinstance(inner, ast.Assign) and isinstance(inner.value, _CONTAINERS):
            target = source_text(inner.targets[0])
            held = _elements(inner.value) or [c.args[0] for c in appended if holder(c) == target]
            is_own = target.startswith("self.") and _are_modules(code, held)
            if is_own and not _is_registered(target, ast.unparse(node)):
                yield inner, "modules-in-list", f"{target} = {source_text(inner.value)[:1]}...]"
        elif isinstance(inner, ast.FunctionDef) and inner.name == "forward":
            yield from _dropout(code, inner)
        elif isinstance(inner, ast.FunctionDef) and is_lightning:
            yield from _old_hook(inner)


def _old_hook(method: ast.FunctionDef) -> Iterator[Mistake]:
    """What Lightning 2.0 calls no more."""
    if method.name in _HOOKS:
        yield method, "epoch-end-outputs", f"{method.name}()"
    elif method.name == "training_step":
        for given in method.args.args:
            if given.arg == "optimizer_idx":
                yield method, "optimizer-index", "training_step(..., optimizer_idx)"


def _elements(value: ast.expr) -> list[ast.expr]:
    """What a list or a dict is written with."""
    if isinstance(value, ast.ListComp):
        return [value.elt]
    if isinstance(value, ast.DictComp):
        return [value.value]
    return value.elts if isinstance(value, ast.List) else getattr(value, "values", [])


def _are_modules(code: TrainingCode, elements: Sequence[ast.expr]) -> bool:
    calls = [e for e in elements if isinstance(e, ast.Call)]
    made = [name for call in calls for name in code.names.anywhere(call.func)]
    return bool(calls) and len(calls) == len(elements) and any(map(_MODULES.fullmatch, made))


def _is_registered(target: str, text: str) -> bool:
    """Whether a class hands what stands in a list to a container, or adds each of it."""
    named = re.escape(target)
    held = rf"(?:ModuleList|Sequential|add_module|register_module)\b.*{named}\b"
    added = rf"in (?:enumerate\()?{named}.*\n.*(?:setattr|add_module)"
    return re.search(f"{held}|{added}", text) is not None


def _dropout(code: TrainingCode, forward: ast.FunctionDef) -> Iterator[Mistake]:
    for node in nodes_below(forward):
        if isinstance(node, ast.Call) and code.means(node.func, "dropout"):
            given = {keyword.arg for keyword in node.keywords}
            is_given = len(node.args) > 2 or given & {"training", None}
            if not is_given and "self.training" not in ast.unparse(forward):
                yield node.func, "dropout-always-on", source_text(node)[:60]


# -- calls ---------------------------------------------------------------------------------------
def in_call(code: TrainingCode, node: ast.Call) -> Iterator[Mistake]:
    if code.means(node.func, "loader"):
        sampler = argument(node, "sampler")
        made = code.names.possible(sampler) if sampler else [ast.Constant(None)]
        is_made = all(isinstance(value, ast.Call) for value in made)
        if _is(argument(node, "shuffle"), True) and is_made:
            yield node.func, "sampler-with-shuffle", "DataLoader(shuffle=True, sampler=...)"
    elif code.means(node.func, "sampler"):
        if _lacks_epochs(code.text, node) and not _is(argument(node, "shuffle"), False):
            yield node.func, "sampler-without-epoch", "DistributedSampler(...)"
    elif not node.args:
        return
    elif any(
        code.means(node.func, f"{by}-taker") and code.is_activated(node.args[0], by)
        for by in ("softmax", "sigmoid")
    ):
        yield node.func, "softmax-before-loss", source_text(node)[:60]
    elif code.means(node.func, "cycle") and is_loader(node.args[0]):
        yield node.func, "loader-cycled", source_text(node)[:60]


def in_assignment(code: TrainingCode, node: ast.Assign) -> Iterator[Mistake]:
    """A scheduler that the file names once: nothing steps it. Best weights that train on."""
    target = node.targets[0]
    text = source_text(node.value) if method_of(node.value) in ("state_dict", "copy") else ""
    if text and re.fullmatch(r"[\w.]+\.state_dict\(\)(?:\.copy\(\))?", text):
        name = source_text(target)
        kept = re.escape(name)
        is_read = "best" in name and re.search(rf"load_state_dict\(\s*{kept}\b", code.text)
        if is_read and not re.search(rf"{kept}\s*=[^\n]*(?:deepcopy|clone|load)", code.text):
            yield node, "best-state-shared", f"{name} = {text}"
    if isinstance(node.value, ast.Call) and isinstance(target, ast.Name):
        made = code.names.anywhere(node.value.func)
        is_scheduler = any(name.startswith(SCHEDULERS) for name in made)
        if is_scheduler and len(re.findall(rf"\b{target.id}\b", code.text)) == 1:
            yield node, "scheduler-unused", source_text(node.value)[:60]


def _is(value: ast.expr | None, constant: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is constant


def _lacks_epochs(text: str, sampler: ast.Call) -> bool:
    """Whether a file trains in epochs on what a sampler gives, without `set_epoch`."""
    in_epochs = "optim" in text and _EPOCHS.search(text)
    evaluates = sampler.args and re.search(r"val|test|eval", source_text(sampler.args[0]), re.I)
    return bool(in_epochs) and not evaluates and not _SETS_EPOCH.search(text)
