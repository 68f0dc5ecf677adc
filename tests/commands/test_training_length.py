"""How long a task trains where the command does not say."""

from __future__ import annotations

import pytest
from tiny_task import Tiny

from tpukit.commands.options.training import task_defaults
from tpukit.train.config import resolve
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
