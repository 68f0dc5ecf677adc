"""Rows of folds are read as they were written."""

import numpy as np
import pytest
import torch

from tpukit.io.files import write_file
from tpukit.io.tables import read_table, write_csv
from tpukit.train.held_out import (
    ALL_FILE,
    FILE,
    TARGET_FILE,
    HeldOut,
    interval,
    read_held_out,
    scores,
    summarise,
)
from tpukit.train.metric_names import parse_metrics
from tpukit.train.submission import scored_rows
from tpukit.train.target import Target
from tpukit.train.target_loss import TargetLoss


@pytest.mark.parametrize("column", ["label", "id", "predicted"])
def test_a_target_may_have_any_name(tmp_path, column):
    target, values = Target("class", (column,), ('a "b",\nc', "NA")), np.array([1, 0])
    predicted = np.array([[0.1, 0.9], [0.3, 0.7]])
    write_file(tmp_path / TARGET_FILE, target.to_json())
    write_csv(tmp_path / FILE, scored_rows(target, ["007", "x y"], values, predicted))
    found = read_held_out(tmp_path)
    assert found.ids == ["007", "x y"] and found.values.tolist() == [1, 0]
    assert (found.predicted == predicted).all()
    summarise(tmp_path, {"0": tmp_path}, lambda target: [])
    assert read_table(tmp_path / ALL_FILE).column(column) == ["NA", 'a "b",\nc']


def test_resamples_that_a_users_metric_does_not_take_are_left_out(tmp_path):
    """They ended the comparison of folds, after all were trained."""
    (tmp_path / "own.py").write_text(
        "def own(target, shown):\n    assert target.any()\n    return shown[:, 1].mean()\n"
    )
    predicted = np.linspace(0, 1, 8)
    found = HeldOut(
        Target("class", ("y",), ("0", "1")), list("abcdefgh"), np.array([0] * 7 + [1]),
        np.stack([1 - predicted, predicted], 1),
    )  # fmt: skip
    (metric,) = parse_metrics(f"max:{tmp_path / 'own.py'}:own")
    low, high = interval(found, metric)
    assert 0 < low < scores(found, [metric])["own"] < high < 1


def test_a_score_is_one_that_there_is():
    target = Target("score", ("score",), ("0", "2", "10"), mean=(4.0,), spread=(3.0,))
    predicted = TargetLoss(target).predictions(torch.tensor([[-9.0], [-0.2], [1.0], [9.0]])).numpy()
    assert predicted[:, 0].tolist() == pytest.approx([0, 3.4, 7, 10])
    found = HeldOut(target, list("abcd"), np.array([0.0, 2.0, 10.0, 10.0]), predicted)
    metrics = parse_metrics("accuracy,qwk,mae")
    assert scores(found, metrics) == pytest.approx({"accuracy": 1, "qwk": 1, "mae": 1.1})
    nothing = found._replace(predicted=predicted * np.nan)
    assert all(np.isnan(value) for value in scores(nothing, metrics).values())
