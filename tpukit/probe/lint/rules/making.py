"""Mistakes in the making of modules, loaders, samplers, losses and schedulers."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from tpukit.probe.lint.rules.code import SCHEDULERS, is_loader
from tpukit.probe.lint.rules.roles import EVALUATION_SET
from tpukit.probe.lint.rules.rule import Found, Rule
from tpukit.probe.lint.syntax import (
    argument,
    calls_in,
    calls_of,
    holder,
    is_constant,
    method_of,
    nodes_below,
    of_kind,
    source_text,
)

_CONTAINERS = (ast.List, ast.ListComp, ast.Dict, ast.DictComp)
_MODULES = re.compile(
    r"torch\.nn\.(?!Parameter|functional|init|utils|ModuleList|Sequential)[A-Z]\w+"
)
_SETS_EPOCH = re.compile(r"^[^#\n]*(?:set_epoch|(?<!def )\btrain\w*\([^()]*sampler)", re.M)
"""In a function of another module, perhaps, that takes the sampler."""
_EPOCHS = re.compile(r"for \w+ in .*epoch|for epoch\b(?! in range\(1\))")


class _OfClass(Rule):
    """A rule for classes of modules."""

    nodes = (ast.ClassDef,)
    bases: ClassVar[tuple[str, ...]] = ("lightning", "module")
    """Groups of names, one of which is a base."""

    def visit(self, node: Any) -> Iterator[Found]:
        if any(self.code.means(base, group) for base in node.bases for group in self.bases):
            yield from self.in_class(node)

    def in_class(self, node: ast.ClassDef) -> Iterator[Found]:
        raise NotImplementedError


class ModulesInList(_OfClass):
    """A `list` or a `dict` hides the modules in it from `parameters()`, `to()` and `state_dict()`:
    they are not trained, not moved, not saved. Use `nn.ModuleList` or `nn.ModuleDict`."""

    id = "modules-in-list"
    effect = "its parameters are not trained"
    new = "nn.ModuleList([...])"
    wrong = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = [nn.Linear(8, 8), nn.ReLU()]"
    )
    right = wrong.replace("[nn", "nn.ModuleList([nn").replace("()]", "()])")
    words = ("Module", "self.")
    sign = re.compile(
        r"self\.\w+\s*=\s*[\[{][^\]}]{0,200}\bnn\.[A-Z]|\.append\(\s*(?:torch\.)?nn\.[A-Z]"
    )

    def in_class(self, node: ast.ClassDef) -> Iterator[Found]:
        nodes = nodes_below(node)
        appended = [call for call in calls_of("append", nodes) if call.args]
        for inner in of_kind(nodes, ast.Assign):
            target = source_text(inner.targets[0])
            if isinstance(inner.value, _CONTAINERS) and target.startswith("self."):
                added = [c.args[0] for c in appended if holder(c) == target]
                held = _elements(inner.value) or added
                if self._are_modules(held) and not _is_registered(target, ast.unparse(node)):
                    yield inner, f"{target} = {source_text(inner.value)[:1]}...]"

    def _are_modules(self, elements: Sequence[ast.expr]) -> bool:
        calls = [e for e in elements if isinstance(e, ast.Call)]
        made = [name for call in calls for name in self.code.names.anywhere(call.func)]
        return bool(calls) and len(calls) == len(elements) and any(map(_MODULES.fullmatch, made))


def _elements(value: ast.expr) -> list[ast.expr]:
    """What a list or a dict is written with."""
    if isinstance(value, ast.ListComp):
        return [value.elt]
    if isinstance(value, ast.DictComp):
        return [value.value]
    return value.elts if isinstance(value, ast.List) else getattr(value, "values", [])


def _is_registered(target: str, text: str) -> bool:
    """Whether a class hands what stands in a list to a container, or adds each of it."""
    named = re.escape(target)
    held = rf"(?:ModuleList|Sequential|add_module|register_module)\b.*{named}\b"
    added = rf"in (?:enumerate\()?{named}.*\n.*(?:setattr|add_module)"
    return re.search(f"{held}|{added}", text) is not None


class DropoutAlwaysOn(_OfClass):
    """`F.dropout(x, p)` drops in evaluation as well: its `training` is `True` unless given. Pass
    `training=self.training`, or use `nn.Dropout`."""

    id = "dropout-always-on"
    effect = "drops in evaluation as well"
    new = "F.dropout(x, p, training=self.training), or nn.Dropout"
    wrong = "class Net(nn.Module):\n    def forward(self, x):\n        return F.dropout(x, 0.5)"
    right = wrong.replace("0.5", "0.5, training=self.training")
    words = ("dropout", "forward")
    sign = re.compile(
        r"dropout(?:2d)?\((?:(?<=[Fl]\.dropout\()|(?<![\w.]dropout\())(?![^)]*training)"
    )

    def in_class(self, node: ast.ClassDef) -> Iterator[Found]:
        functions = of_kind(nodes_below(node), ast.FunctionDef)
        for forward in (f for f in functions if f.name == "forward"):
            for call in calls_in(forward) if "self.training" not in ast.unparse(forward) else ():
                given = {keyword.arg for keyword in call.keywords}
                is_given = len(call.args) > 2 or given & {"training", None}
                if self.code.means(call.func, "dropout") and not is_given:
                    yield call.func, source_text(call)[:60]


class _OfHook(_OfClass):
    """A rule for methods that Lightning calls no more, or otherwise."""

    bases = ("lightning",)
    hooks: ClassVar[tuple[str, ...]]
    takes: ClassVar[str] = ""
    """A parameter that the method has."""

    def in_class(self, node: ast.ClassDef) -> Iterator[Found]:
        for method in of_kind(nodes_below(node), ast.FunctionDef):
            taken = ["", *(given.arg for given in method.args.args)]
            if method.name in self.hooks and self.takes in taken:
                yield method, f"{method.name}({self.takes and f'..., {self.takes}'})"


class EpochEndOutputs(_OfHook):
    """Lightning 2.0 removed `training_epoch_end`, `validation_epoch_end` and `test_epoch_end`: a
    module that defines one raises. Keep what the steps return in a list on `self`, and read and
    clear it in `on_validation_epoch_end(self)`."""

    id = "epoch-end-outputs"
    effect = "raises"
    new = "on_validation_epoch_end(self), with what the steps keep on self (Lightning 2.0)"
    wrong = (
        "import lightning\n"
        "class Net(lightning.LightningModule):\n    def validation_epoch_end(self, outputs): ..."
    )
    right = wrong.replace("validation_epoch_end(self, outputs)", "on_validation_epoch_end(self)")
    hooks = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")
    words = ("_epoch_end(",)


class OptimizerIndex(_OfHook):
    """Lightning 2.0 calls `training_step` without `optimizer_idx`: a module that takes one raises.
    Set `self.automatic_optimization = False`, take `self.optimizers()` in the step, and call
    `self.manual_backward(loss)`."""

    id = "optimizer-index"
    effect = "raises"
    new = "self.automatic_optimization = False and self.optimizers() (Lightning 2.0)"
    wrong = (
        "import lightning\nclass Net(lightning.LightningModule):\n"
        "    def training_step(self, batch, index, optimizer_idx): ..."
    )
    right = wrong.replace(", optimizer_idx", "")
    hooks = ("training_step",)
    takes = "optimizer_idx"
    words = ("optimizer_idx",)


# -- calls ---------------------------------------------------------------------------------------
class SamplerWithShuffle(Rule):
    """`DataLoader(shuffle=True, sampler=...)` raises a `ValueError`: the sampler decides the
    order."""

    id = "sampler-with-shuffle"
    effect = "raises"
    new = "one of them: the sampler decides the order"
    wrong = "DataLoader(data, shuffle=True, sampler=DistributedSampler(data, shuffle=False))"
    right = wrong.replace("shuffle=True, ", "")
    nodes = (ast.Call,)
    words = ("sampler=", "shuffle=")

    def visit(self, node: Any) -> Iterator[Found]:
        if self.code.means(node.func, "loader") and is_constant(argument(node, "shuffle"), True):
            sampler = argument(node, "sampler")
            made = self.code.names.possible(sampler) if sampler else [ast.Constant(None)]
            if all(isinstance(value, ast.Call) for value in made):
                yield node.func, "DataLoader(shuffle=True, sampler=...)"


class SamplerWithoutEpoch(Rule):
    """`DistributedSampler` shuffles by its seed and epoch. Without `set_epoch(epoch)` every epoch
    has the same order."""

    id = "sampler-without-epoch"
    effect = "the same order in every epoch"
    new = "sampler.set_epoch(epoch) at the beginning of each epoch"
    wrong = "sampler = DistributedSampler(data)\nfor epoch in range(9):\n    optimizer.step()"
    right = wrong.replace(":\n", ":\n    sampler.set_epoch(epoch)\n")
    nodes = (ast.Call,)
    words = ("DistributedSampler", "epoch", "optim")

    def visit(self, node: Any) -> Iterator[Found]:
        if not self.code.means(node.func, "sampler") or is_constant(
            argument(node, "shuffle"), False
        ):
            return
        evaluates = node.args and EVALUATION_SET.search(source_text(node.args[0]))
        text = self.code.text
        if _EPOCHS.search(text) and not evaluates and not _SETS_EPOCH.search(text):
            yield node.func, "DistributedSampler(...)"


class SoftmaxBeforeLoss(Rule):
    """`CrossEntropyLoss` (`F.cross_entropy`) takes logits and applies log-softmax itself. Here its
    input is a softmax's result, or that of a model whose `forward` returns one: gradients become
    small, and the loss cannot fall below a bound. A softmax of a softmax flattens probabilities in
    the same way, and so does a sigmoid before `BCEWithLogitsLoss`. `NLLLoss` takes log-softmax: of
    probabilities it is a loss without a logarithm. Return logits."""

    id = "softmax-before-loss"
    effect = "applies softmax (or sigmoid) twice: small gradients"
    new = "give it the logits (NLLLoss: log_softmax); probabilities only where they are read"
    wrong = "F.cross_entropy(F.softmax(model(x), dim=1), y).backward()\noptimizer.step()"
    right = wrong.replace("F.softmax(model(x), dim=1)", "model(x)")
    nodes = (ast.Call,)
    words = (".backward(", "oftmax|igmoid")

    def visit(self, node: Any) -> Iterator[Found]:
        if node.args and any(
            self.code.means(node.func, f"{by}-taker") and self.code.is_activated(node.args[0], by)
            for by in ("softmax", "sigmoid")
        ):
            yield node.func, source_text(node)[:60]


class LoaderCycled(Rule):
    """`itertools.cycle(loader)` keeps every batch of the first pass in memory and gives the same
    ones, in the same order and with the same augmentation, ever after. Call `iter(loader)` again
    where it ends."""

    id = "loader-cycled"
    effect = "keeps every batch in memory, and repeats the first epoch's order"
    new = "a loop that calls iter(loader) again where it ends"
    wrong = "import itertools\nbatches = itertools.cycle(loader)"
    right = "def batches():\n    while True:\n        yield from loader"
    nodes = (ast.Call,)
    words = ("cycle(", "itertools")

    def visit(self, node: Any) -> Iterator[Found]:
        if node.args and self.code.means(node.func, "cycle") and is_loader(node.args[0]):
            yield node.func, source_text(node)[:60]


# -- assignments ---------------------------------------------------------------------------------
class SchedulerUnused(Rule):
    """A scheduler is made, and the file never names it again: the learning rate stays at its first
    value. Call `scheduler.step()` after each epoch (or step)."""

    id = "scheduler-unused"
    effect = "the rate never changes"
    new = "scheduler.step() after each epoch or step"
    wrong = "decay = torch.optim.lr_scheduler.StepLR(optimizer, 3)"
    right = f"{wrong}\nfor epoch in range(9):\n    decay.step()"
    nodes = (ast.Assign,)
    words = ("lr_scheduler",)

    def visit(self, node: Any) -> Iterator[Found]:
        target = node.targets[0]
        if isinstance(node.value, ast.Call) and isinstance(target, ast.Name):
            made = self.code.names.anywhere(node.value.func)
            is_scheduler = any(name.startswith(SCHEDULERS) for name in made)
            if is_scheduler and len(re.findall(rf"\b{target.id}\b", self.code.text)) == 1:
                yield node, source_text(node.value)[:60]


class BestStateShared(Rule):
    """The tensors of a `state_dict()` (and of its `copy()`) are those of the model: training goes
    on in them, and "the best weights" are the last ones. Take `copy.deepcopy(model.state_dict())`,
    or save them to a file."""

    id = "best-state-shared"
    effect = "holds the last weights, not the best"
    new = "copy.deepcopy(model.state_dict()): a state_dict shares its tensors with the model"
    wrong = (
        "for epoch in range(9):\n    model(x).backward()\n    optimizer.step()\n"
        "    best = model.state_dict()\nmodel.load_state_dict(best)"
    )
    right = wrong.replace("model.state_dict()", "copy.deepcopy(model.state_dict())")
    nodes = (ast.Assign,)
    words = (".backward(", ".state_dict()", "load_state_dict(", "best")

    def visit(self, node: Any) -> Iterator[Found]:
        text = source_text(node.value) if method_of(node.value) in ("state_dict", "copy") else ""
        name = source_text(node.targets[0]) if text else ""
        if "best" in name and re.fullmatch(r"[\w.]+\.state_dict\(\)(?:\.copy\(\))?", text):
            kept = re.escape(name)
            is_read = re.search(rf"load_state_dict\(\s*{kept}\b", self.code.text)
            is_copied = re.search(rf"{kept}\s*=[^\n]*(?:deepcopy|clone|load)", self.code.text)
            if is_read and not is_copied:
                yield node, f"{name} = {text}"
