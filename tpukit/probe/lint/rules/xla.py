"""Code that torch_xla runs slowly or wrongly: shapes that change, precision, gradients that are not
synchronised."""

import ast
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from tpukit.knowledge.calls import name_group
from tpukit.probe.lint.rules.roles import EVALUATION_DATA, GPU_TEST, TRAINING_DATA
from tpukit.probe.lint.rules.rule import XLA, Found, Rule
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    LOOPS,
    argument,
    called_name,
    calls_in,
    is_constant,
    is_without_gradients,
    nodes_below,
    of_kind,
    source_text,
    trains,
)

_ON_GPUS = re.compile(r"deepspeed|@require_(?:cuda|gpu|multi_gpu|fp16|non_cpu)", re.I)
"""Text of a module that runs on GPUs alone."""
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
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SHUFFLES = re.compile(r"(?:Distributed|Random)Sampler\((?!.*shuffle=(?!True))")
_ROWS = {"MNIST": 60_000, "FashionMNIST": 60_000, "CIFAR10": 50_000, "CIFAR100": 50_000}
"""Data set -> samples for training."""
_DATA = ("dataset", "sampler")


class _OnXla(Rule):
    """A rule for calls in scripts that use torch_xla."""

    nodes: ClassVar[tuple[type[ast.AST], ...]] = (ast.Call,)
    packages = XLA


class Fp16Accelerator(Rule):
    """`Accelerator(mixed_precision="fp16")` needs a GPU: a TPU computes in bf16."""

    id = "fp16-accelerator"
    effect = "raises on TPU"
    new = 'mixed_precision="bf16" on a TPU (fp16 needs a GPU), or that of the launcher'
    wrong = 'from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision="fp16")'
    right = wrong.replace("fp16", "bf16")
    nodes = (ast.Call,)
    packages = ("accelerate",)
    words = ("Accelerator",)

    def visit(self, node: Any) -> Iterator[Found]:
        on_gpus = _ON_GPUS.search(self.code.text) or self.code.runs_under(GPU_TEST, node)
        is_fp16 = getattr(argument(node, "mixed_precision"), "value", "") == "fp16"
        if is_fp16 and not on_gpus and self.code.means(node.func, "accelerator"):
            yield node.func, 'Accelerator(mixed_precision="fp16")'


class ScalerOnXla(_OnXla):
    """A `GradScaler` reads whether gradients are finite in each step, and waits for the device.
    bf16 has the range of fp32 and needs none."""

    id = "scaler-on-xla"
    effect = "waits each step"
    new = "omit it: bf16 has the range of fp32 and needs no scaler"
    wrong = "import torch_xla\nscaler = torch.amp.GradScaler()"
    right = "import torch_xla\nscaler = torch.amp.GradScaler(enabled=False)"

    def visit(self, node: Any) -> Iterator[Found]:
        enabled = argument(node, "enabled")
        is_on = enabled is None or is_constant(enabled, True)
        if (
            is_on
            and self.code.means(node.func, "scaler")
            and not self.code.runs_under(GPU_TEST, node)
        ):
            yield node.func, "GradScaler on XLA"


class PaddingToLongest(_OnXla):
    """Samples that are padded to the longest of their batch have another shape in nearly each
    batch, and each new shape is compiled. Pad to a few fixed lengths."""

    id = "padding-to-longest"
    effect = "recompiles for each length"
    new = (
        'pad to a few fixed lengths (padding="max_length" in tokenizers): each new length is '
        "compiled"
    )
    wrong = (
        "import torch_xla\ndef encode(texts):\n    batch = tokenizer(texts, padding=True)\n"
        "    return batch"
    )
    right = wrong.replace("True", '"max_length"')
    nodes = (ast.Call, ast.FunctionDef)

    def visit(self, node: Any) -> Iterator[Found]:
        if isinstance(node, ast.Call):
            yield from self._in_call(node)
        elif "collat" in node.name and _LONGEST.search(ast.unparse(node)):
            yield node, f"{node.name}() pads to the longest"

    def _in_call(self, node: ast.Call) -> Iterator[Found]:
        names, text = self.code.names, self.code.text
        keyword, called = argument(node, "padding"), source_text(node.func)
        values = [keyword]
        if isinstance(keyword, ast.Attribute) and source_text(keyword.value) == "self":
            values = names.values(keyword.attr)  # those of its class
        padding = next((t for v in values if v and (t := source_text(v)) in _PADS), "")
        if (
            padding
            and re.search("token|pad|collat|process", called, re.I)
            and ("ollat" in called or (not self._is_once(node) and "pretrained" not in called))
        ):
            yield node.func, f"{called}(padding={padding})"
        elif keyword is None and _PADS_BY_DEFAULT.search(called):
            yield node.func, f"{called}(...)"
        elif _PADDING_COLLATOR.fullmatch(called_name(node)) and not _ONE_LENGTH.search(text):
            yield node.func, f"{called_name(node)}(...)"
        if self.code.means(node.func, "pad-sequence") and not _TO_THE_MODEL.search(text):
            yield node.func, "pad_sequence(...)"

    def _is_once(self, node: ast.Call) -> bool:
        """Whether a data set is padded as a whole (in no loop, by what runs once), or tokens are
        compared with the truncated ones and go no further, or a list is made text by text."""
        outer = self.code.names.outer
        assigned = " ".join(source_text(n.targets[0]) for n in outer(node, ast.Assign))
        functions = {n.name for n in outer(node, *FUNCTIONS)}
        in_turn = outer(node, ast.Lambda, *LOOPS)
        is_whole = assigned and not in_turn and functions <= self.code.run_once
        by_text = isinstance(self.code.names.parents.get(node), ast.ListComp)
        return bool(is_whole) or by_text or "untruncated" in assigned


class NoDropLast(_OnXla):
    """The last batch of an epoch is smaller, unless the number of samples divides: its shape is
    compiled too. `drop_last=True` for training; an evaluation pads it."""

    id = "no-drop-last"
    effect = "recompiles for the last batch"
    new = "drop_last=True for training, or pad the last batch: its shape is compiled too"
    wrong = "import torch_xla\ntrain_loader = DataLoader(data, batch_size=8, shuffle=True)"
    right = wrong.replace(")", ", drop_last=True)")

    def visit(self, node: Any) -> Iterator[Found]:
        if not self.code.means(node.func, "loader"):
            return
        whole_call = ast.Call(node.func, node.args, self.code.names.keywords(node))
        given = {keyword.arg for keyword in whole_call.keywords}
        drop = argument(whole_call, "drop_last", 8)
        kept = drop is None or is_constant(drop, False)
        if not kept or given & {None, "batch_sampler"} or "streaming=True" in self.code.text:
            return
        # Elsewhere, drop_last would lose rows of the result.
        if not self._fills_batches(whole_call) and self._feeds_training(node):
            yield node.func, "DataLoader(...) without drop_last" if drop is None else _WRITTEN

    def _feeds_training(self, call: ast.Call) -> bool:
        """Whether names around it, its `shuffle` or a loop with a backward pass show that."""
        words = " ".join(self._words(call))
        is_counted = called_name(self.code.names.parents.get(call, call)) == "len"  # and no more
        if EVALUATION_DATA.search(words) or is_counted or self._one_batch(call):
            return False
        loops = self._loops_over(call)
        around = (self.code.names.outer(loop, ast.AST) for loop in loops)
        if loops and all(any(map(is_without_gradients, each)) for each in around):
            return False
        shuffle = argument(call, "shuffle", 2)
        values = self.code.names.possible(shuffle) if shuffle else []
        shuffles = any(isinstance(value, ast.Constant) and value.value for value in values)
        sampler = argument(call, "sampler")
        shares = self.code.names.possible(sampler) if sampler else []
        shuffles |= any(_SHUFFLES.search(source_text(value)) for value in shares)
        return bool(TRAINING_DATA.search(words)) or shuffles or any(map(trains, loops))

    def _fills_batches(self, call: ast.Call) -> bool:
        """Whether none is smaller: batches of 1 (also by a command line's default) or of a size
        that divides a public data set."""
        size, data = argument(call, "batch_size", 1), argument(call, "dataset", 0)
        option = getattr(size, "attr", "\0").replace("_", "[-_]")
        defaults = re.findall(rf"--{option}[\"'][^)]*default\s*=\s*(\d+)\b", self.code.text)
        sizes = set(defaults or (map(source_text, self.code.names.possible(size)) if size else ()))
        values = self.code.names.possible(data) if data and not argument(call, "sampler") else ()
        made = [_ROWS.get(called_name(value), 0) for value in values]
        divides = (s.isdigit() and n > 0 and n % int(s) == 0 for n in made or [0] for s in sizes)
        return sizes <= {"1", "None"} or all(divides)

    def _words(self, call: ast.Call) -> Iterator[str]:
        """Names of what it is assigned to, of its data, and of the function around it."""
        data = [*call.args[:1], *(k.value for k in call.keywords if k.arg in _DATA)]
        yield from (_words_of(name) for value in data for name in _names_in(value))
        for node, inner in self.code.names.around(call):
            if isinstance(node, FUNCTIONS):
                name = _words_of(node.name)
                yield "" if TRAINING_DATA.search(name) and EVALUATION_DATA.search(name) else name
                return
            if isinstance(node, ast.Assign):
                yield from (_words_of(name) for t in node.targets for name in _names_in(t))
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                yield from (_words_of(name) for name in _names_in(node.target))
            elif isinstance(node, ast.keyword) and node.arg:
                yield _words_of(node.arg)
            elif isinstance(node, ast.Dict):
                keys = [k for k, v in zip(node.keys, node.values, strict=True) if v is inner]
                yield from (_words_of(name) for key in keys if key for name in _names_in(key))
            elif isinstance(node, ast.DictComp):
                yield from (_words_of(n) for g in node.generators for n in _names_in(g.iter))

    def _targets(self, call: ast.Call) -> set[str]:
        """The plain names that hold the loader."""
        statements = self.code.names.outer(call, ast.stmt)[:1]
        targets = (t for n in of_kind(statements, ast.Assign) for t in n.targets)
        return {target.id for target in of_kind(targets, ast.Name)}

    def _one_batch(self, call: ast.Call) -> bool:
        """Whether `next(iter(loader))` is its only use."""
        targets = self._targets(call)
        uses: list[ast.expr] = [n for n in of_kind(nodes_below(self.code.tree), ast.Name)
                                if n.id in targets and isinstance(n.ctx, ast.Load)]  # fmt: skip
        calls = (self.code.names.outer(use, ast.AST)[:2] for use in uses or [call])
        return all(list(map(called_name, two)) == ["iter", "next"] for two in calls)

    def _loops_over(self, call: ast.Call) -> list[ast.For]:
        targets = self._targets(call)
        loops = of_kind(nodes_below(self.code.tree), ast.For)
        return [loop for loop in loops if targets & set(_names_in(loop.iter))]


class UnsynchronisedGradients(_OnXla):
    """Several ranks, a plain `optimizer.step()` and a sync, but nothing that reduces gradients:
    `mark_step` does not, and each rank trains a model of its own."""

    id = "unsynchronised-gradients"
    effect = "ranks drift apart"
    new = (
        "xm.optimizer_step(optimizer): mark_step does not synchronise gradients, each rank trains "
        "its own model"
    )
    wrong = (
        "import torch_xla\nimport torch_xla.core.xla_model as xm\ndef train(index):\n"
        "    for x in loader:\n        model(x).backward()\n        optimizer.step()\n"
        "        torch_xla.sync()\ntorch_xla.launch(train)"
    )
    right = wrong.replace("optimizer.step()", "xm.optimizer_step(optimizer)")
    nodes = (ast.Module,)

    def visit(self, node: Any) -> Iterator[Found]:
        if _REDUCES.search(self.code.text):
            return
        calls = calls_in(node)
        meanings = {name for call in calls for name in self.code.names.anywhere(call.func)}
        if meanings.isdisjoint(name_group("launches")) or meanings.isdisjoint(name_group("syncs")):
            return
        for call in calls:
            if re.fullmatch(r".*opt\w*\.step", source_text(call.func), re.I) and not call.args:
                yield call.func, f"{source_text(call.func)}() and a sync"


def _names_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value[:80]


def _words_of(name: str) -> str:
    """`validLoader` as `valid_loader`."""
    return _CAMEL.sub("_", name).lower()
