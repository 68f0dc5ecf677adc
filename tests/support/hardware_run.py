"""A 20-step training on a backend directly, without the engine: the reference loop of the tests.

python hardware_run.py OUT [--hw ...]: rank 0 writes its observations to OUT (torch.save).
"""

import argparse
from contextlib import nullcontext

import torch
from torch import nn

from tpukit.hardware.backend import OptimizerSettings, ParameterGroup
from tpukit.hardware.eager.compiling import uncompiled_passes
from tpukit.hardware.modules import exchange
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend

STEPS, ROWS = 20, 16


class Net(nn.Module):
    """Two residual blocks, with the first and the last weight tied, a 0-d parameter, and weights
    that no loss uses."""

    asks_for_unused = True

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 32, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(2)
        )
        self.leave = nn.Linear(32, 8)
        self.tied = nn.Linear(8, 32, bias=False)
        self.tied.weight = self.enter.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(8, 8, bias=False).requires_grad_(self.asks_for_unused)

    def forward(self, x):
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h)
        return self.leave(h + self.tied(x)) * self.scale


def batches(backend, accumulate):
    """This rank's rows of every micro-batch of every step."""
    for step in range(STEPS):
        x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
        for part in x.chunk(accumulate):
            own = part.chunk(backend.world_size)[backend.rank]
            yield {"x": own, "y": own.sin()}


def train(backend, accumulate=1, clip_norm=0.5):
    """The prepared model after 20 steps, the last step's loss and norm, compilations a step."""
    torch.manual_seed(0)
    model = backend.prepare(Net())
    trained = list(backend.unwrap(model).parameters())
    optimizer = backend.optimizer([ParameterGroup(trained, 1.0)], OptimizerSettings())
    source, seen, compiled = backend.batches(batches(backend, accumulate)), {}, []
    for _ in range(STEPS):
        parts = []
        for micro in range(accumulate):
            batch = next(source)
            first, last = micro == 0, micro == accumulate - 1
            with backend.micro_batch(model, first=first, last=last):
                with backend.autocast():
                    loss = (
                        (backend.call(model, nn.Module.__call__, batch["x"]) - batch["y"])
                        .float()
                        .square()
                        .sum()
                    )
                backend.backward(loss / ROWS)
                rows = torch.ones_like(batch["x"][:, 0]).sum()
                parts.append(torch.stack([loss.detach(), rows]))
        totals = backend.all_reduce_sum(torch.stack(parts).sum(0))
        norm = backend.step(optimizer, lr=1e-3, weight=totals[1] / ROWS, clip_norm=clip_norm)
        seen["last"] = torch.stack([totals[0] / totals[1], norm])
        backend.finish()
        compiled.append(backend.compilations())
    return model, optimizer, seen["last"], compiled


def shard_sizes(backend, model):
    """(elements of one device, elements of all) over all parameters with an axis."""
    cut = [p for p in model.parameters() if p.ndim]
    if backend.device.type == "xla":
        import torch_xla.core.xla_model as xm
        from torch_xla.distributed.spmd.xla_sharding import wrap_as_sharded_tensor

        xm.wait_device_ops()
        own = [wrap_as_sharded_tensor(p).local_shards[0].data for p in cut]
    else:
        own = [p.to_local() if hasattr(p, "to_local") else p for p in cut]
    return sum(t.numel() for t in own), sum(p.numel() for p in cut)


def join_alone(backend, shard):
    """Replicates or shards over a process group of this rank alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from tpukit.hardware.collectives import GlooCollectives
    from tpukit.hardware.eager import distributed
    from tpukit.hardware.eager.distributed import DDP, FSDP

    # DDP looks for unused parameters through pinned memory, which the CPU plugin lacks.
    distributed.DDP_OPTIONS = {**distributed.DDP_OPTIONS, "find_unused_parameters": False}
    Net.asks_for_unused = shard
    dist.init_process_group(backend.device.type)
    backend.collectives = GlooCollectives(1)
    mesh = init_device_mesh(backend.device.type, (1,))
    backend.parallelism = FSDP(mesh, backend.eager.place) if shard else DDP(backend.eager.place)


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("out")
    parse.add_argument("--hw", default="cpu")
    parse.add_argument("--devices", type=int)
    parse.add_argument("--accumulate", type=int, default=1)
    parse.add_argument("--precision", default="fp32")
    parse.add_argument("--shard", action="store_true")
    parse.add_argument("--alone", action="store_true", help="in a process group of one rank")
    parse.add_argument("--eager", action="store_true")
    parse.add_argument("--recorded", action="store_true", help="as within a program of torch_tpu")
    asked = parse.parse_args()
    backend = open_backend(
        HardwareOptions(
            hw=asked.hw, devices=asked.devices, precision=asked.precision, shard=asked.shard,
            compile=False if asked.eager else None,
        )
    )  # fmt: skip
    if asked.alone:
        join_alone(backend, asked.shard)
    with uncompiled_passes() if asked.recorded else nullcontext():
        model, optimizer, last, compiled = train(backend, asked.accumulate)
    sizes = shard_sizes(backend, model)
    parameters, plain = dict(backend.unwrap(model).named_parameters()), backend.unwrap(model)
    loss_and_norm = backend.to_host({"last": last})["last"].tolist()
    host = backend.to_host(parameters)
    # There and back again: what a checkpoint does.
    # Weights without a gradient have no state where a step makes it.
    trained = {name: p for name, p in parameters.items() if optimizer.state.get(p)}
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in trained.items()}
    kept = backend.to_host(moments)
    exchange(list(trained.values()), list(moments.values()))
    swapped = backend.to_host(trained)
    exchange(list(trained.values()), list(moments.values()))
    backend.load(moments, host)
    loaded = backend.to_host(moments)
    copied = len(backend.to_host(parameters, to_save=True))
    left = {
        "parameters": host,
        "copied": backend.all_gather_objects(copied),
        "loss_and_norm": loss_and_norm,
        "compilations": compiled,
        "compilations_after_reading": backend.compilations(),
        "shard_sizes": sizes,
        "shard_sizes_after_loading": shard_sizes(backend, model),
        "exchanged": all(torch.equal(swapped[n], kept[n]) for n in kept),
        "loaded": all(torch.equal(loaded[n], host[n]) for n in kept),
        "scaler": backend.all_gather_objects(backend.state()["scaler"]),
        "tied": plain.tied.weight is plain.enter.weight,
    }
    if backend.is_main:
        torch.save(left, asked.out)
    backend.close()


if __name__ == "__main__":
    main()
