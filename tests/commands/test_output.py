"""JSON fields that a task returns become what JSON holds."""

import json

import numpy as np
import torch

from tpukit.commands.output import plain


def test_numbers_are_numbers_and_what_is_not_finite_is_null():
    """What people return: scikit-learn's and numpy's scalars, tensors, an undefined metric."""
    metrics = {"mae": np.float32(0.5), "count": np.int64(3), "right": torch.tensor(True),
               "auc": float("nan"), "worst": np.array(np.inf), "a": "b", "none": None}  # fmt: skip
    fields = plain({"metrics": metrics, "intervals": {"mae": (np.float32(0.25), 1)}})
    assert fields == {
        "metrics": {"mae": 0.5, "count": 3, "right": True, "auc": None, "worst": None, "a": "b",
                    "none": None},
        "intervals": {"mae": [0.25, 1]},
    }  # fmt: skip
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    array = np.zeros(2)
    assert plain({"outputs": array})["outputs"] is array
