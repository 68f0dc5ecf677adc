"""Code that torch_xla runs slowly or wrongly: shapes that change, precision, gradients that are not
synchronised."""

import ast
import re
from collections.abc import Iterator
from typing import ClassVar

from tpukit.knowledge.calls import name_group
from tpukit.probe.lint.rules.code import Code
from tpukit.probe.lint.rules.loaders import Loaders
from tpukit.probe.lint.rules.ranks import uses_device
from tpukit.probe.lint.rules.roles import GPU_TEST
from tpukit.probe.lint.rules.rule import Found, Rule
from tpukit.probe.lint.syntax import (
    FUNCTIONS,
    LOOPS,
    argument,
    called_name,
    nodes_below,
    run_once,
    source_text,
)

_MADE = ("Accelerator", "GradScaler", "DataLoader", "pad_sequence")
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


class _OnXla(Rule):
    """A rule for calls in scripts that use torch_xla."""

    nodes: ClassVar[tuple[type[ast.AST], ...]] = (ast.Call,)
    words: ClassVar[tuple[str, ...]] = ("torch_xla",)

    @classmethod
    def is_worth_parsing(cls, text: str) -> bool:
        return cls.may_stand_in(text) and uses_device(text)

    @classmethod
    def concerns(cls, code: Code) -> bool:
        return code.uses_xla

    def visit(self, node: ast.AST) -> Iterator[Found]:
        assert isinstance(node, ast.Call)
        if isinstance(node.func, ast.Attribute) and node.func.attr not in _MADE:
            yield from self.in_call(node, "")
            return
        meanings = self.code.names.resolve(node.func, self.code.scope)
        yield from self.in_call(node, meanings[0] if len(meanings) == 1 else "")

    def in_call(self, node: ast.Call, name: str) -> Iterator[Found]:
        """name: the qualified name of what is called; empty where it is of no concern."""
        raise NotImplementedError


class Fp16Accelerator(_OnXla):
    """`Accelerator(mixed_precision="fp16")` needs a GPU: a TPU computes in bf16."""

    id = "fp16-accelerator"
    effect = "raises on TPU"
    new = 'mixed_precision="bf16" on a TPU (fp16 needs a GPU), or that of the launcher'
    wrong = 'from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision="fp16")'
    right = wrong.replace("fp16", "bf16")
    words = ("Accelerator", "accelerate")

    @classmethod
    def concerns(cls, code: Code) -> bool:
        return "accelerate" in code.packages

    def in_call(self, node: ast.Call, name: str) -> Iterator[Found]:
        is_one = name.startswith("accelerate") and name.endswith(".Accelerator")
        if is_one and not _ON_GPUS.search(self.code.text) and not self.code.holds(GPU_TEST):
            value = argument(node, "mixed_precision")
            if isinstance(value, ast.Constant) and value.value == "fp16":
                yield node.func, 'Accelerator(mixed_precision="fp16")'


class ScalerOnXla(_OnXla):
    """A `GradScaler` reads whether gradients are finite in each step, and waits for the device.
    bf16 has the range of fp32 and needs none."""

    id = "scaler-on-xla"
    effect = "waits each step"
    new = "omit it: bf16 has the range of fp32 and needs no scaler"
    wrong = "import torch_xla\nscaler = torch.amp.GradScaler()"
    right = "import torch_xla\nscaler = torch.amp.GradScaler(enabled=False)"

    def in_call(self, node: ast.Call, name: str) -> Iterator[Found]:
        known = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler")
        if name in known and not self.code.holds(GPU_TEST):
            enabled = argument(node, "enabled")
            if enabled is None or (isinstance(enabled, ast.Constant) and enabled.value):
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

    def visit(self, node: ast.AST) -> Iterator[Found]:
        if not isinstance(node, ast.FunctionDef):
            yield from super().visit(node)
        elif "collat" in node.name and _LONGEST.search(ast.unparse(node)):
            yield node, f"{node.name}() pads to the longest"

    def in_call(self, node: ast.Call, name: str) -> Iterator[Found]:
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
        if name == "torch.nn.utils.rnn.pad_sequence" and not _TO_THE_MODEL.search(text):
            yield node.func, "pad_sequence(...)"

    def _is_once(self, node: ast.Call) -> bool:
        """Whether a data set is padded as a whole (in no loop, by what runs once), or tokens are
        compared with the truncated ones and go no further, or a list is made text by text."""
        kinds = (ast.Assign, ast.Lambda, *FUNCTIONS, *LOOPS)
        around = [n for n in nodes_below(self.code.tree) if isinstance(n, kinds)
                  and n.lineno <= node.lineno <= (n.end_lineno or 0)]  # fmt: skip
        assigned = " ".join(source_text(n.targets[0]) for n in around if isinstance(n, ast.Assign))
        functions = {n.name for n in around if isinstance(n, FUNCTIONS)}
        in_turn = any(isinstance(n, (ast.Lambda, *LOOPS)) for n in around)
        is_whole = assigned and not in_turn and functions <= run_once(self.code.tree)
        by_text = isinstance(self.code.part(Loaders).parents.get(node), ast.ListComp)
        return bool(is_whole) or by_text or "untruncated" in assigned


class NoDropLast(_OnXla):
    """The last batch of an epoch is smaller, unless the number of samples divides: its shape is
    compiled too. `drop_last=True` for training; an evaluation pads it."""

    id = "no-drop-last"
    effect = "recompiles for the last batch"
    new = "drop_last=True for training, or pad the last batch: its shape is compiled too"
    wrong = "import torch_xla\ntrain_loader = DataLoader(data, batch_size=8, shuffle=True)"
    right = wrong.replace(")", ", drop_last=True)")

    def in_call(self, node: ast.Call, name: str) -> Iterator[Found]:
        if name not in name_group("loader"):
            return
        loaders = self.code.part(Loaders)
        whole_call = ast.Call(node.func, node.args, self.code.names.keywords(node))
        given = {keyword.arg for keyword in whole_call.keywords}
        drop = argument(whole_call, "drop_last", 8)
        kept = drop is None or (isinstance(drop, ast.Constant) and not drop.value)
        if not kept or given & {None, "batch_sampler"} or "streaming=True" in self.code.text:
            return
        if not loaders.fills_batches(whole_call) and loaders.feeds_training(node):
            yield node.func, "DataLoader(...) without drop_last" if drop is None else _WRITTEN


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

    def visit(self, node: ast.AST) -> Iterator[Found]:
        if _REDUCES.search(self.code.text):
            return
        calls = [n for n in nodes_below(node) if isinstance(n, ast.Call)]
        meanings = {name for call in calls for name in self.code.names.anywhere(call.func)}
        if meanings.isdisjoint(name_group("launches")) or meanings.isdisjoint(name_group("syncs")):
            return
        for call in calls:
            if re.fullmatch(r".*opt\w*\.step", source_text(call.func), re.I) and not call.args:
                yield call.func, f"{source_text(call.func)}() and a sync"
