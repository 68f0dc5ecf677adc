"""Copies of models, and what a trial's process receives of them."""

import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tpukit.probe.trials.carried import carried, carried_task, copied
from tpukit.testing import GivenModel


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


def test_a_parametrized_module_is_sent():
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    model = GivenModel(layer, torch.ones(1, 2), None)
    with carried(model, map(type, layer.modules())) as source:
        received = carried_task(**source.arguments).model
    assert torch.equal(received(torch.ones(1, 2)), layer(torch.ones(1, 2)))
    assert set(received.state_dict()) == set(layer.state_dict())
    copy = copied(nn.Sequential(layer, Held()))
    assert torch.equal(copy[0].weight, layer.weight) and copy[0] is not layer
    with pytest.raises(RuntimeError, match="parametrized"):
        pickle.dumps(layer)


def test_a_model_that_cannot_be_pickled_is_copied():
    model = Held(beside=threading.Lock())
    assert torch.equal(copied(model)(torch.ones(1, 2)), model(torch.ones(1, 2)))
