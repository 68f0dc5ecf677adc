"""Commands that tpukit prints do what it says they do."""

import json
import shlex
from pathlib import Path

import pytest
import tiny_task
from runs import TINY, failure, tpukit

from tpukit.cli import app
from tpukit.commands import sizing, summarize_train, train
from tpukit.errors import DataError
from tpukit.tasks.llm.evaluate import write_predictions
from tpukit.train.run_folder import RunFolder, read_config, write_config


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


SETTINGS_FILE = """
from tiny_task import Tiny

class Mine(Tiny):
    def __init__(self, data_path="", config="small", sizes: list[int] = (1,), kind: str | int = 0,
                 day="", table: dict = None, deep=False, rate=0.5):
        super().__init__(data_path)
"""


def test_train_with_gives_a_task_the_settings_that_were_sized(monkeypatch, tmp_path):
    """Lists, tables, texts that look like numbers, and the name of an option of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(tiny_task.__file__).parent)
    Path("mine.py").write_text(SETTINGS_FILE)
    given = ["config=big", "sizes=[1, 2]", 'kind="12"', 'day="2026-01-02"', "deep=true",
             "rate=1e-3", 'table={a = 1, "b c" = {d = [1.5, "x"], e = true}}']  # fmt: skip
    words = shlex.join([word for pair in given for word in ("--set", pair)])
    sized = request_of(f"tpukit train --task mine.py:Mine {words}", train, monkeypatch)
    again = request_of(sizing.training_command(sized, 48, 3), train, monkeypatch)
    table = {"a": 1, "b c": {"d": [1.5, "x"], "e": True}}
    assert again.task_settings == sized.task_settings
    assert sized.task_settings == {
        "config": "big", "sizes": [1, 2], "kind": "12", "day": "2026-01-02", "deep": True,
        "rate": 0.001, "table": table,
    }  # fmt: skip
    folder = RunFolder(tmp_path)
    write_config(folder, {"train": {}, "task": sized.task_settings})
    assert read_config(folder)["task"] == sized.task_settings


def test_train_with_trains_on_as_many_gpus_as_were_asked_for(tmp_path):
    words = ("probe-batch", "--task", TINY, "--target", "2xt4", "--max", "4", "--json")
    command = json.loads(tpukit(*words, cwd=tmp_path).stdout)["command"]
    assert command.endswith("--hw gpu --devices 2")


def test_results_that_cannot_be_written_name_the_way_out(tmp_path):
    with pytest.raises(DataError, match="cannot be written") as told:
        write_predictions(tmp_path / "file" / "test", []) if not (tmp_path / "file").touch() else 0
    assert "--out" in told.value.hint


def test_paths_with_spaces_are_quoted(tmp_path):
    done = tpukit("data", "dialogues", "--out", tmp_path / "my data", "--n", "20")
    assert f"--data-path '{tmp_path / 'my data'}'" in done.stdout
    missing = failure(tpukit("train", "--data-path", tmp_path / "no data"))
    assert f"--out '{tmp_path / 'no data'}'" in missing or "does not exist" in missing
