"""Which layers `--shard` gathers one by one, for every task and for the models of the zoo."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from no_dropout import without_dropout
from runs import script
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from zoo_models import Zoo, entries

from tpukit.errors import UsageError
from tpukit.hardware.backend import TorchOps
from tpukit.hardware.eager.distributed import FSDP, repeated_blocks, split_mixed_groups
from tpukit.tasks.eit.task import TRAINING, EITTask
from tpukit.tasks.images.task import ImagesTask
from tpukit.tasks.llm.task import SummarizeTask
from tpukit.train.task import PlanSettings

ENTRIES = entries()
CALLS_FORWARD = {"timm-hrnet"}
"""Models that call `layer.forward(x)`: hooks do not run."""
STRIDES_OVER_ONE_PIXEL = {"timm-selecsls"}
"""Models whose images end as one pixel: torch 2.9's convolution of stride 2 over it leaves parts of
the weight's gradient unwritten in bf16 on the CPU, as MALLOC_PERTURB_=128 shows."""
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


def summarizer(**settings):
    task = SummarizeTask(init="scratch", **settings).for_probing()
    return task.build_model(TorchOps())


MODELS = {
    **{f"eit-{size}": lambda size=size: EITTask(size=size).build_model(TorchOps())
       for size in TRAINING},
    **{f"images-{name}": lambda name=name: ImagesTask(model=name, classes=2)
       .build_model(TorchOps()) for name in ("convnext_tiny", "resnet10t", "test_convnext")},
    "summarize-gpt2": lambda: summarizer(model="3x2x64"),
    "summarize-lora": lambda: summarizer(model="3x2x64", lora_rank=2),
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


def assert_same_step_in_bf16(task, mesh):
    """To the bit: what autocast has in half precision is gathered so, and nothing else."""
    (batch,) = task.probe_batches(PlanSettings(2, 2, 1, 0))
    torch.manual_seed(0)
    model = task.build_model(TorchOps())
    sharded = FSDP(mesh, half=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_gradients(copy.deepcopy(model), task, batch)
        prepared = sharded.prepare(model, train=True)
        found = sharded.call(prepared, loss_and_gradients, task, batch)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
    assert {p.dtype for p in prepared.parameters() if p.is_floating_point()} == {torch.float32}
    return prepared


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
    (batch,) = task.probe_batches(PlanSettings(2, 2, 1, 0))
    if name in CALLS_FORWARD:
        with pytest.raises(UsageError, match="not called"):
            assert_same_step(task, batch, mesh)
        return
    assert_same_step(task, batch, mesh)
    if name in STRIDES_OVER_ONE_PIXEL:
        task = Zoo(dataclasses.replace(ENTRIES[name], side=64))
    assert_same_step_in_bf16(task, mesh)


def test_eit_computes_the_same_in_shards(mesh):
    task = EITTask(size="tiny")
    rng = np.random.default_rng(0)
    (batch,) = task.probe_batches(PlanSettings(1, 1, 1, 0))
    batch["noise"] = torch.from_numpy(rng.standard_normal(batch["noise"].shape, np.float32))
    assert_same_step(task, batch, mesh)


def test_a_gradient_of_a_gradient_is_refused_by_name_and_one_alone_is_not(mesh):
    prepared = FSDP(mesh).prepare(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), train=True)
    x = torch.ones(2, 3, requires_grad=True)
    [found] = torch.autograd.grad(prepared(x).sum(), x)
    assert found.abs().sum() > 0
    with pytest.raises(UsageError, match="gradient of a gradient"):
        torch.autograd.grad(prepared(x).sum(), x, create_graph=True)


class Layers(nn.Module):
    """Two layers, with tied matrices, one that is frozen, and one that no loss uses; and whole
    numbers as a parameter."""

    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.order = nn.Parameter(torch.arange(20), requires_grad=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                          nn.Linear(2 * width, width))
            for _ in range(2)
        )  # fmt: skip
        self.blocks[0][1].weight.requires_grad_(False)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(width, width)

    def forward(self, x):
        h = self.embedding(self.order[x])
        for block in self.blocks:
            h = h + (checkpoint(block, h, use_reentrant=False) if self.training else block(h))
        return self.head(h)


class Next(Zoo):
    """The next of a few numbers."""

    def __init__(self):
        pass

    def build_model(self, ops):
        return Layers()

    def probe_batches(self, settings):
        rows = settings.micro_rows
        return [{"x": torch.arange(8 * rows).view(rows, 8) % 20}]

    def loss(self, model, batch):
        scores = model(batch["x"]).float().flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(scores, (batch["x"].flatten() + 1) % 20)}


def test_tied_frozen_and_recomputed_layers_are_the_same_in_half_precision(mesh):
    prepared = assert_same_step_in_bf16(Next(), mesh)
    norms = [m.weight for m in prepared.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 2 and not any(isinstance(weight, DTensor) for weight in norms)
    x = torch.arange(8).view(1, 8)
    prepared.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert prepared(x).isfinite().all()
    # Back in shards, in fp32.
    assert isinstance(prepared.blocks[1][1].weight, DTensor)


class Both(torch.optim.SGD):
    """Two optimizers as one, whose groups are a list that is made when it is asked for."""

    param_groups = property(lambda self: [*self.one, *self.other], lambda self, value: None)

    def __init__(self, one, other):
        self.one, self.other, self.defaults = one.param_groups, other.param_groups, {}


def test_an_optimizer_that_loses_the_groups_of_whole_weights_is_refused(mesh):
    weights = [distribute_tensor(torch.ones(2, 2), mesh), torch.ones(2)]
    optimizer = torch.optim.SGD(map(nn.Parameter, weights), 0.1)
    split_mixed_groups(optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    one, other = (torch.optim.SGD(map(nn.Parameter, weights), 0.1) for _ in range(2))
    with pytest.raises(UsageError, match="Both loses a group"):
        split_mixed_groups(Both(one, other))


class Turn(nn.Module):
    """Weights of two types."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(64, dtype=torch.complex64))
        self.out = nn.Linear(64, 20).double()

    def forward(self, h):
        return self.out((h * self.turn).real.double())


class Types(Next):
    """Trained weights of three types in one group."""

    def build_model(self, ops):
        model = super().build_model(ops)
        model.head = Turn()
        return model


def test_weights_of_several_types_are_trained_in_shards(mesh):
    assert_same_step(Types(), Types().probe_batches(PlanSettings(2, 2, 1, 0))[0], mesh)


def test_weights_in_half_precision_are_not_used_in_fp32(mesh):
    sharded = FSDP(mesh, half=torch.bfloat16)
    prepared = sharded.prepare(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), train=True)
    with pytest.raises(UsageError, match="gathered in half precision"):
        sharded.call(prepared, nn.Module.__call__, torch.ones(2, 3))


def test_no_half_copies_of_sharded_weights_are_kept_for_the_backward_pass(tmp_path):
    """On two ranks: against DDP, which keeps them, with its loss and gradients."""
    done = script("kept_halves.py", tmp_path / "found.pt", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    shards, copies, exact = torch.load(tmp_path / "found.pt")
    assert copies["kept"] > 0.9 * 2 * copies["weights"]
    assert shards["kept"] < 0.1 * copies["kept"]
    # Once a layer, in bf16.
    assert shards["gathered"] == 2 * shards["weights"]
    assert shards["loss"] == copies["loss"] == pytest.approx(exact["loss"], rel=2**-8)
    torch.testing.assert_close(shards["gradients"], copies["gradients"], rtol=1e-5, atol=1e-6)
