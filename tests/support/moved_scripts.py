"""Scripts for torch_xla in the style of public examples; each ends with the device's kind."""

SCRIPTS = {
    "single_core": """\
'''MNIST-like training on one TPU core.'''
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm


def train_epoch(model, device, loader, optimizer, epoch):
    model.train()
    for step, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        xm.optimizer_step(optimizer, barrier=True)
        if step % 4 == 0:
            xm.mark_step()
    xm.master_print(f"epoch {epoch} loss {loss.item():.4f}")
    return loss.item()


def main():
    torch.manual_seed(0)
    device = xm.xla_device()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=16, drop_last=True)
    losses = [train_epoch(model, device, loader, optimizer, e) for e in range(3)]
    assert losses[-1] < losses[0]
    print("done", device.type)


if __name__ == "__main__":
    main()
""",
    "launched": """\
'''A small transformer layer in bf16, launched over every core.'''
import os

import torch
import torch_xla
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch_xla.core import xla_model as xm

os.environ.setdefault("PJRT_DEVICE", "TPU")


def _mp_fn(index, flags):
    torch_xla.manual_seed(flags["seed"])
    device = torch_xla.device()
    model = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, world = xr.global_ordinal(), xr.world_size()
    for step in range(flags["steps"]):
        batch = torch.randn(8, 16, 32, device=device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("xla", dtype=torch.bfloat16):
            loss = (model(batch) - batch).pow(2).mean()
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        if xm.is_master_ordinal() and step % 2 == 0:
            print(f"rank {rank} of {world} step {step}")
    xm.wait_device_ops()
    print("done", loss.device.type)


if __name__ == "__main__":
    xmp.spawn(_mp_fn, args=({"seed": 1, "steps": 4},), nprocs=None)
""",
    "checkpointed": """\
'''A convolution with activation checkpointing, its step compiled.'''
import torch
from torch_xla import device as get_device, sync
from torch_xla.amp import autocast
from torch_xla.utils.checkpoint import checkpoint
import torch_xla as tx

device = get_device()
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(),
                            torch.nn.Conv2d(8, 3, 3, padding=1))
model = model.to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step(images):
    optimizer.zero_grad()
    with autocast(device):
        out = checkpoint(model, images, use_reentrant=False)
    loss = (out.float() - images).abs().mean()
    loss.backward()
    optimizer.step()
    sync()
    return loss


first = None
for _ in range(5):
    loss = step(torch.ones(2, 3, 8, 8).to(device=device))
    first = loss.item() if first is None else first
assert loss.item() < first
print("done", loss.device.type)
""",
}
