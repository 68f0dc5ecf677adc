"""The child of `device_trials.KERNELS`: each, forward and backward, against plain operations.

Each answer has the relative errors found, the place that comes next and, where that is the last,
the reason why the kernels do not work.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpukit.hardware.device_trials import answer_parent
from tpukit.hardware.kernels.flash_attention import plain_attention
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend

LARGEST_ERROR = 0.03
"""Maximum relative error of a whole tensor: rounding to bf16, which a TPU also does to factors in
fp32, gives 0.01, a tile that is left out 0.1 and more."""
RESULTS = ("output", "query's gradient", "key's gradient", "value's gradient", "bias' gradient")


@dataclass(frozen=True)
class Case:
    """One form of the kernels, with several tiles or several rows a step of their grid."""

    causal: bool
    bias: bool
    tokens: int
    rows: int
    """A device."""
    packed: bool = False
    """Rows hold two samples each."""


CASES = {
    "attention": Case(causal=False, bias=False, tokens=384, rows=1),
    "causal attention": Case(causal=True, bias=False, tokens=384, rows=1),
    "windowed attention with a bias": Case(causal=False, bias=True, tokens=128, rows=4),
    "causal attention with a bias": Case(causal=True, bias=True, tokens=256, rows=1),
    "attention of packed rows": Case(causal=True, bias=False, tokens=384, rows=2, packed=True),
}
HEADS, WIDTH = 2, 32
SECOND = 200
"""Token at which the second sample of a packed row begins."""


def answers(options: HardwareOptions) -> Iterator[dict[str, Any]]:
    """What the parent reads: the first answer says that the device has opened."""
    backend: Any = open_backend(options)
    if not backend.fused:
        yield _answer("", "the runtime reports another device")
        return
    names = [*CASES, ""]
    yield _answer(names[0])
    for name, following in zip(CASES, names[1:], strict=True):
        try:
            errors = compare(backend, CASES[name])
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            yield _answer("", f"{name}: {text[:200]}")
            return
        kept = {f"{name}: {part}": error for part, error in errors.items()}
        wrong = [f"{n} differs by {e:.2g}" for n, e in kept.items() if not e <= LARGEST_ERROR]
        yield _answer("" if wrong else following, wrong[0] if wrong else "", kept)
        if wrong:
            return


def _answer(
    following: str, reason: str = "", errors: dict[str, float] | None = None
) -> dict[str, Any]:
    return {"next": following, "reason": reason, "errors": errors or {}}


def compare(backend: Any, case: Case) -> dict[str, float]:
    """The relative error of the output and of each gradient; the plain form computes in fp32."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.rows * backend.devices, HEADS, case.tokens, WIDTH)
    host = [torch.randn(shape, generator=generator) for _ in range(4)]
    if case.bias:
        host.append(torch.randn(1, HEADS, case.tokens, case.tokens, generator=generator))
    with backend.autocast():
        found = _results(backend, backend.attention, host, case)
    with backend.autocast("fp32"):
        expected = _results(backend, plain_attention, host, case)
    return {
        name: float((one - other).norm() / other.norm())
        for name, one, other in zip(RESULTS, found, expected, strict=False)
    }


def _results(backend: Any, attention: Any, host: list[Tensor], case: Case) -> list[Tensor]:
    """Output and gradients of query, key, value and bias, on the host."""
    rows, _, tokens, _ = host[0].shape
    starts = (torch.arange(tokens) >= SECOND).long().mul(SECOND).expand(rows, -1)
    sent = {str(index): tensor for index, tensor in enumerate(host)}
    sent |= {"starts": starts.contiguous()} if case.packed else {}
    [batch] = backend.batches([sent])
    packed = {"starts": batch.pop("starts")} if case.packed else {}
    way, *inputs = batch.values()
    for tensor in inputs:
        tensor.requires_grad_()
    output = attention(*inputs, causal=case.causal, **packed)
    backend.backward((output.float() * way).sum())
    results = [output, *(tensor.grad for tensor in inputs)]
    named = {str(index): tensor.detach().float() for index, tensor in enumerate(results)}
    return list(backend.to_host(named).values())


if __name__ == "__main__":
    sys.exit(answer_parent(answers, sys.argv[1:], kernels="on", step_mode="traced"))
