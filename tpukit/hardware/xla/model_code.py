"""What a model's code meets while a step of it is traced: no value is there to be looked at.

Libraries ask `torch.compiler.is_compiling()` and leave out what would look (transformers for its
masks); a check whether values are finite is answered without looking; attention is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpukit.hardware.xla.ops import XlaOps

RUNNING: ContextVar[XlaOps | None] = ContextVar("RUNNING", default=None)
"""The backend whose model runs."""


class FiniteCheck(Tensor):
    """Which values are finite (or infinite, or NaN), and the constant answer to `if` and `not`.

    A traced step has no branches: DETR, which clamps its activations where one is infinite, does
    without. The engine looks at the loss itself.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    answer: bool

    def all(self, *how: Any, **named: Any) -> Tensor:
        return _answering(super().all(*how, **named), self.answer)

    def any(self, *how: Any, **named: Any) -> Tensor:
        return _answering(super().any(*how, **named), self.answer)

    def __bool__(self) -> bool:
        return self.answer


def _answering(found: Tensor, answer: bool) -> Tensor:
    if found.device.type != "xla":
        return found
    check = found.as_subclass(FiniteCheck)
    check.answer = answer
    return check


def _check(function: Callable[[Tensor], Tensor], answer: bool) -> Callable[[Tensor], Tensor]:
    return lambda values: _answering(function(values), answer)


REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (torch.compiler, "_is_compiling_flag", True),
    (torch, "_check_tensor_all", lambda *_: None),
    (torch, "isfinite", _check(torch.isfinite, True)),
    (torch, "isinf", _check(torch.isinf, False)),
    (torch, "isnan", _check(torch.isnan, False)),
)


@contextmanager
def running(ops: XlaOps) -> Iterator[None]:
    """Around a model's forward and backward passes: they are traced on `ops`."""
    before = [getattr(owner, name) for owner, name, _ in REPLACED]
    token = RUNNING.set(ops)
    try:
        for owner, name, value in REPLACED:
            setattr(owner, name, value)
        # A second thread numbers its own nodes: second derivatives would add up in another order
        # in each step, which is another graph.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        RUNNING.reset(token)
        for (owner, name, _), value in zip(REPLACED, before, strict=True):
            setattr(owner, name, value)


def attention_under_autocast(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's attention in autocast's dtype, as on a GPU: rotary embeddings leave query and key in
    float32 beside a value in bf16. Without a mask and drop-out by the backend's kernel, where it
    takes the shapes and `sdpa_kernel` does not ask for the formula (the kernel has no second
    derivatives)."""
    dtype = torch.get_autocast_dtype("xla")
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    ops = RUNNING.get()
    plain = attn_mask is None and not dropout_p and query.ndim == key.ndim == 4
    if ops is not None and plain and _flash_allowed():
        keys, values = (_for_all_heads(t, query) if enable_gqa else t for t in (key, value))
        alike = query.shape[:2] == keys.shape[:2] and keys.shape == values.shape
        if alike and ops.can_fuse(query, keys, None, causal=is_causal):
            if scale is not None:
                query = query * (scale * query.shape[-1] ** 0.5)
            return ops.attention(query, keys, values, causal=is_causal)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(dtype)
    with torch.autocast("xla", enabled=False):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _flash_allowed() -> bool:
    return bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]


def _for_all_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values that several heads of the query share, once for each."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)
