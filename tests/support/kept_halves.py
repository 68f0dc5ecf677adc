"""A step with FSDP in bf16, one with DDP, and one with it in fp32: python kept_halves.py OUT.

Rank 0 writes for each: loss, gradients, bytes in bf16 that the backward pass keeps, and that the
forward pass gathered.
"""

import sys

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpukit.hardware.eager.distributed import DDP
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend

WIDTH, LAYERS, ROWS = 256, 4, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Gathered(TorchDispatchMode):
    """Adds up the bytes that gathers give."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_allgather_base_" in str(func):
            self.total += args[0].nbytes
        return func(*args, **(kwargs or {}))


def step(backend, precision="bf16"):
    torch.manual_seed(0)
    model = backend.prepare(Net())
    x = torch.randn(2 * ROWS, WIDTH)[backend.rank :: 2]
    kept = {}

    def keep(tensor):
        if tensor.dtype == torch.bfloat16:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with backend.micro_batch(model, first=True, last=True) as backward:
        with backend.autocast(precision), hooks, Gathered() as gathered:
            loss = backend.call(model, nn.Module.__call__, x).float().square().mean()
        # Those that FSDP frees are empty now.
        total = sum(storage.nbytes() for storage in kept.values())
        backward(loss)
    parameters = dict(backend.unwrap(model).named_parameters())
    return {
        "loss": float(backend.all_reduce_sum(torch.stack([loss.detach()]))[0]),
        "kept": total,
        "gathered": gathered.total,
        "weights": sum(p.numel() for n, p in parameters.items() if n.split(".")[2] == "1"),
        "gradients": backend.to_host({n: p.grad for n, p in parameters.items()}),
    }


backend = open_backend(HardwareOptions(hw="cpu", devices=2, precision="bf16", shard=True))
shards = step(backend)
backend.parallelism = DDP(lambda model: model)
copies, exact = step(backend), step(backend, "fp32")
if backend.is_main:
    torch.save((shards, copies, exact), sys.argv[1])
backend.close()
