"""Activations of a training step: what autograd saves beside what the TPU compiler allocates.

    python benchmarks/activation_memory.py [--models resnet50 vit_base_patch16_224]

Two figures for each model of timm, in bytes a sample, that share no code: the storages that plain
PyTorch saves for the backward pass (bf16 autocast on the CPU, attention written out), and the
temporaries of the step that `tpukit probe-batch --target v5e-1` compiles. Both are slopes between
two batches far from the memory limit, where the compiler recomputes nothing for want of memory.
A TPU's memory holds matrices in whole tiles, 8 rows of 128 columns of 4 bytes: the saved storages
are given in tiles too where rows are as long as one (197 x 197 attention scores become 200 x 256).
The compiler lays out shorter rows, those of a convolution's images, by channels.
"""

import argparse
import json
import math
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deciding_code import write_result

RESULT = Path(__file__).parent / "results" / "activation_memory.json"
MODELS = ("resnet50", "vit_base_patch16_224")
SAVED_AT, COMPILED_AT = (2, 4), (32, 64)
TARGET = "v5e-1"
TILE_ROWS, TILE_COLUMNS = 8, 128


def saved_bytes(name: str, batch: int) -> tuple[int, int]:
    """Bytes of the storages that autograd saves, without parameters: as they are, in tiles."""
    import timm
    import torch
    from torch.nn.functional import cross_entropy

    timm.layers.set_fused_attn(enable=False)
    model = timm.create_model(name).train()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            # Held, so that its address is not given to another.
            saved.setdefault(address, (tensor.untyped_storage(), tensor.shape, tensor.itemsize))
        return tensor

    # bf16 copies of the weights are saved as well; they do not grow with the batch.
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        scores = model(torch.zeros(batch, 3, 224, 224))
        loss = cross_entropy(scores.float(), torch.zeros(batch, dtype=torch.int64))
    assert loss.requires_grad
    plain = sum(storage.nbytes() for storage, _, _ in saved.values())
    padded = sum(storage.nbytes() * padding(*rest) for storage, *rest in saved.values())
    return plain, round(padded)


def padding(shape: Sequence[int], itemsize: int) -> float:
    """How much larger a tensor is in whole tiles."""
    if len(shape) < 2 or shape[-1] < TILE_COLUMNS:
        return 1.0
    tile = (TILE_ROWS * 4 // itemsize, TILE_COLUMNS)
    whole = [math.ceil(size / side) * side for size, side in zip(shape[-2:], tile, strict=True)]
    return math.prod(whole) / math.prod(shape[-2:])


def compiled_bytes(name: str, batch: int) -> tuple[int]:
    """Bytes of temporaries in the compiled training step."""
    from tpukit.probe.trials.evaluators import COMPILER_ENVIRONMENT

    os.environ.update(COMPILER_ENVIRONMENT, CPU_NUM_DEVICES="1")
    from tpukit.probe.compiler.compiled_trial import CompiledTrials
    from tpukit.probe.targets import find_target
    from tpukit.probe.trial import TrialRequest
    from tpukit.registry.classes import load_task
    from tpukit.train.config import TrainConfig

    task = load_task("images", {"model": name}, "")
    trials = CompiledTrials(task, TrainConfig(), find_target(TARGET))
    trial = trials.run(TrialRequest(batch, evaluate=False))
    assert trial.memory is not None, trial.error
    return (trial.memory["temporaries"],)


def slopes(figures: Any, name: str, batches: tuple[int, int]) -> list[float]:
    """Growth of figures a sample; each batch in a process of its own."""
    context = multiprocessing.get_context("spawn")
    found = []
    for batch in batches:
        with context.Pool(1) as pool:
            found.append(pool.apply(figures, (name, batch)))
    return [(b - a) / (batches[1] - batches[0]) for a, b in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    options = parser.parse_args()
    from tpukit.probe.compiler.client import find_client

    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {"models": {}}
    kept.update(target=TARGET, saved_at=SAVED_AT, compiled_at=COMPILED_AT,
                versions=dict(find_client().versions))  # fmt: skip
    for name in options.models:
        saved, in_tiles = slopes(saved_bytes, name, SAVED_AT)
        [compiled] = slopes(compiled_bytes, name, COMPILED_AT)
        kept["models"][name] = {"saved": saved, "saved_in_tiles": in_tiles, "compiled": compiled}
        print(name, kept["models"][name], flush=True)
        write_result(RESULT, kept)


if __name__ == "__main__":
    main()
