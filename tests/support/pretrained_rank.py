"""A rank that reads pretrained weights with `--shard`: python pretrained_rank.py FOLDER RANKS.

The main rank prints as JSON whether all weights are those that are read at once, and the largest
rank's memory above what its process held before: `peak`, beside its `share`, in bytes.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig

from tpukit.hardware.modules import local
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend
from tpukit.tasks.llm.model.load import load_lm, shape_of


def memory(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def lm_of(folder: Path) -> nn.Module:
    shape = shape_of(AutoConfig.from_pretrained(folder), 64)
    return load_lm(shape, torch.float32, folder=folder)


folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
backend = open_backend(HardwareOptions(hw="cpu", devices=ranks, shard=True))
backend.prepare(lambda: lm_of(folder / "small"))  # imports what it needs
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
model = backend.prepare(lambda: lm_of(folder / "large"))
peak = memory("VmHWM") - before
share = sum(local(parameter).nbytes for parameter in model.parameters())
peaks = backend.all_gather_objects(peak)
whole = backend.to_host(dict(model.named_parameters()))
if backend.is_main:
    expected = dict(lm_of(folder / "large").named_parameters())
    equal = whole.keys() == expected.keys() and all(
        torch.equal(whole[name], expected[name]) for name in expected
    )
    print(json.dumps({"equal": equal, "peak": max(peaks), "share": share}))
backend.close()
