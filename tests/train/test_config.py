"""Layers of settings and their errors."""

from typing import get_args, get_type_hints

import pytest

from tpukit.errors import ConfigError
from tpukit.io.ranges import ranges_of
from tpukit.train.config import TrainConfig, preset_values, read_config_file, resolve


def test_stronger_layers_win():
    config = resolve({"lr": 0.1}, {"lr": 0.2, "log_every": 7}, {"log_every": 9, "epochs": 3})
    assert (config.lr, config.log_every, config.epochs) == (0.1, 7, 3)


def test_a_length_in_a_stronger_layer_replaces_the_other_kind():
    config = resolve({"max_steps": 5}, {"epochs": 3})
    assert (config.max_steps, config.epochs) == (5, None)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve({"lr": -1.0, "log_every": 0, "global_bach_size": 3, "hw": "gpo"})
    text = caught.value.message
    assert all(part in text for part in ("--lr", "--log-every", "global_bach_size", "--hw"))
    assert "global_batch_size" in caught.value.hint and "gpu" in caught.value.hint


def test_a_wrong_type_is_named_with_what_was_expected():
    with pytest.raises(ConfigError, match="--epochs 'many' is not a whole number"):
        resolve({"epochs": "many"})
    with pytest.raises(ConfigError, match="--lr True"):
        resolve({"lr": True})


def test_presets_merge_with_the_task_and_unknown_ones_are_near_something():
    assert preset_values("safe", {})["global_batch_size"] == 8
    assert preset_values("quick", {"epochs": 1})["epochs"] == 1
    with pytest.raises(ConfigError) as caught:
        preset_values("balancd", {})
    assert caught.value.hint == "Did you mean balanced?"


def test_config_files(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'log-every = 3\n[train]\nlr = 0.5\n[task]\nsize = "tiny"\n[versions]\na = "1"\n'
    )
    read = read_config_file(file)
    assert read.train == {"log_every": 3, "lr": 0.5} and read.task == {"size": "tiny"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"lr = ", "not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
        (b"[optim]\nlr = 1", r"\[optim\]"),
    ],
)
def test_config_files_that_cannot_be_used(tmp_path, content, expected):
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        read_config_file(file)
    with pytest.raises(ConfigError, match="does not exist"):
        read_config_file(tmp_path / "other.toml")


def test_every_number_has_a_range():
    numbers = {
        name for name, hint in get_type_hints(TrainConfig).items()
        if {int, float} & {hint, *get_args(hint)}
    }  # fmt: skip
    assert numbers == ranges_of(TrainConfig).keys()
