"""Copies of models, and what a trial's process receives of them."""

import threading

import torch
from torch import nn

from tpukit.probe.trials.carried import copied


class Held(nn.Module):
    """Its function holds its layer, and whatever else it is given."""

    def __init__(self, beside=None) -> None:
        super().__init__()
        layer = self.layer = nn.Linear(2, 2)
        self.function = lambda x: torch.ops.aten.relu(layer(x)) + 0 * bool(beside)

    def forward(self, x):
        return self.function(x)


def test_a_copy_s_functions_hold_the_copy_s_modules():
    model = Held()
    copy = copied(model)
    with torch.no_grad():
        copy.layer.weight.zero_()
        copy.layer.bias.fill_(3.0)
    assert copy(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]
    assert not torch.equal(model.layer.bias, copy.layer.bias)


def test_a_model_that_cannot_be_pickled_is_copied():
    model = Held(beside=threading.Lock())
    assert torch.equal(copied(model)(torch.ones(1, 2)), model(torch.ones(1, 2)))
