"""Mistakes in the making of loaders, samplers, schedulers and losses."""

import ast
import re
from collections.abc import Iterator

from tpukit.probe.lint.mistakes.training_code import SCHEDULERS, Mistake, TrainingCode, is_loader
from tpukit.probe.lint.syntax import LOADERS, argument, source_text

_HOOKS = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")
_LIGHTNING = tuple(
    f"{package}.LightningModule"
    for package in ("lightning", "lightning.pytorch", "pytorch_lightning")
)
_SAMPLERS = (
    "torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler",
)  # fmt: skip
_TAKES_LOGITS = (
    "torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss()",
    "torch.nn.functional.softmax", "torch.softmax",
)  # fmt: skip


def in_class(code: TrainingCode, node: ast.ClassDef) -> Iterator[Mistake]:
    if any(code.means(base, _LIGHTNING) for base in node.bases):
        for method in node.body:
            if isinstance(method, ast.FunctionDef):
                yield from _old_hook(method)


def _old_hook(method: ast.FunctionDef) -> Iterator[Mistake]:
    """What Lightning 2.0 calls no more."""
    if method.name in _HOOKS:
        yield method, "epoch-end-outputs", f"{method.name}()"
    elif method.name == "training_step":
        for given in method.args.args:
            if given.arg == "optimizer_idx":
                yield method, "optimizer-index", "training_step(..., optimizer_idx)"


# -- calls ---------------------------------------------------------------------------------------
def in_call(code: TrainingCode, node: ast.Call) -> Iterator[Mistake]:
    if code.means(node.func, LOADERS):
        sampler = argument(node, "sampler")
        made = code.names.possible(sampler) if sampler else [ast.Constant(None)]
        is_made = all(isinstance(value, ast.Call) for value in made)
        if _is(argument(node, "shuffle"), True) and is_made:
            yield node.func, "sampler-with-shuffle", "DataLoader(shuffle=True, sampler=...)"
    elif code.means(node.func, _SAMPLERS):
        if _lacks_epochs(code.text, node) and not _is(argument(node, "shuffle"), False):
            yield node.func, "sampler-without-epoch", "DistributedSampler(...)"
    elif not node.args:
        return
    elif code.means(node.func, _TAKES_LOGITS) and code.is_softmax(node.args[0]):
        yield node.func, "softmax-before-loss", source_text(node)[:60]
    elif code.means(node.func, ("itertools.cycle",)) and is_loader(node.args[0]):
        yield node.func, "loader-cycled", source_text(node)[:60]


def in_assignment(code: TrainingCode, node: ast.Assign) -> Iterator[Mistake]:
    """A scheduler that the file names once: nothing steps it."""
    target = node.targets[0]
    if isinstance(node.value, ast.Call) and isinstance(target, ast.Name):
        made = code.names.anywhere(node.value.func)
        is_scheduler = any(name.startswith(SCHEDULERS) for name in made)
        if is_scheduler and len(re.findall(rf"\b{target.id}\b", code.text)) == 1:
            yield node, "scheduler-unused", source_text(node.value)[:60]


def _is(value: ast.expr | None, constant: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is constant


def _lacks_epochs(text: str, sampler: ast.Call) -> bool:
    """Whether a file trains in epochs on what a sampler gives, without `set_epoch`."""
    in_epochs = "optim" in text and re.search(r"for \w+ in .*epoch|for epoch\b", text)
    evaluates = sampler.args and re.search(r"val|test|eval", source_text(sampler.args[0]), re.I)
    return bool(in_epochs) and not evaluates and "set_epoch" not in text
