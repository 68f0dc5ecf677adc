"""Which layers `--shard` gathers one by one, for every task and for the models of the zoo."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from no_dropout import without_dropout
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from zoo_models import Zoo, entries

from tpukit.errors import UsageError
from tpukit.hardware.backend import TorchOps
from tpukit.hardware.eager.distributed import FSDP, repeated_blocks
from tpukit.tasks.eit.task import TRAINING, EITTask
from tpukit.tasks.images.task import ImagesTask
from tpukit.tasks.summarize.model.decoder import DecoderConfig, LanguageModel
from tpukit.tasks.summarize.model.lora import LoraConfig, add_lora

ENTRIES = entries()
CALLS_FORWARD = {"timm-hrnet"}
"""Models that call `layer.forward(x)`: hooks do not run."""
NAMES = [
    pytest.param(name, marks=() if entry.quick else pytest.mark.slow)
    for name, entry in ENTRIES.items()
]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def with_lora(model):
    add_lora(model, LoraConfig(2, 16.0, ("qkv",)))
    return model


MODELS = {
    **{f"eit-{size}": lambda size=size: EITTask(size=size).build_model(TorchOps())
       for size in TRAINING},
    **{f"images-{name}": lambda name=name: ImagesTask(model=name, class_names=["a", "b"])
       .build_model(TorchOps()) for name in ("convnext_tiny", "resnet10t", "test_convnext")},
    "summarize-gpt2": lambda: LanguageModel(DecoderConfig(), TorchOps()),
    "summarize-lora": lambda: with_lora(LanguageModel(DecoderConfig(layers=2), TorchOps())),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_every_task_have_a_forward_pass_and_a_sibling(name):
    model = MODELS[name]()
    blocks = repeated_blocks(model)
    assert not any(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for block in blocks)
    kinds = [type(block) for block in blocks]
    assert all(kinds.count(kind) > 1 for kind in kinds)
    # Else every weight would be gathered at once.
    assert len(blocks) >= {"eit": 5, "summarize": 2}.get(name.partition("-")[0], 0)


def loss_and_gradients(model, task, batch):
    torch.manual_seed(0)
    np.random.seed(0)
    with without_dropout(model):
        loss = task.loss(model, dict(batch))["loss"].sum()
        loss.backward()
    return loss.item(), {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def assert_same_step(task, batch, mesh):
    torch.manual_seed(0)
    model = task.build_model(TorchOps())
    expected = loss_and_gradients(copy.deepcopy(model), task, batch)
    sharded = FSDP(mesh)
    prepared = sharded.prepare(model, train=True)
    assert isinstance(prepared, FSDPModule)
    found = sharded.call(prepared, loss_and_gradients, task, batch)
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_the_zoo_computes_the_same_in_shards(name, mesh):
    task = Zoo(ENTRIES[name])
    (batch,) = task.example_batches(2)
    if name in CALLS_FORWARD:
        with pytest.raises(UsageError, match="does not call"):
            assert_same_step(task, batch, mesh)
        return
    assert_same_step(task, batch, mesh)


def test_eit_computes_the_same_in_shards(mesh):
    task = EITTask(size="tiny")
    rng = np.random.default_rng(0)
    (batch,) = task.example_batches(1)
    batch["noise"] = torch.from_numpy(rng.standard_normal(batch["noise"].shape, np.float32))
    assert_same_step(task, batch, mesh)


def test_a_gradient_of_a_gradient_is_refused_by_name_and_one_alone_is_not(mesh):
    prepared = FSDP(mesh).prepare(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), train=True)
    x = torch.ones(2, 3, requires_grad=True)
    [found] = torch.autograd.grad(prepared(x).sum(), x)
    assert found.abs().sum() > 0
    with pytest.raises(UsageError, match="gradient of a gradient"):
        torch.autograd.grad(prepared(x).sum(), x, create_graph=True)
