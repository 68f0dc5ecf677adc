"""Finds habits: code that works, but is slow or wrong on TPU (reads in the step, collectives on one
rank, shapes that change).

Only modules that import torch_xla are checked, and those that use accelerate, which picks the TPU
by itself: for an fp16 Accelerator, collectives on one rank, and what waits in each step.
"""

import ast
import re
import sys
from functools import cache, cached_property

from tpukit.knowledge.calls import name_group, rules
from tpukit.probe.lint.finding import ModuleFinding, by_rule
from tpukit.probe.lint.guards import early_test
from tpukit.probe.lint.names import Names, Scope, imported_roots
from tpukit.probe.lint.slow.loaders import Loaders
from tpukit.probe.lint.slow.steps import Emit, Steps
from tpukit.probe.lint.source import Module
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    LOOPS,
    NAMED,
    argument,
    called_here,
    called_name,
    children,
    functions_that,
    holder,
    nodes_below,
    own_nodes,
    run_once,
    source_text,
)

_MADE = ("Accelerator", "GradScaler", "DataLoader", "pad_sequence")
_PAIRED = ("rendezvous", "barrier", "wait_for_everyone")
"""Two in a function, one of them on the other ranks, let one rank go first."""
_MASTER = re.compile(
    r"is_master_ordinal|is_main_process|is_ma(?:in|ster)\b|is_rank_?(?:0|zero)|ma(?:in|ster)_process|"
    r"(?:ordinal|rank|process_index|\bgpu(?:_id)?)(?:\([^)]*\))?\s*(?:==|<=)\s*0|0\s*==\s*\w*rank|"
    r"not\s+\w*rank\b|not\s+\w*ordinal\b"
)
_RANK = re.compile(r"rank|ordinal|main_process|master|process_index", re.I)
_ONE_RANK = re.compile(
    r"rank|ordinal|(?<!__)main|master|process|proc_|gpu|device|distributed|ddp|local|primary|chief|save"
    r"|writ|verbose|log|fsdp|world|single|standalone",
    re.I,
)
"""A test that may hold on one rank alone."""
_SHARE = re.compile(r"DistributedSampler\(\s*(?:dataset=)?\w*(?:val|test|eval|dev)", re.I)
_AGREES = re.compile(
    r"all_reduce|all_gather|broadcast|\breduce\(|gather\(|AverageMeter|torchmetrics"
)
_OWN_LOSS = re.compile(r"early|patience|no_improve|stop", re.I)
"""A test of a rank's own metric."""
_EVALUATES = re.compile(r"eval|valid|test|predict|infer|generat|bleu", re.I)
_SHARDS = re.compile(r"fsdp|fully_?shard|deepspeed|zero_?[23]|tensor_parallel", re.I)
"""Text of a module whose ranks hold parts of the model, which accelerate collects."""
_MODEL = re.compile(r"(?:self\.)?\w*(?:model|net)\w*", re.I)
_OTHERS = re.compile(r"\bnot\s+(?:[\w.]+\.)?is_\w+")
_ON_GPUS = re.compile(r"deepspeed|@require_(?:cuda|gpu|multi_gpu|fp16|non_cpu)", re.I)
"""Text of a module that runs on GPUs alone."""
_GPU_TEST = re.compile(r"cuda|gpu|fp16|half|mps", re.I)
_WRITTEN = "DataLoader(..., drop_last=False)"
_LONGEST = re.compile(
    r"max\((?:[(\[]|map\()?\s*(?:len\b|\w*len(?:gth)?s?\b|\w+(?:\[[^]]*\])?\.(?:size|shape))"
)
_PADS = ("True", "'longest'", "'max_length_in_batch'")
_PADS_BY_DEFAULT = re.compile(r"(?:token|process)\w*\.pad$", re.I)
_TO_THE_MODEL = re.compile(r"\bpad\([^\n]*model_max_length")
_PADDING_COLLATOR = re.compile(
    r"DataCollator\w*(?:Padding|LanguageModeling|Seq2Seq|TokenClassification)"
)
_ONE_LENGTH = re.compile(r"[\"']max_length[\"']|block_size|group_texts|packing|class DataCollator")
"""Text of a module that pads or cuts its samples to one length, or has a collator of its own."""
_REDUCES = re.compile(
    r"optimizer_step|reduce_gradients|all_reduce|DistributedDataParallel|FullyShardedDataParallel"
    r"|DDP\b|FSDP|use_spmd|mark_sharding|gradient_as_bucket_view|Accelerator\b"
)


def find_habits(module: Module, names: Names, *, to_xla: bool = False) -> list[ModuleFinding]:
    """Habits of a parsed module.

    to_xla: the module is to run on torch_xla, which it does not import yet.
    """
    assert module.tree is not None
    found: list[ModuleFinding] = []

    def emit(node: ast.expr | ast.stmt, id: str, old: str) -> None:
        place = by_rule(rules("habit")[id], module.span(node), old)
        if place not in found:
            found.append(place)

    packages = imported_roots(module.tree)
    uses_xla = to_xla or "torch_xla" in packages
    has_steps = uses_xla or "accelerate" in packages
    visitor = _Visitor(module.text, module.tree, names, emit, uses_xla, has_steps)
    visitor.walk(module.tree, names.module)
    visitor.loops_left()
    visitor.saved_by_all()
    if uses_xla:
        _unsynchronised_steps(module, module.tree, names, emit)
    return found


class _Visitor:
    """Walks a module with its scopes and the conditions around each node."""

    def __init__(
        self, text: str, tree: ast.Module, names: Names, emit: Emit, uses_xla: bool, has_steps: bool
    ) -> None:
        self.names = names
        self.emit = emit
        self.uses_xla = uses_xla
        self._tree = tree
        self._text = text
        self._steps = Steps(tree, names, emit, uses_xla)
        self._has_steps = has_steps
        self._calls: list[tuple[str, str]] = []
        """Function, and what it calls on any rank."""
        self._saves: list[tuple[ast.Call, str]] = []
        """Calls of `torch.save` on any rank, and their functions."""
        self._function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
        self._is_paired = _are_paired(tree)
        """Whether the module's own statements have two rendezvous; functions have their own."""

    @cached_property
    def _loaders(self) -> Loaders:
        return Loaders(self._tree, self.names)

    @cached_property
    def _wraps(self) -> list[ast.Call]:
        if "DataParallel" not in self._text:
            return []
        calls = [n for n in nodes_below(self._tree) if isinstance(n, ast.Call)]
        return [call for call in calls if self._is_one(self.names.anywhere(call.func), "()")]

    def _is_one(self, meanings: list[str], brackets: str = "") -> bool:
        return any(f"{meaning}{brackets}" in name_group("runs-together") for meaning in meanings)

    @cached_property
    def _evaluates_apart(self) -> bool:
        """Whether each rank evaluates its share of the data, and no rank learns of the others'."""
        is_apart = bool(self._wraps) and _SHARE.search(self._text)
        return bool(is_apart) and not _AGREES.search(self._text)

    @cached_property
    def _run_models(self) -> set[str]:
        """Functions of the module that run a model that they are given."""
        return functions_that(self._tree, _runs_a_model)

    @cached_property
    def _waiting(self) -> set[str]:
        """Functions of the module that run a collective, whatever the rank."""
        return functions_that(self._tree, self._waits)

    def _waits(self, node: ast.AST) -> bool:
        """Whether a call returns only after every rank has made it."""
        if not isinstance(node, ast.Call):
            return False
        method = called_name(node)
        if method in _collective_methods():
            name = next(iter(self.names.anywhere(node.func)), "")
            if name in name_group("xla-collective") and argument(node, "master_only") is None:
                return True
            if name.startswith("torch.distributed.") and method in name_group("torch-collective"):
                return True
            if "Accelerator()" in name and method in name_group("accelerate-collective"):
                return method != "get_state_dict" or bool(_SHARDS.search(self._text))
        return bool(self._wraps) and holder(node) == "self" and self._is_wrapped(node.func)

    def _is_wrapped(self, model: ast.expr, scope: Scope | None = None) -> bool:
        """Whether an expression is a model that every rank runs together, from its wrap on."""
        if not isinstance(model, NAMED) or model.lineno <= self._wraps[0].lineno:
            return False
        return self._is_one(self.names.resolve(model, scope or self.names.module))

    def _runs_wrapped(self, node: ast.AST, scope: Scope | None) -> bool:
        """Whether a call runs such a model, or hands it to a function of the module that does."""
        if not self._wraps or not isinstance(node, ast.Call):
            return False
        given = (*node.args, *(k.value for k in node.keywords))
        name = called_here(node)
        runs = name in self._run_models
        runs |= name in self.names.followed and bool(_EVALUATES.search(name))  # another module's
        return any(self._is_wrapped(m, scope) for m in (node.func, *(given if runs else ())))

    def loops_left(self) -> None:
        """A loop in which ranks meet, and which rank 0 alone leaves."""
        for loop in nodes_below(self._tree):
            if not isinstance(loop, LOOPS):
                continue
            own = list(own_nodes(loop.body, (*FUNCTIONS, *LOOPS)))
            leaves = (_MASTER, _OWN_LOSS)[: 1 + self._evaluates_apart]
            tests = [n for n in own if isinstance(n, ast.If)
                     and any(test.search(source_text(n.test)) for test in leaves)]  # fmt: skip
            for test in tests:
                left, stays = ([n for n in own_nodes(b, LOOPS) if isinstance(n, ast.Break)]
                               for b in (test.body, test.orelse))  # fmt: skip
                if left and not stays and any(map(self._meets, nodes_below(loop))):
                    old = f"break under `if {source_text(test.test)[:40]}`"
                    self.emit(left[0], "rank-leaves-loop", old)

    def _meets(self, node: ast.AST, scope: Scope | None = None) -> bool:
        runs = self._runs_wrapped(node, scope)
        return runs or self._waits(node) or called_here(node) in self._waiting

    def walk(self, node: ast.AST, scope: Scope, under: tuple[str, ...] = ()) -> None:
        """`under`: the conditions that must hold for this node to run."""
        for child in children(node):
            inner = self.names.scopes.get(child, scope)
            outer = self._is_paired, self._function
            if isinstance(child, FUNCTIONS):
                self._is_paired, self._function = _are_paired(child), child
            if isinstance(child, ast.Call):
                self._call(child, inner, under)
            if self._has_steps:
                self._steps.look_at(child, inner)
            if isinstance(child, ast.FunctionDef) and self.uses_xla and _pads(child):
                self.emit(child, "padding-to-longest", f"{child.name}() pads to the longest")
            if isinstance(child, ast.If):
                self.walk_if(child, inner, under)
            else:
                self.walk(child, inner, under)
            self._is_paired, self._function = outer

    def walk_if(self, node: ast.If, scope: Scope, under: tuple[str, ...]) -> None:
        test = source_text(node.test)
        self.walk(ast.Expression(node.test), scope, under)
        if _MASTER.search(test) and any(
            self._meets(n, scope) for n in nodes_below(ast.Module(node.orelse, []))
        ):
            test = ""  # the other ranks meet it in their own branch
        self.walk(ast.Module(node.body, []), scope, (*under, test))
        self.walk(ast.Module(node.orelse, []), scope, (*under, f"not ({test})"))

    def _call(self, node: ast.Call, scope: Scope, under: tuple[str, ...]) -> None:
        is_known = not isinstance(node.func, ast.Attribute) or node.func.attr in _MADE
        meanings = self.names.resolve(node.func, scope) if is_known else ()
        name = meanings[0] if len(meanings) == 1 else ""
        self._accelerator(node, name, under)
        self._under_master(node, scope, under)
        if self._wraps or "accelerator.prepare(" in self._text:
            self._reach(node, under)
        if self.uses_xla:
            self._scaler(node, name, under)
            self._shapes(node, name)

    def _accelerator(self, node: ast.Call, name: str, under: tuple[str, ...]) -> None:
        is_one = name.startswith("accelerate") and name.endswith(".Accelerator")
        if not is_one or _ON_GPUS.search(self._text) or any(map(_GPU_TEST.search, under)):
            return
        value = argument(node, "mixed_precision")
        if isinstance(value, ast.Constant) and value.value == "fp16":
            self.emit(node.func, "fp16-accelerator", 'Accelerator(mixed_precision="fp16")')

    def _under_master(self, node: ast.Call, scope: Scope, under: tuple[str, ...]) -> None:
        tests = [t for t in under if not t.startswith("not (") and _MASTER.search(t)]
        own = getattr(self._function, "name", "")
        if not tests or own in _collective_methods():  # of a class in torch_xla's place
            return
        method = called_name(node)
        if method in _PAIRED and self._is_paired:
            return
        if self._meets(node, scope):
            old = f"{method}() under `if {tests[-1][:40]}`"
            self.emit(node.func, "collective-under-master", old)

    def _reach(self, node: ast.Call, under: tuple[str, ...]) -> None:
        """Notes what every rank calls, and what it saves to one file."""
        if any(map(_ONE_RANK.search, under)):
            return
        where = self._function.name if self._function else ""
        given = [a.id for a in node.args if isinstance(a, ast.Name)]  # `spawn(main)`
        self._calls += [(where, name) for name in (called_name(node), *given)]
        if "torch.save" in self.names.anywhere(node.func):
            tests = [n.test for n in nodes_below(self._function or self._tree)
                     if isinstance(n, ast.If) and early_test(n) is not None]  # fmt: skip
            is_one = any(_ONE_RANK.search(source_text(test)) for test in tests)
            if not is_one and not _RANK.search(source_text(node) + where):
                self._saves.append((node, where))

    def saved_by_all(self) -> None:
        """Files that every rank writes at once."""
        reached = {""}
        while more := {to for by, to in self._calls if by in reached} - reached:
            reached |= more
        for node, where in self._saves:
            if where in reached:
                self.emit(node.func, "saves-on-every-rank", source_text(node)[:60])

    def _scaler(self, node: ast.Call, name: str, under: tuple[str, ...]) -> None:
        known = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler")
        if name in known and not any(map(_GPU_TEST.search, under)):
            enabled = argument(node, "enabled")
            if enabled is None or (isinstance(enabled, ast.Constant) and enabled.value):
                self.emit(node.func, "scaler-on-xla", "GradScaler on XLA")

    def _shapes(self, node: ast.Call, name: str) -> None:
        if name in name_group("loader"):
            self._loader(node)
        keyword, called = argument(node, "padding"), source_text(node.func)
        values = [keyword]
        if isinstance(keyword, ast.Attribute) and source_text(keyword.value) == "self":
            values = self.names.values(keyword.attr)  # those of its class
        padding = next((t for v in values if v and (t := source_text(v)) in _PADS), "")
        if (
            padding
            and re.search("token|pad|collat|process", called, re.I)
            and ("ollat" in called or (not self._is_once(node) and "pretrained" not in called))
        ):
            self.emit(node.func, "padding-to-longest", f"{called}(padding={padding})")
        elif keyword is None and _PADS_BY_DEFAULT.search(called):
            self.emit(node.func, "padding-to-longest", f"{called}(...)")
        elif _PADDING_COLLATOR.fullmatch(called_name(node)) and not _ONE_LENGTH.search(self._text):
            self.emit(node.func, "padding-to-longest", f"{called_name(node)}(...)")
        if name == "torch.nn.utils.rnn.pad_sequence" and not _TO_THE_MODEL.search(self._text):
            self.emit(node.func, "padding-to-longest", "pad_sequence(...)")

    def _is_once(self, node: ast.Call) -> bool:
        """Whether a data set is padded as a whole (in no loop, by what runs once), or tokens are
        compared with the truncated ones and go no further, or a list is made text by text."""
        kinds = (ast.Assign, ast.Lambda, *FUNCTIONS, *LOOPS)
        around = [n for n in nodes_below(self._tree) if isinstance(n, kinds)
                  and n.lineno <= node.lineno <= (n.end_lineno or 0)]  # fmt: skip
        assigned = " ".join(source_text(n.targets[0]) for n in around if isinstance(n, ast.Assign))
        functions = {n.name for n in around if isinstance(n, FUNCTIONS)}
        in_turn = any(isinstance(n, (ast.Lambda, *LOOPS)) for n in around)
        is_whole = assigned and not in_turn and functions <= run_once(self._tree)
        by_text = isinstance(self._loaders.parents.get(node), ast.ListComp)
        return bool(is_whole) or by_text or "untruncated" in assigned

    def _loader(self, node: ast.Call) -> None:
        whole_call = ast.Call(node.func, node.args, self.names.keywords(node))
        given = {keyword.arg for keyword in whole_call.keywords}
        drop = argument(whole_call, "drop_last", 8)
        kept = drop is None or (isinstance(drop, ast.Constant) and not drop.value)
        if not kept or given & {None, "batch_sampler"} or "streaming=True" in self._text:
            return
        if self._loaders.fills_batches(whole_call, self._text):
            return
        if self._loaders.feeds_training(node):
            old = "DataLoader(...) without drop_last"
            self.emit(node.func, "no-drop-last", old if drop is None else _WRITTEN)


def _unsynchronised_steps(module: Module, tree: ast.Module, names: Names, emit: Emit) -> None:
    """Several ranks, a plain `optimizer.step()` and a sync, but nothing that reduces gradients:
    `mark_step` does not."""
    if _REDUCES.search(module.text):
        return
    calls = [n for n in nodes_below(tree) if isinstance(n, ast.Call)]
    meanings = {name for call in calls for name in names.anywhere(call.func)}
    if meanings.isdisjoint(name_group("launches")) or meanings.isdisjoint(name_group("syncs")):
        return
    for call in calls:
        if re.fullmatch(r".*opt\w*\.step", source_text(call.func), re.I) and not call.args:
            old = f"{source_text(call.func)}() and a sync"
            emit(call.func, "unsynchronised-gradients", old)


def _are_paired(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a body of its own has a rendezvous for rank 0 and one for the others, which wait
    there while rank 0 goes first; behind a `return` of the one are the others."""
    own = list(own_nodes(node.body, (*FUNCTIONS, ast.ClassDef)))
    meets = [n.lineno for n in own if called_name(n) in _PAIRED]  # type: ignore[attr-defined]
    sides: set[bool] = set()
    for n in own if len(meets) > 1 else ():
        if isinstance(n, ast.If) and _RANK.search(test := source_text(n.test)):
            is_first = bool(_MASTER.search(test)) and not _OTHERS.search(test)
            last, end = n.body[-1].end_lineno or 0, n.end_lineno or 0
            after = sys.maxsize if isinstance(n.body[-1], ast.Return) else end
            sides |= {is_first for at in meets if n.lineno <= at <= last}
            sides |= {not is_first for at in meets if last < at <= after}
    return len(sides) > 1


@cache
def _collective_methods() -> frozenset[str]:
    groups = (name_group(f"{package}-collective") for package in ("xla", "torch", "accelerate"))
    return frozenset(name.rpartition(".")[2] for group in groups for name in group)


def _pads(node: ast.FunctionDef) -> bool:
    return "collat" in node.name and _LONGEST.search(ast.unparse(node)) is not None


def _runs_a_model(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(_MODEL.fullmatch(source_text(node.func)))
