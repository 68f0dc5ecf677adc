"""tpukit: train PyTorch models on TPUs, GPUs and CPUs, and know beforehand what fits.

From Python: `fit`, `evaluate`, `predict`, `find_batch`, `load` and `show` do what the commands do,
in this process; `Task`, `Datasets`, `TrainingDefaults`, `named` and `stack_samples` make a task of
your own, `Preset` its presets, `ParameterGroup`, `ShuffledPlan`, `MicroBatch` and `SampleKey` its
optimizer and its batches, `read_table` and `split_rows` its rows, `infer` a trained model's
outputs, and `Target` and `Predictions` its submissions.
In a notebook `%load_ext tpukit` gives `%tpukit train ...`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpukit.api import evaluate, find_batch, fit, load, predict
    from tpukit.commands.reports.run_summary import show
    from tpukit.errors import TpukitError
    from tpukit.io.tables import read_table
    from tpukit.train.evaluation import infer
    from tpukit.train.labelled import split_rows
    from tpukit.train.submission import Predictions
    from tpukit.train.target import Target
    from tpukit.train.task import (
        Datasets,
        MicroBatch,
        ParameterGroup,
        Preset,
        SampleKey,
        ShuffledPlan,
        Task,
        TrainingDefaults,
        named,
        stack_samples,
    )

__version__ = "0.2.0"

_MODULES = {
    "tpukit.api": "evaluate find_batch fit load predict",
    "tpukit.commands.reports.run_summary": "show",
    "tpukit.errors": "TpukitError",
    "tpukit.io.tables": "read_table",
    "tpukit.magic": "load_ipython_extension",
    "tpukit.train.evaluation": "infer",
    "tpukit.train.labelled": "split_rows",
    "tpukit.train.submission": "Predictions",
    "tpukit.train.target": "Target",
    "tpukit.train.task": "Datasets MicroBatch ParameterGroup Preset SampleKey ShuffledPlan Task"
    " TrainingDefaults named stack_samples",
}
"""Module -> its public names, imported when they are first used: torch takes a second."""
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Datasets",
    "MicroBatch",
    "ParameterGroup",
    "Predictions",
    "Preset",
    "SampleKey",
    "ShuffledPlan",
    "Target",
    "Task",
    "TpukitError",
    "TrainingDefaults",
    "evaluate",
    "find_batch",
    "fit",
    "infer",
    "load",
    "named",
    "predict",
    "read_table",
    "show",
    "split_rows",
    "stack_samples",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tpukit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
