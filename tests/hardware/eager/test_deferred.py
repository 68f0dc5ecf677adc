"""Models whose large tensors are made later have the bits of those that are made at once."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tpukit.hardware.eager import deferred as module
from tpukit.hardware.eager.deferred import CannotDeferError, deferred
from tpukit.hardware.eager.distributed import FSDP


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A tensor is large from 64 values on."""
    monkeypatch.setattr(module, "LEAST_VALUES", 64)


class Net(nn.Module):
    """What constructors do: ties, buffers, weights drawn twice, views, matrices, arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(30, 40), nn.Linear(40, 30)
        self.words, self.head = nn.Embedding(50, 30), nn.Linear(30, 50, bias=False)
        self.head.weight = self.words.weight
        self.square = nn.Parameter(torch.randn(16, 16) * 0.02)
        self.scale = nn.Parameter(torch.tensor(2.0))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)  # deep copies
        self.register_buffer("mask", torch.full((20, 20), float("-inf")).triu(1))
        self.apply(self.draw)
        nn.init.orthogonal_(self.square)
        with torch.no_grad():
            self.enter.weight[:5].zero_()
            self.words.weight[0].normal_()
            nn.init.trunc_normal_(self.enter.weight[5:9], generator=torch.Generator())
            if not self.square.is_meta:  # as nn.init of torch 2.13 asks
                self.square.mul_(2)
            if self.square.device.type != "meta" and self.square.is_cpu:
                self.square += torch.ones(16, device=self.square.device)
            self.leave.weight.copy_(self.enter.weight.t() + self.leave.weight)
        self.low = nn.Linear(16, 16).bfloat16()
        own = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.rand(10, 10, generator=own))
        torch.set_default_dtype(torch.float64)
        self.precise = nn.Parameter(torch.ones(10, 10))
        torch.set_default_dtype(torch.float32)

    def draw(self, part):
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(part.weight, std=0.02)

    def forward(self, x):
        return self.leave(self.enter(x))


def seeded():
    torch.manual_seed(3)
    return Net()


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_each_tensor_has_the_bits_of_one_that_was_made_at_once():
    whole, following = seeded(), torch.rand(3)
    model, later = deferred(seeded)
    expected, found = tensors(whole), tensors(model)
    unfilled = {name for name, tensor in found.items() if tensor.is_meta}
    assert unfilled >= {"enter.weight", "words.weight", "square", "mask", "low.weight"}
    assert not unfilled & {"scale", "enter.bias"}
    for name in sorted(expected, reverse=True):  # in any order
        value = later.value(found[name]) if name in unfilled else found[name]
        assert torch.equal(value, expected[name]) and value.dtype == expected[name].dtype, name
    assert torch.equal(torch.rand(3), following)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_fsdp_makes_them_in_their_places(tmp_path, half):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        fsdp = FSDP(init_device_mesh("cpu", (1,)), half=half)
        model = fsdp.prepare(fsdp.make(seeded), train=True)
        expected, found = tensors(seeded()), tensors(model)
        assert model.head.weight is model.words.weight
        assert any(isinstance(tensor, DTensor) for tensor in found.values())
        assert all(torch.equal(fsdp.whole(found[name]), expected[name]) for name in expected)
    finally:
        dist.destroy_process_group()


def reads_a_value():
    net = seeded()
    if net.enter.weight.std() > 1:  # only a tensor that is there says so
        raise AssertionError
    return net


def writes_on_a_thread():
    net = seeded()
    thread = threading.Thread(target=net.enter.weight.data.zero_)
    thread.start()
    thread.join()
    return net


def keeps_an_attribute():
    net = seeded()
    net.kept = [torch.ones(100)]
    return net


def draws_by_values():
    net = seeded()
    net.enter.weight.data.copy_(torch.poisson(net.leave.weight.data.t().abs()))
    return net


@pytest.mark.parametrize(
    "make", [reads_a_value, writes_on_a_thread, keeps_an_attribute, draws_by_values]
)
def test_what_cannot_be_made_later_is_made_at_once(make):
    model, later = deferred(make)
    assert later is None
    expected = tensors(make())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(model).items())


def test_what_has_changed_since_is_not_made_of_it():
    source = torch.ones(10, 10)

    def make():
        model = nn.Linear(10, 10)
        model.weight.data.copy_(source)
        return model

    model, later = deferred(make)
    assert torch.equal(later.value(model.weight), source)
    source.add_(1)
    with pytest.raises(CannotDeferError, match="changed since"):
        later.value(model.weight)
