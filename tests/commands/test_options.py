"""Options are their config's fields: one declaration, one help text, one default."""

import dataclasses

import pytest
import typer
from tiny_task import Tiny
from typer.testing import CliRunner

from tpukit.commands.options.option_sets import field_docs, with_option_sets
from tpukit.commands.options.training import TrainingSettings
from tpukit.errors import ConfigError
from tpukit.io.ranges import flag
from tpukit.registry.classes import find_task, make_task
from tpukit.train.config import OPTIONS, TrainConfig
from tpukit.train.task import Preset


def test_every_field_of_the_training_config_has_a_docstring():
    assert field_docs(TrainConfig).keys() == {f.name for f in dataclasses.fields(TrainConfig)}


@pytest.fixture
def parsed():
    """What a training command receives of its arguments."""

    def parse(*arguments: str):
        app, made = typer.Typer(), []

        @app.command()
        @with_option_sets
        def train(settings: TrainingSettings) -> None:
            made.append(settings)

        CliRunner().invoke(app, arguments, catch_exceptions=False)
        return made[0]

    return parse


def test_every_training_option_reaches_its_field(parsed):
    values = {"max_time": ("1h", 3600.0), "memory_limit": ("2GiB", 2**31), "hw": ("cpu", "cpu"),
              "precision": ("bf16", "bf16"), "kernels": ("off", "off"),
              "step_mode": ("recorded", "recorded"), "lr": ("0.5", 0.5),
              "track": ("wandb", "wandb")}  # fmt: skip
    hints = {field.name: field for field in dataclasses.fields(TrainConfig)}
    words: list[str] = []
    expected = {}
    for name in (name for names in OPTIONS.values() for name in names):
        text, value = values.get(name, ("7", 7))
        option = flag(name)
        if "bool" in str(hints[name].type):
            words, expected[name] = [*words, option], True
        elif "str" in str(hints[name].type):
            words, expected[name] = [*words, option, text], text
        else:
            words, expected[name] = [*words, option, text], value
    assert parsed(*words).train == expected


def test_an_option_overrides_set_and_both_override_the_file(parsed, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('hw = "tpu"\ndevices = 4\nprecision = "fp32"\n[task]\nsize = "tiny"\n')
    settings = parsed("--nproc", "3", "--set", "devices=2", "--set", "precision=bf16",
                      "--set", "depth=5", "--config", str(file))  # fmt: skip
    hardware = settings.hardware()
    assert (hardware.hw, hardware.devices, hardware.precision) == ("tpu", 3, "bf16")
    assert settings.task == {"depth": 5} and settings.file.task == {"size": "tiny"}


def test_a_tasks_preset_reaches_the_hardware(parsed, monkeypatch):
    """What a run records is what its backend computes with, and what is probed."""
    preset = {"precision": "fp32", "shard": True}
    monkeypatch.setattr(Tiny, "presets", {"safe": Preset(train=preset)})
    settings = dataclasses.replace(parsed(), preset="safe", task={})
    config = settings.request(Tiny).config
    hardware = settings.backend_options(config)
    assert (hardware.precision, hardware.shard) == ("fp32", True)
    assert (config.precision, config.shard) == ("fp32", True)

    monkeypatch.setattr(Tiny, "presets", {"safe": Preset(train={"hw": "cpu"})})
    with pytest.raises(ConfigError, match=r"(?s)'safe' .* sets hw.*--hw cpu"):
        settings.request(Tiny)


def test_the_command_that_goes_on_resumes(parsed, monkeypatch):
    line = ["train", "--no-resume", "--lr", "0.1"]
    monkeypatch.setattr("sys.argv", ["tpukit", *line])
    assert parsed(*line[1:]).command.endswith("tpukit train --lr 0.1")


def test_units_that_cannot_be_read_are_named(parsed):
    with pytest.raises(ConfigError, match="invalid duration 'soon'"):
        parsed("--max-time", "soon")
    with pytest.raises(ConfigError, match="invalid amount of memory 'much'"):
        parsed("--memory-limit", "much")


@pytest.mark.parametrize(
    ("text", "value"),
    [("False", False), ("True", True), ("false", False), ("0.5", 0.5), ("no", "no"), ("01", "01")],
)
def test_a_setting_is_read_as_people_write_it(parsed, text, value):
    """Python's False was a text, and with it true."""
    found = parsed("--set", f"deep={text}").task["deep"]
    assert (found, type(found)) == (value, type(value))


def test_a_text_is_no_boolean_of_a_task():
    """`--set refinement=off` was ignored, `--set probabilities=no` was true."""
    for name, setting in (("eit", "refinement"), ("images", "probabilities")):
        with pytest.raises(ConfigError, match=f"{setting} 'no' is not true or false"):
            make_task(find_task(name), {setting: "no"}, "data")
    task = make_task(find_task("eit"), {"refinement": False, "size": "tiny"}, "data")
    assert task.settings.refinement is False
