"""Finds mistakes of PyTorch training code that raise nothing: a gradient that is never cleared, an
evaluation that is never left. Each has a section in docs/doctor_rules.md.

A rule reports only what the file itself shows; where the other half may stand elsewhere (a class
of another module, a library's loop), it reports nothing.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tpukit.knowledge.calls import CallStatus
from tpukit.probe.lint.cuda_forms import is_optimizer_step
from tpukit.probe.lint.finding import ModuleFinding
from tpukit.probe.lint.names import Names, Scope, children, nodes_below, source_text, trains
from tpukit.probe.lint.source import Module

RULES = {
    "no-zero-grad": ("gradients add up over all steps", "optimizer.zero_grad() in each step"),
    "gradients-cleared": (
        "the step has no gradients",
        "zero_grad() before backward() or after step(), not between them",
    ),
    "scheduler-first": (
        "the first rate is skipped",
        "scheduler.step() after optimizer.step()",
    ),
    "eval-not-left": (
        "trains without drop-out and with fixed batch statistics from then on",
        "model.train() before the next epoch",
    ),
    "eval-with-gradients": (
        "keeps activations for a backward pass that never comes",
        "with torch.no_grad(): (or inference_mode) around the evaluation",
    ),
    "never-in-eval": (
        "measures with drop-out and batch statistics of its own",
        "model.eval() before the evaluation, model.train() after it",
    ),
    "loss-keeps-graph": (
        "keeps each step's graph: memory grows",
        "loss.detach() (.item() waits for the device)",
    ),
    "softmax-before-loss": (
        "cross entropy applies softmax again: small gradients",
        "give it the logits; softmax only where probabilities are read",
    ),
    "sampler-with-shuffle": ("raises", "one of them: the sampler decides the order"),
    "sampler-without-epoch": (
        "the same order in every epoch",
        "sampler.set_epoch(epoch) at the beginning of each epoch",
    ),
    "clip-after-step": ("clips nothing", "clip_grad_norm_ between backward() and step()"),
    "clip-scaled": (
        "clips gradients that are still scaled",
        "scaler.unscale_(optimizer) before clip_grad_norm_",
    ),
    "modules-in-list": ("its parameters are not trained", "nn.ModuleList([...])"),
    "epoch-end-outputs": (
        "raises",
        "on_validation_epoch_end(self), with what the steps keep on self (Lightning 2.0)",
    ),
    "dropout-always-on": (
        "drops in evaluation as well",
        "F.dropout(x, p, training=self.training), or nn.Dropout",
    ),
}
"""Rule -> what happens, and what to write instead."""
MAY_HOLD = {
    b".backward(": re.compile(b""),
    b"DistributedSampler(": re.compile(rb"for epoch\b"),
    b".dropout(": re.compile(rb"(?:\bF|functional)\.dropout\((?![^\n]{0,200}training)"),
    b".eval()\n": re.compile(rb"(?i)for .{0,200}(?:load|batches|dl\b)"),
    b"sampler=": re.compile(rb"shuffle=True[^;]{0,300}sampler=|sampler=[^;]{0,300}shuffle=True"),
    b" = [nn.": re.compile(rb"self\.\w+ = \[nn\.[A-Z]"),
    b": nn.": re.compile(rb"self\.\w+ = \{[^}]{0,200}: nn\.[A-Z]"),
    b".append(nn.": re.compile(rb"self\.\w+\.append\(nn\.[A-Z]"),
    b"_epoch_end(": re.compile(rb"def (?:training|validation|test)_epoch_end\("),
}
"""A word and what must be found besides: without one of these pairs no rule applies."""
_REMOVED_HOOKS = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")
_LIGHTNING = tuple(
    f"{package}.LightningModule"
    for package in ("lightning", "lightning.pytorch", "pytorch_lightning")
)
_LOADS = re.compile(r"load|dl\b|batches|_iter\b", re.I)
_CONTAINERS = (ast.List, ast.ListComp, ast.Dict, ast.DictComp)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_SAMPLERS = (
    "torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler",
)  # fmt: skip
_NO_GRADIENTS = re.compile(
    r"no_grad|inference_mode|set_grad_enabled|requires_grad|(?<!zero_)grad\("
)
_EVALUATION = re.compile(
    r"\.eval\(|\.train\((?:mode=)?(?:True|False|\w*(?:mode|train)\w*)\)|\.training\b"
)
_MODULES = re.compile(
    r"torch\.nn\.(?!Parameter|functional|init|utils|ModuleList|Sequential)[A-Z]\w+"
)
_SOFTMAX = ("torch.nn.functional.softmax", "torch.softmax", "torch.nn.Softmax()")
_CROSS_ENTROPY = ("torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss()")


def find_mistakes(module: Module, names: Names) -> list[ModuleFinding]:
    """The mistakes of a parsed module that imports torch."""
    assert module.tree is not None
    scan = _Scan(module.tree, names, module.text)
    if not any((b.name or "").partition(".")[0] == "torch"
               for found in names.module.bindings.values() for b in found):  # fmt: skip
        return []
    found: list[ModuleFinding] = []
    for node, id, old in scan.all():
        effect, new = RULES[id]
        status: CallStatus = "removed" if effect == "raises" else "habit"
        place = ModuleFinding(*module.span(node), id, old, new, "XLA", status, effect=effect)
        if place not in found:
            found.append(place)
    return found


Mistake = tuple[ast.expr | ast.stmt, str, str]


@dataclass
class _Scan:
    tree: ast.Module
    names: Names
    text: str
    _binding: dict[str, list[Scope]] = field(default_factory=dict)
    """Name -> the scopes that bind it."""

    def all(self) -> Iterator[Mistake]:
        is_trained, evaluates = ".backward(" in self.text, ".eval()" in self.text
        if is_trained and not _EVALUATION.search(self.text):
            yield from self._never_in_eval()
        for node in nodes_below(self.tree):
            if isinstance(node, _LOOPS) and is_trained:
                yield from self._loop(node)
            elif isinstance(node, (*_FUNCTIONS, ast.Module)) and evaluates:
                yield from self._function(node)
            elif isinstance(node, ast.ClassDef):
                yield from self._class(node)
            elif isinstance(node, ast.Call):
                yield from self._call(node)
            for block in _blocks(node) if is_trained else ():
                yield from self._order(block)

    # -- what things are --------------------------------------------------------------------------
    def _means(self, node: ast.expr, wanted: Sequence[str]) -> bool:
        last = node.attr if isinstance(node, ast.Attribute) else ""
        if last and not any(name.rstrip("()").endswith(f".{last}") for name in wanted):
            return False
        return any(name in wanted for name in self._meanings(node))

    def _meanings(self, node: ast.expr) -> list[str]:
        """In the first scope that knows the name; enough for a whole file."""
        root = node
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        if not isinstance(root, ast.Name):
            return []
        if root.id not in self._binding:
            scopes = self.names.scopes.values()
            self._binding[root.id] = [s for s in scopes if root.id in s.bindings]
        if root.id in ("self", "cls") or self.names.has_stars:
            return self.names.resolve(node, self.names.module)
        found = (self.names.resolve(node, scope) for scope in self._binding[root.id])
        return next(filter(None, found), [])

    def _is(self, call: ast.AST, method: str, of: str) -> bool:
        """Whether a call is `x.method()`, where x is made by something of `of`."""
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return False
        if call.func.attr != method:
            return False
        return any(name.startswith(of) for name in self._meanings(call.func.value))

    def _is_optimizer_step(self, node: ast.AST) -> bool:
        """By what it is made of; where another module makes it, by its name."""
        if not isinstance(node, ast.Call) or _method_of(node) != "step":
            return False
        if self._is_scheduler_step(node):
            return False
        known = self._meanings(node.func.value)  # type: ignore[attr-defined]
        return (
            any(k.startswith("torch.optim.") for k in known) if known else is_optimizer_step(node)
        )

    def _is_scheduler_step(self, node: ast.AST) -> bool:
        return self._is(node, "step", "torch.optim.lr_scheduler.")

    # -- loops ------------------------------------------------------------------------------------
    def _loop(self, loop: ast.For | ast.While | ast.AsyncFor) -> Iterator[Mistake]:
        inner = list(_own_nodes(loop.body))
        backward = _calls_of("backward", inner)
        if not backward:
            return
        steps = [call for call in _calls_of("step", inner) if self._is_optimizer_step(call)]
        if steps and not re.search(r"zero_grad|\.grad\b|set_to_none", self.text):
            yield steps[0].func, "no-zero-grad", f"{source_text(steps[0])} in a loop"
        losses = {text for call in backward for text in _losses_of(call)}
        yield from self._kept_losses(inner, losses)
        left = [call for call in _calls_of("eval", inner) if not call.args]
        called = {source_text(n.func).rpartition(".")[2] for n in inner if isinstance(n, ast.Call)}
        left += [call for name in sorted(called) for call in self._evaluations.get(name, ())]
        if left and not re.search(r"\.train\(|\btraining\s*=", self.text):
            first = min(left, key=lambda call: call.lineno)
            yield first.func, "eval-not-left", source_text(first)

    def _kept_losses(self, nodes: Sequence[ast.AST], losses: set[str]) -> Iterator[Mistake]:
        numbers = {
            source_text(target)
            for node in nodes
            if isinstance(node, ast.Assign) and _is_read(node.value)
            for target in node.targets
        }
        kept: list[tuple[ast.expr | ast.stmt, ast.expr]] = [
            (node, node.value)
            for node in nodes
            if isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.Add)
            and source_text(node.target) not in losses
        ]
        kept += [(call, call.args[0]) for call in _calls_of("append", nodes) if call.args]
        for node, value in kept:
            if set(map(source_text, _terms(value))) & losses - numbers:
                yield node, "loss-keeps-graph", ast.unparse(node)[:60]

    # -- statements in their order ----------------------------------------------------------------
    def _order(self, block: Sequence[ast.stmt]) -> Iterator[Mistake]:
        calls = [(n, s.value) for n, s in enumerate(block)
                 if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]  # fmt: skip
        backward = [n for n, call in calls if _method_of(call) == "backward"]
        steps = [(n, call) for n, call in calls if self._is_optimizer_step(call)]
        for n, call in calls:
            method = _method_of(call) or source_text(call.func).rpartition(".")[2]
            later = [at for at, _ in steps if at > n]
            if method == "zero_grad":
                before = [b for b in backward if b < n][-1:]
                own = [at for at, s in steps if _holder(s) == _holder(call)]
                after = next((at for at in own if at > n), None)
                used = any(before and before[0] < at < n for at in own)
                if before and after and not used and not any(n < b < after for b in backward):
                    yield call.func, "gradients-cleared", f"{source_text(call)} after backward()"
            elif method.startswith("clip_grad_") and backward:
                earlier = [at for at, _ in steps if backward[-1] < at < n]
                if earlier and not later:
                    yield call.func, "clip-after-step", source_text(call)[:60]
            elif (
                self._is_scheduler_step(call)
                and not self._steps_below(block[:n])
                and self._steps_below(block[n + 1 :])
            ):
                yield call.func, "scheduler-first", source_text(call)
        yield from self._scaled_clip(block)

    def _steps_below(self, block: Sequence[ast.stmt]) -> bool:
        return any(self._is_optimizer_step(n) for s in block for n in nodes_below(s))

    def _scaled_clip(self, block: Sequence[ast.stmt]) -> Iterator[Mistake]:
        if "unscale_" in self.text:
            return
        texts = [source_text(s.value) if isinstance(s, ast.Expr) else "" for s in block]
        scaled = [n for n, t in enumerate(texts) if re.search(r"\.scale\(.*\)\.backward\(", t)]
        for n, text in enumerate(texts):
            is_clip = re.match(r"(?:\w+\.)*clip_grad_\w+\(", text)
            if is_clip and scaled and scaled[0] < n and any(".step(" in t for t in texts[n:]):
                yield block[n], "clip-scaled", text[:60]

    # -- functions and classes --------------------------------------------------------------------
    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
    ) -> Iterator[Mistake]:
        own = list(_own_nodes(node.body))
        evaluates = [call for call in _calls_of("eval", own) if not call.args]
        if not evaluates:
            return
        name = getattr(node, "name", "")
        loops = [n for n in own if isinstance(n, _LOOPS) and self._reads_a_loader(n)]
        loops = [n for n in loops if n.lineno > evaluates[0].lineno or not trains(n)]
        if not loops or any(map(trains, loops)) or name in self._under_no_grad:
            return
        if not _NO_GRADIENTS.search(ast.unparse(node)):
            where = f"{name}()" if name else "the script"
            yield evaluates[0].func, "eval-with-gradients", f"{where} evaluates"

    def _never_in_eval(self) -> Iterator[Mistake]:
        """The first loop over a loader without gradients that runs the model that is trained."""
        nodes = list(nodes_below(self.tree))
        trained = {_model_called(n) for n in nodes if isinstance(n, _LOOPS) and trains(n)}
        found: list[tuple[ast.expr, str]] = []
        for node in nodes:
            without = node.items if isinstance(node, ast.With) else ()
            texts = [source_text(item.context_expr) for item in without]
            texts += [source_text(d) for d in getattr(node, "decorator_list", ())]
            if any(re.search(r"\b(?:no_grad|inference_mode)\b", text) for text in texts):
                found += [
                    (loop.iter, _model_called(loop))
                    for loop in nodes_below(node)
                    if isinstance(loop, ast.For)
                    and self._reads_a_loader(loop)
                    and not trains(loop)
                    and not _calibrates(loop)
                ]
        found = [(place, model) for place, model in found if model and model in trained]
        for place, model in sorted(found, key=lambda each: each[0].lineno)[:1]:
            yield place, "never-in-eval", f"{model} without eval()"

    def _reads_a_loader(self, loop: ast.AST) -> bool:
        """By its name, also behind `bar = tqdm(loader)`."""
        over = loop.iter if isinstance(loop, ast.For | ast.AsyncFor) else None
        if over is None:
            return False
        return _LOADS.search(source_text(over)) is not None or any(
            isinstance(n, ast.Name) and n.id in self._bars for n in nodes_below(over)
        )

    @cached_property
    def _bars(self) -> set[str]:
        """Names of progress bars over a loader."""
        assigned = (n for n in nodes_below(self.tree) if isinstance(n, ast.Assign))
        return {
            source_text(node.targets[0])
            for node in assigned
            if isinstance(node.value, ast.Call)
            and "tqdm" in source_text(node.value.func)
            and _LOADS.search(" ".join(map(source_text, node.value.args)))
        }

    @cached_property
    def _evaluations(self) -> dict[str, list[ast.Call]]:
        """Function -> its calls of `eval()`."""
        functions = [n for n in nodes_below(self.tree) if isinstance(n, _FUNCTIONS)]
        return {
            node.name: [c for c in _calls_of("eval", list(_own_nodes(node.body))) if not c.args]
            for node in functions
        }

    @cached_property
    def _under_no_grad(self) -> set[str]:
        """Functions that the module calls where no gradients are recorded."""
        return {
            source_text(call.func).rpartition(".")[2]
            for node in nodes_below(self.tree)
            if isinstance(node, ast.With)
            and any(_NO_GRADIENTS.search(source_text(i.context_expr)) for i in node.items)
            for call in nodes_below(node)
            if isinstance(call, ast.Call)
        }

    def _class(self, node: ast.ClassDef) -> Iterator[Mistake]:
        if not any(self._means(base, ("torch.nn.Module", *_LIGHTNING)) for base in node.bases):
            return
        nodes = list(nodes_below(node))
        appended = [call for call in _calls_of("append", nodes) if call.args]
        for inner in nodes:
            if isinstance(inner, ast.Assign) and isinstance(inner.value, _CONTAINERS):
                target = source_text(inner.targets[0])
                held = _elements(inner.value) or [
                    c.args[0] for c in appended if _holder(c) == target
                ]
                is_own = target.startswith("self.") and self._are_modules(held)
                if is_own and not _is_registered(target, ast.unparse(node)):
                    yield inner, "modules-in-list", f"{target} = {source_text(inner.value)[:1]}...]"
            elif isinstance(inner, ast.FunctionDef) and inner.name in _REMOVED_HOOKS:
                if any(self._means(base, _LIGHTNING) for base in node.bases):
                    yield inner, "epoch-end-outputs", f"{inner.name}()"
            elif isinstance(inner, ast.FunctionDef) and inner.name == "forward":
                yield from self._dropout(inner)

    def _are_modules(self, elements: Sequence[ast.expr]) -> bool:
        calls = [e for e in elements if isinstance(e, ast.Call)]
        made = [name for call in calls for name in self._meanings(call.func)]
        return bool(calls) and len(calls) == len(elements) and any(map(_MODULES.fullmatch, made))

    def _dropout(self, forward: ast.FunctionDef) -> Iterator[Mistake]:
        for node in nodes_below(forward):
            if isinstance(node, ast.Call) and self._means(
                node.func, ("torch.nn.functional.dropout", "torch.nn.functional.dropout2d")
            ):
                given = {keyword.arg for keyword in node.keywords}
                is_given = len(node.args) > 2 or given & {"training", None}
                if not is_given and "self.training" not in ast.unparse(forward):
                    yield node.func, "dropout-always-on", source_text(node)[:60]

    # -- calls ------------------------------------------------------------------------------------
    def _call(self, node: ast.Call) -> Iterator[Mistake]:
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if self._means(node.func, _LOADERS):
            shuffle, sampler = given.get("shuffle"), given.get("sampler")
            is_on = isinstance(shuffle, ast.Constant) and shuffle.value is True
            if is_on and sampler is not None and self._is_made(sampler):
                yield node.func, "sampler-with-shuffle", "DataLoader(shuffle=True, sampler=...)"
        elif self._means(node.func, _SAMPLERS):
            fixed = given.get("shuffle")
            if isinstance(fixed, ast.Constant) and fixed.value is False:
                return
            in_epochs = re.search(r"optim", self.text) and re.search(r"for epoch\b", self.text)
            evaluates = node.args and re.search(r"val|test|eval", source_text(node.args[0]), re.I)
            if in_epochs and not evaluates and "set_epoch" not in self.text:
                yield node.func, "sampler-without-epoch", "DistributedSampler(...)"
        elif (
            node.args and self._means(node.func, _CROSS_ENTROPY) and self._is_softmax(node.args[0])
        ):
            yield node.func, "softmax-before-loss", source_text(node)[:60]

    def _is_made(self, value: ast.expr) -> bool:
        """Whether a value is a call's, or a name that is assigned once, a call's."""
        if isinstance(value, ast.Name) and self._meanings(value):
            found = [b.value for scope in self._binding[value.id] for b in scope.bindings[value.id]]
            return len(found) == 1 and isinstance(found[0], ast.Call)
        return isinstance(value, ast.Call)

    def _is_softmax(self, value: ast.expr) -> bool:
        """Whether a value is a softmax's, or that of a model whose forward returns one."""
        if isinstance(value, ast.Name):
            made = [n.value for n in nodes_below(self.tree) if isinstance(n, ast.Assign)
                    and any(source_text(t) == value.id for t in n.targets)]  # fmt: skip
            return bool(made) and all(self._is_softmax(each) for each in made
                                      if not isinstance(each, ast.Name))  # fmt: skip
        if not isinstance(value, ast.Call):
            return False
        if self._means(value.func, _SOFTMAX):
            return True
        if source_text(value.func) in self._softmax_stacks(self.tree):
            return True
        holders = [name for name in self._instances if name == source_text(value.func)]
        return any(self._instances[name] in self._softmax_classes for name in holders)

    @cached_property
    def _instances(self) -> dict[str, str]:
        """Name -> the class that it is made of, also with `.to(device)` behind it."""
        found: dict[str, str] = {}
        for node in nodes_below(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made = re.match(r"(\w+)\(", source_text(node.value))
                if made and isinstance(node.targets[0], ast.Name):
                    found.setdefault(node.targets[0].id, made[1])
        return found

    @cached_property
    def _softmax_classes(self) -> set[str]:
        """Classes whose forward returns a softmax in every case."""
        return {
            node.name
            for node in nodes_below(self.tree)
            if isinstance(node, ast.ClassDef)
            for part in node.body
            if isinstance(part, ast.FunctionDef) and part.name == "forward"
            for returned in [[n.value for n in nodes_below(part) if isinstance(n, ast.Return)]]
            if returned
            and all(
                isinstance(v, ast.Call)
                and (self._means(v.func, _SOFTMAX)
                     or source_text(v.func) in self._softmax_stacks(node))
                for v in returned
            )
        }  # fmt: skip

    def _softmax_stacks(self, within: ast.AST) -> set[str]:
        """What holds a `Sequential` that ends in a softmax."""
        found: set[str] = set()
        for node in nodes_below(within):
            value = node.value if isinstance(node, ast.Assign) else None
            while isinstance(value, ast.Call) and _method_of(value) in ("to", "cuda"):
                value = value.func.value  # type: ignore[attr-defined]
            last = value.args[-1] if isinstance(value, ast.Call) and value.args else None
            if isinstance(value, ast.Call) and isinstance(last, ast.Call):
                is_stack = self._means(value.func, ("torch.nn.Sequential",))
                if is_stack and self._means(last.func, ("torch.nn.Softmax",)):
                    found.update(source_text(t) for t in node.targets)  # type: ignore[attr-defined]
        return found


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


def _method_of(node: ast.AST) -> str:
    """The method that a call calls; empty for anything else."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_method else ""  # type: ignore[attr-defined]


def _calls_of(method: str, nodes: Sequence[ast.AST]) -> list[ast.Call]:
    return [n for n in nodes if isinstance(n, ast.Call) and _method_of(n) == method]


def _losses_of(backward: ast.Call) -> Iterator[str]:
    """`loss` of its own `backward()`, of a scaled one's, and of `accelerator.backward(loss)`."""
    holder = backward.func.value  # type: ignore[attr-defined]
    yield source_text(holder)
    scaled = isinstance(holder, ast.Call) and _method_of(holder) == "scale"
    if scaled or re.search(r"accelerator|fabric|engine", source_text(holder)):
        yield from map(source_text, holder.args if scaled else backward.args)


def _holder(call: ast.Call) -> str:
    return source_text(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _own_nodes(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of a body, without those of functions and classes defined in it."""
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        yield node
        stack += children(node)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and len(block) > 1:
            yield block


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


def _is_read(value: ast.expr) -> bool:
    return (
        re.search(r"\.(?:item|detach|tolist|cpu|data)\b|^float\(", source_text(value)) is not None
    )


def _model_called(loop: ast.AST) -> str:
    """What a loop calls that is named as a model: `model(x)`, `net.loss(x)`."""
    calls = (n.func for n in nodes_below(loop) if isinstance(n, ast.Call))
    roots = (re.match(r"(?:self\.)?(\w*model|net\w*)\b", source_text(f), re.I) for f in calls)
    return next((root[1] for root in roots if root), "")


def _calibrates(loop: ast.AST) -> bool:
    """Whether a loop only runs the model, for its batch statistics: no result is used."""
    return not any(
        isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return)
        and re.search(r"(?:model|net)\w*\.?\w*\(", source_text(n.value) if n.value else "", re.I)
        for n in nodes_below(loop)
    )
