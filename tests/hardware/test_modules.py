"""A model that is moved to a device in place keeps what its parameters have beside their values."""

import torch
from torch import nn

from tpukit.hardware.modules import move_tensors


def test_moved_parameters_keep_attributes_hooks_and_ties():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    first = model[1].weight = model[0].weight
    first.no_decay = True
    first.register_hook(lambda gradient: 3 * gradient)
    seen = []
    first.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    move_tensors(model, torch.clone, torch.clone)
    moved = model[0].weight
    assert moved is not first and moved is model[1].weight and moved.no_decay
    moved.sum().backward()
    assert moved.grad.tolist() == [[3, 3], [3, 3]] and torch.equal(*seen, moved.grad)
