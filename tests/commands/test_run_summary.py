"""`tpukit.show` as text: what a run's files say."""

import json

from tpukit.commands.reports.run_summary import summarize_run
from tpukit.train.run_folder import RunFolder


def test_the_best_step_is_that_of_the_runs_own_metric(tmp_path):
    """best_metric=max:valid_accuracy, whose best step has not the least loss."""
    rows = [{"kind": "train", "step": 1, "loss": 2.0}]
    rows += [
        {"kind": "valid", "step": step, "valid_loss": loss, "valid_accuracy": right}
        for step, loss, right in ((2, 0.5, 0.7), (4, 0.9, 0.8), (6, 1.2, 0.75))
    ]
    (tmp_path / "config.toml").write_text('[train]\n[task]\nname = "images"\n')
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = tmp_path / "checkpoints" / "step-00000006"
    checkpoint.mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text(checkpoint.name)
    (checkpoint / "state.json").write_text('{"best": {"accuracy": 0.8, "step": 4.0}}')
    lines = [*summarize_run(RunFolder(tmp_path))]
    assert "  best        valid_loss 0.9, valid_accuracy 0.8 at step 4" in lines
