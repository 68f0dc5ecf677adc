"""The loss curve: numbers that can be read, whatever the losses and the run's name."""

import json
import warnings

import pytest
from matplotlib.figure import Figure

from tpukit.train.run_folder import RunFolder
from tpukit.train.run_log import loss_curve


@pytest.mark.parametrize("losses", [[2.31, 2.1, 1.9], [900.0, 30.0, 0.01], [0.5, -0.5, 0.0]])
def test_the_axes_name_plain_numbers_and_whole_steps(tmp_path, monkeypatch, losses):
    run = RunFolder(tmp_path / "日本 run")
    run.path.mkdir()
    rows = [{"kind": "train", "step": 3 + i, "loss": loss} for i, loss in enumerate(losses)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    loss_curve(run)
    (axes,) = drawn[0].axes
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks
        drawn[0].canvas.draw()
    low, high = sorted(axes.get_ylim())
    shown = [
        label.get_text().replace("\N{MINUS SIGN}", "-")
        for label, at in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
        if low <= at <= high
    ]
    assert len(shown) >= 3 and all(text and float(text) is not None for text in shown)
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
