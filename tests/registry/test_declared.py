"""What tasks declare, read from their source."""

import pytest

from tpukit.registry import classes
from tpukit.registry.declared import find_source, registered, setting_fields, task_of_run

FILE = """
import nothing_that_exists
from dataclasses import dataclass
from beside import Sampling as Drawing
from tpukit import Task

@dataclass(frozen=True)
class Shared:
    width: int = 8
    '''The width.'''

@dataclass(frozen=True)
class Settings(Shared):
    depth: "int | None" = None
    kind: str = make()

class Base(Task):
    folder = "runs/base"
    test_options = predict_options = Drawing

class Mine(Base):
    options = Settings
    names = {"a": "b", "c": Shared}
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("class Sampling:\n    steps: int = 5\n    '''Steps.'''\n")
    return tmp_path


def test_a_class_its_bases_and_what_lies_beside_it_are_read(place):
    source = find_source(f"{place / 'mine.py'}:Mine")
    fields = {field.name: field for field in setting_fields(source)}
    assert (fields["width"].hint, fields["width"].default, fields["width"].text) == (
        int, 8, "The width.",
    )  # fmt: skip
    assert fields["depth"].default is None and fields["kind"].default is ...
    [steps] = source.member("predict_options").fields()
    assert (steps.name, steps.default, steps.text) == ("steps", 5, "Steps.")
    assert source.member("folder") == "runs/base"
    names = source.member("names")
    assert names["a"] == "b" and names["c"].definition.name == "Shared"
    assert find_source(f"{place / 'mine.py'}:Other") is None
    assert find_source("none.py:Mine") is find_source("no.module:Mine") is None


def test_each_of_our_tasks_declares_what_the_commands_need():
    assert {"eit", "images", "llm"} <= {*registered()}
    for task in registered():
        source = find_source(task)
        assert setting_fields(source) and source.member("generators")
        assert all(field.text for field in setting_fields(source))


@pytest.mark.parametrize(
    ("table", "task"),
    [
        ('name = "eit"', "eit"),
        ('name = "mine"\nsource = "{place}/mine.py:Mine"', "{place}/mine.py:Mine"),
        ('name = "mine"\nsource = "/gone/mine.py:Mine"', "mine"),
        ("name = ", None),
    ],
)
def test_a_run_names_its_task(table, task, place):
    (place / "config.toml").write_text("[task]\n" + table.replace("{place}", str(place)))
    expected = task and task.replace("{place}", str(place))
    assert task_of_run(place) == task_of_run(place / "checkpoints" / "step-1") == expected
    assert task_of_run(place / "nowhere") is None


def test_a_task_has_its_earlier_name_for_one_more_release(capsys):
    classes._say_renamed.cache_clear()
    classes.find_task("summarize")
    assert classes.find_task("summarize").name == "llm" and find_source("summarize") is not None
    assert capsys.readouterr().err.count("--task summarize is --task llm now") == 1
