"""The processor's own kernels against torch's operations, at the full-width EIT network's shapes.

    python benchmarks/cpu_kernels.py --out benchmarks/results/cpu_kernels.json

bf16, batch 2, both sides in turn, the best of several rounds, the caches full of something else
before each call, as they are within a network. Linear maps run as in sampling: under one autocast
context, so that torch casts a weight once while the kernel packs it at each call.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from eit_speed import processor
from torch import Tensor

from tpukit.hardware import cpu_attention, cpu_linear

HEADS, HEAD_WIDTH, WIDTH = 16, 32, 512
OTHER_BYTES = 2**27
"""More than the caches hold."""
Work = Callable[[], object]


def heads_of(rows: int, tokens: int) -> list[Tensor]:
    """Queries, keys and values as a projection of tokens gives them."""
    parts = torch.randn(rows, tokens, 3, HEADS, HEAD_WIDTH).bfloat16().unbind(2)
    return [part.transpose(1, 2).requires_grad_() for part in parts]


def attentions(rows: int, tokens: int, *, biased: bool) -> dict[str, tuple[Work, Work, float]]:
    """Forward without gradients, and forward and backward: kernel, torch, operations."""
    inputs = heads_of(rows, tokens)
    bias = torch.randn(1, HEADS, tokens, tokens, requires_grad=True) if biased else None
    direction = torch.randn(rows, HEADS, tokens, HEAD_WIDTH).bfloat16()

    def by_kernel() -> Tensor:
        found = cpu_attention.attention(*inputs, bias)
        assert found is not None, "needs AVX512-BF16 and a C++ compiler"
        return found

    def by_torch() -> Tensor:
        mask = None if bias is None else bias.bfloat16()
        return F.scaled_dot_product_attention(*inputs, mask)

    def both_ways(forward: Callable[[], Tensor]) -> Work:
        wanted = [*inputs, *([] if bias is None else [bias])]
        return lambda: torch.autograd.grad(forward(), wanted, direction)

    name = f"attention, {rows} x {tokens} tokens" + (", bias" if biased else "")
    product = 2 * rows * HEADS * tokens**2 * HEAD_WIDTH
    return {
        name: (torch.no_grad()(by_kernel), torch.no_grad()(by_torch), 2 * product),
        f"{name}, and backward": (both_ways(by_kernel), both_ways(by_torch), 7 * product),
    }


def linear_maps(tokens: int) -> dict[str, tuple[Work, Work, float]]:
    """The maps to queries, keys and values, and the perceptron: kernel, torch, operations."""
    x = torch.randn(1, tokens, WIDTH).bfloat16()
    joint = torch.nn.Linear(WIDTH, 3 * WIDTH)
    first, second = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
    return {
        f"linear map, {tokens} tokens": (
            lambda: cpu_linear.linear(x, joint), lambda: joint(x), 6 * tokens * WIDTH**2
        ),
        f"perceptron, {tokens} tokens": (
            lambda: cpu_linear.silu_mlp(x, first, second),
            lambda: second(F.silu(first(x))),
            16 * tokens * WIDTH**2,
        ),
    }  # fmt: skip


def best_of(work: tuple[Work, Work], rounds: int) -> tuple[float, float]:
    """Seconds of each side, in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    others = torch.zeros(OTHER_BYTES, dtype=torch.uint8)
    for _ in range(1 + rounds):
        for side, taken in zip(work, seconds, strict=True):
            others.add_(1)
            started = time.perf_counter()
            side()
            taken.append(time.perf_counter() - started)
    return min(seconds[0][1:]), min(seconds[1][1:])


def measure(rounds: int) -> dict[str, dict[str, float]]:
    found = {}
    works = {**attentions(2, 4096, biased=False), **attentions(32, 256, biased=True)}
    with torch.autocast("cpu", torch.bfloat16):
        for name, (kernel, by_torch, operations) in works.items():
            found[name] = figures(best_of((kernel, by_torch), rounds), operations)
        with torch.no_grad():
            for name, (kernel, by_torch, operations) in linear_maps(8192).items():
                found[name] = figures(best_of((kernel, by_torch), rounds), operations)
    return found


def figures(seconds: tuple[float, float], operations: float) -> dict[str, float]:
    kernel, by_torch = seconds
    return {
        "kernel_ms": 1e3 * kernel,
        "torch_ms": 1e3 * by_torch,
        "kernel_over_torch": kernel / by_torch,
        "kernel_gflops": operations / kernel / 1e9,
        "torch_gflops": operations / by_torch / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    report = {
        "hardware": processor(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "kernels": measure(options.rounds),
    }
    text = json.dumps(report, indent=2)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
