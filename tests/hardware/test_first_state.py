"""State that is made before the first step: as the step would begin with, or left to it."""

from copy import deepcopy

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tpukit.hardware.first_state import make_state

OPTIM = torch.optim
RATE = 1e-2


def of_timm(name):
    return lambda p: create_optimizer_v2(p, opt=name, lr=RATE, momentum=0.9)


MADE = {
    "AdamW": lambda p: OPTIM.AdamW(p, RATE),
    "Adam-amsgrad": lambda p: OPTIM.Adam(p, RATE, amsgrad=True),
    "NAdam": lambda p: OPTIM.NAdam(p, RATE),
    "Adamax": lambda p: OPTIM.Adamax(p, RATE),
    "SGD": lambda p: OPTIM.SGD(p, RATE, momentum=0.9, nesterov=True),
    "SGD-plain": lambda p: OPTIM.SGD(p, RATE),
    "RMSprop": lambda p: OPTIM.RMSprop(p, RATE, momentum=0.9, centered=True),
    "Adagrad": lambda p: OPTIM.Adagrad(p, RATE, initial_accumulator_value=0.1),
    "Adadelta": lambda p: OPTIM.Adadelta(p, RATE),
    "Adafactor": lambda p: OPTIM.Adafactor(p, RATE),
    "timm.lion": of_timm("lion"),
    "timm.madgrad": of_timm("madgrad"),
}
LEFT = {
    "SGD-dampening": lambda p: OPTIM.SGD(p, RATE, momentum=0.9, dampening=0.5),
    "Rprop": lambda p: OPTIM.Rprop(p, RATE),  # its sizes of a step begin at the rate
    "ASGD": lambda p: OPTIM.ASGD(p, RATE),
    "timm.adopt": of_timm("adopt"),
    "timm.lookahead_sgd": of_timm("lookahead_sgd"),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4), nn.Linear(4, 8))


def train(model, optimizer, steps=4):
    for step in range(steps):
        rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", MADE)
def test_a_step_goes_on_from_what_it_would_have_made(name):
    plain, model = network(), network()
    expected, optimizer = (MADE[name](m.parameters()) for m in (plain, model))
    groups, random = deepcopy(optimizer.param_groups), torch.get_rng_state()
    assert make_state(optimizer, lambda value, p: value.clone())
    assert torch.equal(torch.get_rng_state(), random)
    for before, group in zip(groups, optimizer.param_groups, strict=True):
        assert {**before, "params": 0} == {**group, "params": 0}
    kept = {p: set(optimizer.state[p]) for p in model.parameters()}
    train(plain, expected)
    train(model, optimizer)
    assert kept == {p: set(optimizer.state[p]) for p in model.parameters()}
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", LEFT)
def test_what_the_first_gradient_or_rate_decides_is_left_to_the_first_step(name):
    optimizer = LEFT[name](network().parameters())
    assert not make_state(optimizer, lambda value, p: value)
    assert not any(optimizer.state.values())


def test_a_copy_of_the_weights_is_that_of_each_weight():
    model = network()
    optimizer = MADE["timm.madgrad"](model.parameters())
    make_state(optimizer, lambda value, p: value.clone())
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["x0"], parameter)
        assert optimizer.state[parameter]["x0"].data_ptr() != parameter.data_ptr()


class Recording(OPTIM.SGD):
    """Keeps an attribute of its own, and is watched by hooks."""

    def __init__(self, parameters):
        super().__init__(parameters, RATE, momentum=0.9)
        self.seen = []

    def step(self, closure=None):
        self.seen.append(len(self.param_groups))
        return super().step()


def test_a_trial_calls_no_hook_and_changes_nothing():
    calls = []
    of_all = register_optimizer_step_post_hook(lambda *given: calls.append("every"))
    optimizer = Recording(network().parameters())
    optimizer.register_step_pre_hook(lambda *given: calls.append("before"))
    optimizer.register_step_post_hook(lambda *given: calls.append("after"))
    with of_all:
        assert make_state(optimizer, lambda value, p: value)
    assert calls == [] and optimizer.seen == []
