"""Commands that tpukit prints do what it says they do."""

import shlex

import pytest
from runs import TINY, failure, tpukit

from tpukit.cli import app
from tpukit.commands import sizing, summarize_train, train
from tpukit.errors import DataError
from tpukit.tasks.summarize.evaluate import write_predictions


def request_of(command, module, monkeypatch):
    """The training request that a command line makes."""
    made = []

    def keep(task, settings, *_):
        made.append(settings.request(task))

    monkeypatch.setattr(module, "run_training", keep)
    app(args=shlex.split(command)[1:], standalone_mode=False)
    return made[0]


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("tpukit summarize-train --preset quick --data-path 'my data'", summarize_train),
        ("tpukit train --preset quick --no-compile --shard --set clip_norm=0.5", train),
        (f"tpukit train --task {TINY} --preset fast --set early_stopping=3 --epochs 7", train),
    ],
)
def test_train_with_repeats_the_run_that_was_sized(command, module, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sized = request_of(command, module, monkeypatch)
    again = request_of(sizing.training_command(sized, 48, 3), module, monkeypatch)
    expected = {**vars(sized.config), "global_batch_size": 48, "accumulate": 3}
    assert vars(again.config) == expected
    assert again.task.identity() == sized.task.identity()


def test_results_that_cannot_be_written_name_the_way_out(tmp_path):
    with pytest.raises(DataError, match="cannot be written") as told:
        write_predictions(tmp_path / "file" / "test", []) if not (tmp_path / "file").touch() else 0
    assert "--out" in told.value.hint


def test_paths_with_spaces_are_quoted(tmp_path):
    done = tpukit("data", "dialogues", "--out", tmp_path / "my data", "--n", "20")
    assert f"--data-path '{tmp_path / 'my data'}'" in done.stdout
    missing = failure(tpukit("train", "--data-path", tmp_path / "no data"))
    assert f"--out '{tmp_path / 'no data'}'" in missing or "does not exist" in missing
