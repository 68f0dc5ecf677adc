"""What names and texts show of the roles of code: optimizers and their steps, evaluations, data for
training, rank 0, devices."""

import ast
import re

from tpukit.probe.lint.syntax import holder

_OPTIMIZER = re.compile(r"(?:^|[._])(?:\w*opt(?:im(?:izer)?)?s?\w*|\w*scaler)(?:\[[^]]*\])?$", re.I)
_SCHEDULER = re.compile(r"sched|options?$", re.I)
MAKES_OPTIMIZER = re.compile(r"(?:^|\.)(?:Ada\w+|SGD|RMSprop|\w*[Oo]ptim\w*)$")

LOADS = re.compile(r"load|dl\b|batches|_iter\b|iterator", re.I)
LOADS_DATA = re.compile(rf"{LOADS.pattern}|epoch|_set\b|dataset", re.I)
EVALUATION_LOADER = re.compile(
    r"(?:^|[^a-z])(?:val|valid|test|eval|dev)(?:[_A-Z]\w*)?(?:load|dl\b|dataload)", re.I
)
EVALUATES = re.compile(r"eval|valid|test|predict|infer|generat|bleu", re.I)
"""A function's name."""
EVALUATION_SET = re.compile(r"val|test|eval|dev(?!ice)", re.I)
"""The name of a data set that is handed to a sampler."""
EVALUATION_DATA = re.compile(
    r"(?:^|[^a-z])(?:val(?!ue)|eval|test|dev(?!ice)|pred|infer|subm|sub(?:$|_)|holdout|oof|score)"
)
TRAINING_DATA = re.compile(r"(?<!s)train|(?:^|_)trn?(?:$|_)")
MODEL = re.compile(r"\w*(?:model|net|classif)\w*", re.I)
OTHER_MODEL = re.compile(r"ema|teacher|target|averag|swa|frozen|lpips", re.I)
"""A model that a loop does not train."""
LOSS = re.compile(r"loss", re.I)

MASTER = re.compile(
    r"is_master_ordinal|is_main_process|is_ma(?:in|ster)\b|is_rank_?(?:0|zero)|ma(?:in|ster)_process|"
    r"(?:ordinal|rank|process_index|\bgpu(?:_id)?)(?:\([^)]*\))?\s*(?:==|<=)\s*0|0\s*==\s*\w*rank|"
    r"not\s+\w*rank\b|not\s+\w*ordinal\b"
)
RANK = re.compile(r"rank|ordinal|main_process|master|process_index", re.I)
ONE_RANK = re.compile(
    r"rank|ordinal|(?<!__)main|master|process|proc_|gpu|device|distributed|ddp|local|primary|chief|save"
    r"|writ|verbose|log|fsdp|world|single|standalone",
    re.I,
)
"""A test that may hold on one rank alone."""
GPU_TEST = re.compile(r"cuda|gpu|fp16|half|mps", re.I)
_ON_TPU = re.compile(r"xla|tpu", re.I)
_OFF_TPU = re.compile(r"\b(?:use_|has_|is_)?(?:cuda|gpu|mps)(?!_?id)|[\"']cpu", re.I)
_NEGATED = re.compile(r"\bnot\b|!=")


def is_optimizer_step(call: ast.Call) -> bool:
    """`optimizer.step()`, by the name of what is stepped."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    stepped = holder(call)
    return bool(_OPTIMIZER.search(stepped)) and not _SCHEDULER.search(stepped)


def off_tpu(test: str) -> bool | None:
    """Whether a test holds off a TPU: `device == "cuda"`, `not use_xla`; None for other tests."""
    if _ON_TPU.search(test):
        return bool(_NEGATED.search(test))
    return True if _OFF_TPU.search(test) and not _NEGATED.search(test) else None
