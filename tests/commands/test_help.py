"""Help in a narrow terminal, and under older typers."""

import dataclasses
import re
import sys

import pytest

from tpukit.cli import COMMANDS, load_command, run
from tpukit.tasks.images.settings import ImagesConfig


@pytest.mark.parametrize(
    "command", [[], *([name] for name in COMMANDS), ["data", "eit"], ["train", "--task", "images"]]
)
def test_help_fits_forty_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 40
    assert "…" not in shown


@pytest.mark.parametrize("name", ["doctor", "train", "test"])
def test_no_default_is_shown_where_there_is_none(name):
    """Typer 0.12 writes `[default: None]` otherwise."""
    without = [p for p in load_command(name).params if p.default is None]
    assert without
    assert not any(p.show_default for p in without)


@pytest.mark.parametrize("command", ["train", "probe-batch"])
def test_help_lists_the_options_of_the_task_that_is_named(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    assert run([command, "--help", "--task", "images"]) == 0
    shown = capsys.readouterr().out
    assert "--size" not in shown and "--block-size" not in shown
    listed = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", shown)}
    assert {field.name for field in dataclasses.fields(ImagesConfig)} <= listed
    assert (
        re.search(r"--class-weights +none\|balanced +Weights", shown) and "(default: 0.08)" in shown
    )


def test_help_lists_an_own_tasks_constructor_without_importing_it(tmp_path, monkeypatch, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "raise SystemExit\nclass Mine:\n"
        "    def __init__(self, width: int = 8, *, path, kind='a'): ...\n"
    )
    monkeypatch.setenv("COLUMNS", "60")
    assert run(["train", f"--task={file}:Mine", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--width (<int>|INTEGER) \(default: 8\)", shown)
    assert "--path VALUE (must be given)" in shown
    assert run(["train", "--task", str(tmp_path / "none.py:Mine"), "--help"]) == 0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("trian", "Did you mean train?"),
        ("data image", "Did you mean 'images'?"),
        ("train --learning-rate 1", "Did you mean --lr?"),
        ("train --batch-size 4", "Did you mean --global-batch-size?"),
        ("train --set lerning_rate=1", "Did you mean lr?"),
        ("train --set num_train_epochs=1", "Did you mean epochs?"),
        ("train --model resnet18", "Task eit has no such option. For images: tpukit train --task"
         " images --model resnet18. For llm: tpukit summarize-train --model resnet18."),
        ("test --num-beams 4 --task eit", "No such option: --num-beams"),
        ("predict --task eit --num-beams 4", "Task eit has no such option. Task llm has one"),
        ("train --task images --image-sise 3", "Did you mean --image-size?"),
        ("train --lr abc", "'--lr': 'abc' is not a number."),
        ("data eit --n=1e", "'--n': '1e' is not a whole number."),
        ("train --task images --image-size 0", "Error: image_size 0 is not a whole number"),
    ],
)  # fmt: skip
def test_a_mistyped_line_names_what_was_meant(line, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(line.split()) == 2
    shown = capsys.readouterr().err
    assert told in shown and "unable to parse" not in shown


@pytest.mark.parametrize(
    ("task", "line", "told"),
    [
        ("eit", "predict --num-beams 2", "Task eit has no such option. Task llm has one"),
        ("images", "test --sampling-steps 5", "Task images has no such option. Task eit has one"),
        ("eit", "test --sampling-steps 0", "has no checkpoint yet"),
        ("llm", "predict --num-beams 2", "has no checkpoint yet"),
    ],
)
def test_a_run_takes_the_options_of_its_own_task(task, line, told, tmp_path, capsys):
    (tmp_path / "config.toml").write_text(f"[train]\n[task]\nname = '{task}'\n")
    (tmp_path / "checkpoints").mkdir()
    assert run([*line.split(), "--run", str(tmp_path), "--hw", "cpu"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "predict", "probe-batch", "test", "summarize-train"])
def test_a_command_without_any_option_is_read(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tpukit.commands.probe_batch.size_batch", lambda *_, **__: {})
    run([command])
    assert "--debug" not in capsys.readouterr().err


@pytest.mark.parametrize("line", ["train --lr abc", "train --data-path nowhere"])
@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_an_error_is_red_in_a_terminal_alone(line, variables, coloured, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(line.split()) == 2
    shown = capsys.readouterr().err
    assert ("\x1b[1;31mError:\x1b[0m " in shown) == coloured and "Error:" in shown
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    run(line.split())
    assert "\x1b" not in capsys.readouterr().err
