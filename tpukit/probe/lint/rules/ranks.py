"""Scripts on several devices: wrapped models, launchers, accelerate, collectives, files."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any

from tpukit.knowledge.calls import name_group
from tpukit.probe.lint.guards import early_test
from tpukit.probe.lint.rules.code import Code
from tpukit.probe.lint.rules.roles import EVALUATES, EVALUATION_SET, MASTER, MODEL, ONE_RANK, RANK
from tpukit.probe.lint.rules.rule import TORCH, TPU, Found, Rule, imported
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    LOOPS,
    NAMED,
    argument,
    called_here,
    called_name,
    calls_in,
    functions_that,
    holder,
    method_of,
    nodes_below,
    of_kind,
    own_code,
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

_PAIRED = ("rendezvous", "barrier", "wait_for_everyone")
"""Two in a function, one of them on the other ranks, let one rank go first."""
_SHARE = re.compile(rf"DistributedSampler\(\s*(?:dataset=)?\w*(?:{EVALUATION_SET.pattern})", re.I)
_AGREES = re.compile(
    r"all_reduce|all_gather|broadcast|\breduce\(|gather\(|AverageMeter|torchmetrics"
)
_OWN_LOSS = re.compile(r"early|patience|no_improve|stop", re.I)
"""A test of a rank's own metric."""
_SHARDS = re.compile(r"fsdp|fully_?shard|deepspeed|zero_?[23]|tensor_parallel", re.I)
"""Text of a module whose ranks hold parts of the model, which accelerate collects."""
_OTHERS = re.compile(r"\bnot\s+(?:[\w.]+\.)?is_\w+")
_BARE_TEST = re.compile(r"(?m)if [^\n]*(?:rank\S* *== *0|is_ma(?:in|ster)|not \w*rank)[^\n]*:\s*$")
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
_ALONE = re.compile(r"torch\.save\(|\bif [^\n]*(?:(?:rank|gpu)\S* *== *0|is_ma|patience|early)")
_MEETS = re.compile(r"\.(?:barrier|all_reduce|all_gather\w*|broadcast\w*|reduce|gather)\(")
_LEAVE_LOOP = (MASTER, _OWN_LOSS)


class WrapperAttribute(Rule):
    """`DistributedDataParallel` and `DataParallel` hold the model as `module` and have no other
    attribute of it: an `AttributeError`. Write `model.module.generate(x)`; where a forward pass
    with gradients is meant, let `forward` call it, as the wrapper synchronises the gradients of
    `forward` alone."""

    id = "wrapper-attribute"
    effect = "raises"
    new = "model.module: the wrapper has no attributes of the model in it"
    wrong = "model = nn.parallel.DistributedDataParallel(model)\nmodel.generate(x)"
    right = wrong.replace("model.generate", "model.module.generate")
    words = ("DataParallel(",)

    def visit(self, node: Any) -> Iterator[Found]:
        nodes = nodes_below(node)
        made = (n for n in of_kind(nodes, ast.Assign) if isinstance(n.value, ast.Call))
        wraps = {n for n in made if self.code.means(n.value.func, "wrapper")}  # type: ignore[attr-defined]
        for scope in of_kind(nodes, ast.Module, *FUNCTIONS) if wraps else ():
            own = list(own_code(scope.body))
            for wrap in wraps & {*own}:
                yield from _attributes(wrap, source_text(wrap.targets[0]), own)


def _attributes(wrap: ast.Assign, name: str, nodes: Sequence[ast.AST]) -> Iterator[Found]:
    """What the wrapper lacks, behind the wrap and before the name is another's."""
    targets = [(n, t) for n in of_kind(nodes, ast.Assign) for t in n.targets]
    known = name_group("of-wrappers")
    own = {t.attr for _, t in targets if isinstance(t, ast.Attribute)}
    line = wrap.end_lineno or 0
    others = [n.lineno for n, t in targets if n.lineno > line and source_text(t) == name
              and method_of(n.value) not in ("to", "cuda")]  # fmt: skip
    end = min(others, default=sys.maxsize)
    tests = of_kind(nodes, ast.Try, ast.If, ast.IfExp)
    asked = {n: source_text(getattr(n, "test", _CAUGHT)) for n in tests}
    around = (n for n in tests if n.lineno <= wrap.lineno <= (n.end_lineno or 0))
    wrapped_if = {word for n in around for word in _ASKED.findall(asked[n])}
    guards = [n for n in tests if not wrapped_if.isdisjoint(_ASKED.findall(asked[n]))
              or _ASKS_FOR_WRAP.search(asked[n])]  # fmt: skip
    guarded = {line for g in guards for line in range(g.lineno, (g.end_lineno or 0) + 1)}
    for node in of_kind(nodes, ast.Attribute):
        is_known = node.attr in known or node.attr in own or node.attr.startswith("_")
        is_behind = line < node.lineno < end and node.lineno not in guarded
        if is_behind and not is_known and source_text(node.value) == name:
            yield node, source_text(node)


class LocalRankArgument(Rule):
    """`torchrun` passes no such argument: it keeps its default, and all ranks use one GPU. Since
    PyTorch 2.0 `torch.distributed.launch` passes `--local-rank`, which a parser without it
    refuses. Read `int(os.environ["LOCAL_RANK"])`. A file that also reads the variable, sets
    `local_rank` to another value or runs under DeepSpeed (which passes `--local_rank`) is not
    reported."""

    id = "local-rank-argument"
    effect = "torchrun does not pass it, torch.distributed.launch passes --local-rank"
    new = 'int(os.environ["LOCAL_RANK"])'
    wrong = 'parser.add_argument("--local_rank", type=int)\nprint(parser.parse_args().local_rank)'
    right = 'print(int(os.environ["LOCAL_RANK"]))'
    nodes = (ast.Call,)
    words = ("--local_rank", ".local_rank")

    def visit(self, node: Any) -> Iterator[Found]:
        if method_of(node) == "add_argument":
            is_it = [a.value for a in node.args if isinstance(a, ast.Constant)] == ["--local_rank"]
            is_read = is_it and re.search(r"\.local_rank\b", self.code.text)
            if is_read and not _BY_ENVIRONMENT.search(self.code.text):
                yield node, 'add_argument("--local_rank")'


class PrepareOrder(Rule):
    """`prepare` returns its arguments in their order: here `optimizer` is the loader."""

    id = "prepare-order"
    effect = "each name holds another object"
    new = "the names in the order of the arguments: prepare returns them so"
    wrong = (
        "from accelerate import Accelerator\naccelerator = Accelerator()\n"
        "model, optimizer, loader = accelerator.prepare(model, loader, optimizer)"
    )
    right = wrong.replace("(model, loader, optimizer)", "(model, optimizer, loader)")
    nodes = (ast.Assign,)
    words = (".prepare(", "accelerate")

    def visit(self, node: Any) -> Iterator[Found]:
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and method_of(node.value) == "prepare":
            taken, given = (list(map(source_text, e)) for e in (target.elts, node.value.args))
            if taken != given and sorted(taken) == sorted(given):
                yield node, f"{', '.join(taken)} = prepare({', '.join(given)})"[:80]


# -- where ranks meet ----------------------------------------------------------------------------
class Meetings:
    """What of a module returns only after every rank has come to it."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._names = code.names

    @cached_property
    def wraps(self) -> list[ast.Call]:
        """The calls that wrap a model which every rank runs together."""
        if "DataParallel" not in self._code.text:
            return []
        calls = calls_in(self._code.tree)
        return [call for call in calls if _is_wrap(self._names.anywhere(call.func), "()")]

    @cached_property
    def evaluates_apart(self) -> bool:
        """Whether each rank evaluates its share of the data, and no rank learns of the others'."""
        is_apart = bool(self.wraps) and _SHARE.search(self._code.text)
        return bool(is_apart) and not _AGREES.search(self._code.text)

    @cached_property
    def _run_models(self) -> set[str]:
        """Functions of the module that run a model that they are given."""
        return functions_that(self._code.tree, _runs_a_model)

    @cached_property
    def _waiting(self) -> set[str]:
        """Functions of the module that run a collective, whatever the rank."""
        return functions_that(self._code.tree, self._waits)

    def at(self, node: ast.AST) -> bool:
        runs = self._runs_wrapped(node)
        return runs or self._waits(node) or called_here(node) in self._waiting

    def _waits(self, node: ast.AST) -> bool:
        """Whether a call returns only after every rank has made it."""
        if not isinstance(node, ast.Call):
            return False
        method = called_name(node)
        if method in _collective_methods():
            name = next(iter(self._names.anywhere(node.func)), "")
            if name in name_group("xla-collective") and argument(node, "master_only") is None:
                return True
            if name.startswith("torch.distributed.") and method in name_group("torch-collective"):
                return True
            if "Accelerator()" in name and method in name_group("accelerate-collective"):
                return method != "get_state_dict" or bool(_SHARDS.search(self._code.text))
        return bool(self.wraps) and holder(node) == "self" and self._is_wrapped(node.func)

    def _is_wrapped(self, model: ast.expr) -> bool:
        """Whether an expression is a model that every rank runs together, from its wrap on."""
        if not isinstance(model, NAMED) or model.lineno <= self.wraps[0].lineno:
            return False
        return _is_wrap(self._names.resolve(model, self._names.scope_of(model)))

    def _runs_wrapped(self, node: ast.AST) -> bool:
        """Whether a call runs such a model, or hands it to a function of the module that does."""
        if not self.wraps or not isinstance(node, ast.Call):
            return False
        given = (*node.args, *(k.value for k in node.keywords))
        name = called_here(node)
        runs = name in self._run_models
        runs |= name in self._names.followed and bool(EVALUATES.search(name))  # another module's
        return any(map(self._is_wrapped, (node.func, *(given if runs else ()))))


class _OfRanks(Rule):
    """A rule for scripts that run on several ranks."""

    packages = (*TORCH, *TPU)

    @classmethod
    def may_stand_in(cls, text: str) -> bool:
        """By torch_xla or accelerate, by a wrapper beside what one rank does alone, or by a test
        of the rank beside a collective."""
        packages = imported(text)
        if "torch_xla" in packages or ("accelerate" in packages and "Accelerator" in text):
            return True
        if any(wrapper in text for wrapper in _WRAPPERS) and _ALONE.search(text):
            return True
        is_distributed = "torch.distributed" in text and _BARE_TEST.search(text)
        return bool(is_distributed and _MEETS.search(text))


class CollectiveUnderMaster(_OfRanks):
    """A collective, or the forward pass of a model in `DistributedDataParallel` or FSDP, that the
    other ranks do not reach. A DDP's forward pass sends its buffers (batch statistics) to all
    ranks, also in an evaluation under `no_grad`. Call it on every rank, or `model.module(x)` of a
    DDP."""

    id = "collective-under-master"
    effect = "hangs"
    new = "call it on every rank: it waits for all of them"
    wrong = "import torch.distributed as dist\nif rank == 0:\n    dist.all_reduce(x)"
    right = "import torch.distributed as dist\ndist.all_reduce(x)\nif rank == 0:\n    print(x)"
    nodes = (ast.Call,)

    def visit(self, node: Any) -> Iterator[Found]:
        function = self.code.body_around(node)
        own = getattr(function, "name", "")
        method = called_name(node)
        tests = [each for each in self.code.conditions(node)
                 if not each[0].startswith("not (") and MASTER.search(each[0])]  # fmt: skip
        if not tests or own in _collective_methods():  # of a class in torch_xla's place
            return
        if method in _PAIRED and _are_paired(function):
            return
        meets = self.code.part(Meetings).at
        if meets(node):
            # The other ranks may meet it in their own branch.
            alone = [text for text, test in tests
                     if not any(meets(n) for s in test.orelse for n in nodes_below(s))]  # fmt: skip
            if alone:
                yield node.func, f"{method}() under `if {alone[-1][:40]}`"


class RankLeavesLoop(_OfRanks):
    """`if rank == 0: break`, or `if patience > 5: break` where each rank evaluates its own share
    (`DistributedSampler(val_set)`) and no rank learns of the others': the others wait in the loop
    for good."""

    id = "rank-leaves-loop"
    effect = "hangs"
    new = "broadcast the decision: the other ranks wait for this one in the loop"
    wrong = (
        "import torch.distributed as dist\nfor x in loader:\n    dist.barrier()\n"
        "    if rank == 0 and is_bad(x):\n        break"
    )
    right = wrong.replace("rank == 0 and is_bad(x)", "is_bad_anywhere(x)")
    nodes = LOOPS

    def visit(self, node: Any) -> Iterator[Found]:
        meetings = self.code.part(Meetings)
        own = list(own_nodes(node.body, (*FUNCTIONS, *LOOPS)))
        leaves = _LEAVE_LOOP[: 1 + meetings.evaluates_apart]
        for test in of_kind(own, ast.If):
            text, branches = source_text(test.test), (test.body, test.orelse)
            left, stays = (of_kind(own_nodes(branch, LOOPS), ast.Break) for branch in branches)
            is_alone = any(each.search(text) for each in leaves) and left and not stays
            if is_alone and any(map(meetings.at, nodes_below(node))):
                yield left[0], f"break under `if {text[:40]}`"


class SavesOnEveryRank(_OfRanks):
    """`torch.save(state, path)` beside DDP, FSDP or `accelerator.prepare`, under no test of the
    rank: all ranks write one file at the same time (`accelerator.save` writes it once)."""

    id = "saves-on-every-rank"
    effect = "ranks overwrite each other's file"
    new = "if rank == 0: around it (model.module.state_dict() of a DDP)"
    wrong = (
        'model = nn.parallel.DistributedDataParallel(model)\ntorch.save(model.state_dict(), "a.pt")'
    )
    right = wrong.replace("torch.save", "if rank == 0:\n    torch.save")

    def visit(self, node: Any) -> Iterator[Found]:
        code = self.code
        if "accelerator.prepare(" not in code.text and not code.part(Meetings).wraps:
            return
        # What every rank calls, and the functions that it reaches; `spawn(main)` as well.
        calls = [call for call in calls_in(node) if not code.runs_under(ONE_RANK, call)]
        where = {call: getattr(code.body_around(call), "name", "") for call in calls}
        links = {(where[call], called_name(call)) for call in calls}
        links |= {(where[call], a.id) for call in calls for a in of_kind(call.args, ast.Name)}
        reached = {""}
        while more := {to for by, to in links if by in reached} - reached:
            reached |= more
        for call in (call for call in calls if where[call] in reached):
            is_save = "torch.save" in code.names.anywhere(call.func)
            if is_save and not self._is_of_one_rank(call, where[call]):
                yield call.func, source_text(call)[:60]

    def _is_of_one_rank(self, call: ast.Call, function: str) -> bool:
        """By an early return above it, or by the name of the file or the function."""
        around = self.code.body_around(call)
        ifs = filter(early_test, of_kind(nodes_below(around), ast.If))
        is_one = any(ONE_RANK.search(source_text(each.test)) for each in ifs)
        return is_one or RANK.search(source_text(call) + function) is not None


def _is_wrap(meanings: Sequence[str], brackets: str = "") -> bool:
    return any(f"{meaning}{brackets}" in name_group("runs-together") for meaning in meanings)


def _are_paired(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a body of its own has a rendezvous for rank 0 and one for the others, which wait
    there while rank 0 goes first; behind a `return` of the one are the others."""
    own = list(own_code(node.body))
    meets = [n.lineno for n in own if called_name(n) in _PAIRED]  # type: ignore[attr-defined]
    sides: set[bool] = set()
    for n in own if len(meets) > 1 else ():
        if isinstance(n, ast.If) and RANK.search(test := source_text(n.test)):
            is_first = bool(MASTER.search(test)) and not _OTHERS.search(test)
            last, end = n.body[-1].end_lineno or 0, n.end_lineno or 0
            after = sys.maxsize if isinstance(n.body[-1], ast.Return) else end
            sides |= {is_first for at in meets if n.lineno <= at <= last}
            sides |= {not is_first for at in meets if last < at <= after}
    return len(sides) > 1


@cache
def _collective_methods() -> frozenset[str]:
    groups = (name_group(f"{package}-collective") for package in ("xla", "torch", "accelerate"))
    return frozenset(name.rpartition(".")[2] for group in groups for name in group)


def _runs_a_model(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(
        MODEL.fullmatch(source_text(node.func).removeprefix("self."))
    )
