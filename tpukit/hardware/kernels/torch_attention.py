"""torch's own `scaled_dot_product_attention` on a TPU: by the package's kernels where it can be."""

from contextvars import ContextVar
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class FusedOps(Protocol):
    """A backend that may have the kernels."""

    def can_fuse(
        self, query: Tensor, key: Tensor, bias: Tensor | None = None,
        starts: Tensor | None = None, *, causal: bool,
    ) -> bool: ...  # fmt: skip

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False
    ) -> Tensor: ...


RUNNING: ContextVar[FusedOps | None] = ContextVar("RUNNING", default=None)
"""The backend whose model runs."""


def attention_under_autocast(
    kind: str, ops: FusedOps | None, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's attention in autocast's dtype, as on a GPU: rotary embeddings leave query and key in
    float32 beside a value in bf16. Without a mask and drop-out by the kernel of `ops`, where it
    takes the shapes and `sdpa_kernel` does not ask for the formula (the kernel has no second
    derivatives)."""
    dtype = torch.get_autocast_dtype(kind)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    plain = attn_mask is None and not dropout_p and query.ndim == key.ndim == 4
    if ops is not None and plain and torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        keys, values = (_for_all_heads(t, query) if enable_gqa else t for t in (key, value))
        alike = query.shape[:2] == keys.shape[:2] and keys.shape == values.shape
        if alike and ops.can_fuse(query, keys, causal=is_causal):
            if scale is not None:
                query = query * (scale * query.shape[-1] ** 0.5)
            return ops.attention(query, keys, values, causal=is_causal)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(dtype)
    with torch.autocast(kind, enabled=False):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _for_all_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values that several heads of the query share, once for each."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)
