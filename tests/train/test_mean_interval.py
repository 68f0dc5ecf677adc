"""The intervals of `test`: how often they hold the mean, and that they stay in a metric's range."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from tpukit.tasks.eit.metrics import RANGES
from tpukit.tasks.llm.data.rows import Columns, Row
from tpukit.tasks.llm.evaluate import score_rows
from tpukit.train.evaluation import mean_interval

TRIALS = 3000


def test_it_is_students():
    values = np.random.default_rng(0).normal(0.7, 0.1, 22)
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean_interval(values) == pytest.approx([expected.low, expected.high])
    assert mean_interval(values[:1]) is None


@pytest.mark.parametrize("samples", [2, 5, 30])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), RANGES["correlation"]])
def test_it_holds_the_mean_as_often_as_it_says_and_stays_in_the_range(samples, low, high):
    draw = np.random.default_rng(samples)
    sets = low + (high - low) * draw.beta(4, 2, (TRIALS, samples))
    mean = low + (high - low) * 4 / 6
    found = np.array([mean_interval(values, low, high) for values in sets])
    covered = ((found[:, 0] <= mean) & (mean <= found[:, 1])).mean()
    assert 0.92 < covered < 0.97  # the bootstrap holds it in 84 of 100 sets of five
    assert found.min() >= low and found.max() <= high


def test_rouge_of_five_summaries_has_such_an_interval(tmp_path):
    made = ["the cat sat", "a dog", "the bird sings loud", "no", "they meet at noon"]
    wanted = ["the cat sat down", "a dog ran", "the bird is loud", "nothing", "they meet at noon"]
    rows = [Row(i, str(i), "x: y", text) for i, text in enumerate(wanted)]
    found, _ = score_rows(rows, made, tmp_path / "none.csv", Columns(), lambda line: None)
    # Words in common, twice, by the words of both.
    low = ttest_1samp([6 / 7, 4 / 5, 6 / 8, 0, 1], 0).confidence_interval(0.95).low
    assert (found["rouge1_low"], found["rouge1_high"]) == pytest.approx((low, 1.0))
    one, _ = score_rows(rows[:1], made[:1], tmp_path / "none.csv", Columns(), lambda line: None)
    assert "rouge1" in one and "rouge1_low" not in one
