"""The rate as a function of the step, checked against torch's own schedulers."""

import pytest
import torch

from tpukit.train.config import TrainConfig
from tpukit.train.schedule import is_due, learning_rate


def test_cosine_equals_torch():
    config = TrainConfig(lr=0.1, schedule="cosine", final_lr_fraction=0.1)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    peer = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=19, eta_min=0.01)
    for step in range(20):
        assert learning_rate(step, 20, config) == pytest.approx(peer.get_last_lr()[0])
        optimizer.step()
        peer.step()


def test_warmup_rises_to_the_peak_and_linear_ends_where_it_was_told():
    config = TrainConfig(lr=1.0, schedule="linear", warmup_steps=4, final_lr_fraction=0.25)
    rates = [learning_rate(step, 10, config) for step in range(10)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[-1] == pytest.approx(0.25)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_that_is_named_falls(schedule):
    """`--set schedule=cosine` alone."""
    config = TrainConfig(lr=1.0, schedule=schedule)
    rates = [learning_rate(step, 11, config) for step in range(11)]
    assert rates[5] == pytest.approx(0.505) and rates[-1] == pytest.approx(0.01)


def test_constant_stays():
    assert {learning_rate(step, 5, TrainConfig(lr=0.3)) for step in range(5)} == {0.3}


def test_due_at_every_interval_and_at_the_end():
    assert [done for done in range(11) if is_due(done, 4, 10)] == [4, 8, 10]
