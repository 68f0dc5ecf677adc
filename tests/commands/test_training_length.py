"""How long a task trains where the command does not say."""

import pytest
from tiny_task import Tiny

from tpukit.commands.options import training
from tpukit.commands.options.training import GivenSettings, task_defaults
from tpukit.train.config import ConfigFile, resolve
from tpukit.train.task import TrainingDefaults


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        (TrainingDefaults(), (10, None)),
        (TrainingDefaults(epochs=3), (3, None)),
        (TrainingDefaults(max_steps=24), (None, 24)),
    ],
)
def test_a_task_says_epochs_or_steps(defaults, expected):
    class Own(Tiny):
        pass

    Own.defaults = defaults
    task = Own()
    config = resolve(task_defaults(task))
    assert (config.epochs, config.max_steps) == expected


@pytest.mark.parametrize(
    ("kind", "preset", "given", "expected"),
    [
        ("gpu", None, {}, None),
        ("gpu", None, {"max_steps": 500}, None),
        ("gpu", None, {"max_steps": 499}, False),
        ("gpu", None, {"epochs": 1}, None),
        ("gpu", "quick", {}, False),
        ("gpu", "quick", {"compile": True}, True),
        ("gpu", None, {"max_steps": 2, "compile": True}, True),
        ("tpu", "quick", {"max_steps": 2}, None),
        ("cpu", "quick", {"max_steps": 2}, None),
    ],
)
def test_short_runs_on_gpus_are_not_compiled(monkeypatch, kind, preset, given, expected):
    monkeypatch.setattr(training, "find_kind", lambda options: kind)
    settings = GivenSettings(given, {}, ConfigFile({}, {}), preset)
    config = resolve(given, {"epochs": 1})
    assert settings.backend_options(config).compile is expected
