"""The TPU compiler's report on small graphs, as JSON: python on_tpu_compiler.py FUNCTION..."""

import json
import os
import sys

os.environ.update(
    PJRT_DEVICE="CPU", JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)  # fmt: skip

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn

from tpukit.hardware.xla.lowerings import register_lowerings
from tpukit.hardware.xla.mesh import DeviceMesh
from tpukit.hardware.xla.ops import XlaOps, running
from tpukit.probe.compiler.compile import Program, TpuCompiler
from tpukit.probe.compiler.hlo import costs_of, scheduled_hlo

DEVICES = int(os.environ["CPU_NUM_DEVICES"])


def compiled(mesh, outputs, split):
    """The compiler's report; `split` are the tensors whose rows are split over the devices."""
    _, arguments = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
    handles = torch_xla._XLAC._get_tensors_handle
    by_rows = set(handles(split))
    layout = f"{{devices=[{DEVICES},1,1,1]<=[{DEVICES}]}}"
    shardings = tuple(
        layout if DEVICES > 1 and handle in by_rows else None for handle in handles(arguments)
    )
    program = Program(
        bytecode=xm.get_stablehlo_bytecode(outputs), aliases={}, argument_shardings=shardings,
        outputs=len(outputs), kernel_share=1.0, resident={}, resident_elsewhere=0,
    )  # fmt: skip
    executable = TpuCompiler("v5e:2x2", DEVICES).compile(program, "fast")
    described, text = costs_of(executable, kernel_share=0.0), scheduled_hlo(executable)
    return {
        "flops": described.flops,
        "temporaries": described.temporaries,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "gathers": text.count(" all-gather("),
        "sums": text.count(" all-reduce("),
    }


def recompute():
    """Four MLP blocks: without activation checkpointing, with it, and with it but no barriers."""
    mesh = DeviceMesh.open(shard=False)
    ops = XlaOps(1, fused=False)
    barrier = xm.optimization_barrier_
    reports = {}
    for how in ("as they are", "no barriers", "recomputed"):
        xm.optimization_barrier_ = barrier if how == "recomputed" else lambda tensors: None
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)) for _ in range(4))
        )
        mesh.place(model)
        hidden = mesh.send(torch.randn(4096, 512))
        for block in model:
            hidden = block(hidden) if how == "as they are" else ops.recompute(block, hidden)
        hidden.square().sum().backward()
        reports[how] = compiled(mesh, [p.grad for p in model.parameters()], [])
    return reports


def attention():
    """Causal attention, forward and backward: written out, in blocks, fused, torch's own."""
    from tpukit.hardware.xla import ops as xla_ops

    register_lowerings()
    mesh = DeviceMesh.open(shard=False)
    reports = {}
    for how in ("written out", "blocks", "fused", "torch's"):
        spmd_mesh = mesh.mesh if DEVICES > 1 else None
        ops = XlaOps(DEVICES, fused=how in ("fused", "torch's"), mesh=spmd_mesh)
        xla_ops.LARGEST_SCORES_BYTES = 2**40 if how == "written out" else 2**24
        inputs = [mesh.send(torch.randn(4, 8, 1024, 64), ("data", None, None, None))
                  for _ in range(3)]  # fmt: skip
        for tensor in inputs:
            tensor.requires_grad_()
        with torch.autocast("xla", dtype=torch.bfloat16), running(ops):
            if how == "torch's":
                found = F.scaled_dot_product_attention(*inputs, is_causal=True)
            else:
                found = ops.attention(*inputs, causal=True)
            found.float().square().sum().backward()
        reports[how] = compiled(mesh, [tensor.grad for tensor in inputs], inputs)
    return reports


def windows():
    """Attention in windows with a bias that learns: written out, fused."""
    mesh = DeviceMesh.open(shard=False)
    reports = {}
    for how in ("written out", "fused"):
        spmd_mesh = mesh.mesh if DEVICES > 1 else None
        ops = XlaOps(DEVICES, fused=how == "fused", mesh=spmd_mesh)
        inputs = [mesh.send(torch.randn(64, 8, 256, 32), ("data", None, None, None))
                  for _ in range(3)]  # fmt: skip
        bias = mesh.send(torch.randn(1, 8, 256, 256))
        for tensor in (*inputs, bias):
            tensor.requires_grad_()
        with torch.autocast("xla", dtype=torch.bfloat16):
            ops.attention(*inputs, bias).float().square().sum().backward()
        reports[how] = compiled(mesh, [tensor.grad for tensor in (*inputs, bias)], inputs)
    return reports


def addresses():
    """Arguments that a step's program writes over, where an overwritten tensor's address is that of
    an argument of another form: each pair, as positions of argument and output."""
    from tpukit.probe.compiler.trace import handles_of, open_tracing

    backend = open_tracing("bf16", shard=False, fused=False)
    small, large = (backend.placeholders.like(torch.ones(n)) for n in (4, 202))
    outputs = [large + small.sum(), large * 2]
    program = backend._program(outputs, handles_of([small, large]))
    _, arguments = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
    sizes = [argument.numel() for argument in arguments]
    return [[sizes[argument], output] for argument, output in program.aliases.items()]


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
