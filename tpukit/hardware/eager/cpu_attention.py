"""Attention on a CPU without the keys that are masked, whose scores torch would compute too."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tpukit.hardware.backend import TorchOps

ROWS_AT_A_TIME = 4
"""Rows whose keys are read together, from the first to the last that one of them sees."""


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *,
    causal: bool,
    starts: Tensor | None,
) -> Tensor:
    """See `ModelOps.attention`. It looks at the values of the masks."""
    if bias is None and causal and starts is not None and query.shape == key.shape:
        return _of_parts(_of_samples, 1, query, key, value, starts)
    by_keys = starts is None and not causal and not torch.is_grad_enabled()
    if bias is not None and by_keys and bias.shape == (len(query), 1, 1, key.shape[-2]):
        return _of_parts(_of_seen_keys, ROWS_AT_A_TIME, query, key, value, bias)
    return TorchOps().attention(query, key, value, bias, causal=causal, starts=starts)


def _of_parts(attention: Callable[..., Tensor], rows: int, *tensors: Tensor) -> Tensor:
    """`attention` of up to `rows` rows at a time."""
    parts = [
        attention(*part) for part in zip(*(torch.split(t, rows) for t in tensors), strict=True)
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _of_seen_keys(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    seen = np.flatnonzero((bias > float("-inf")).any(0).numpy())
    keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(None)
    return TorchOps().attention(query, key[:, :, keys], value[:, :, keys], bias[..., keys])


def _of_samples(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """Causal attention of one row, which is cut where no later query looks further back."""
    first, places = starts[0].numpy(), np.arange(starts.shape[1])
    cuts = np.flatnonzero(np.minimum.accumulate(first[::-1])[::-1] == places)
    # Tokens that see themselves alone, as those that only fill a row, stay together.
    alone = np.diff(cuts, append=len(first)) == 1
    cuts = cuts[~(alone & np.append(False, alone[:-1]))]
    sizes = np.diff(cuts, append=len(first)).tolist()
    parts = []
    for begin, *sample in zip(
        cuts.tolist(),
        *(torch.split_with_sizes(t, sizes, 2) for t in (query, key, value)),
        strict=True,
    ):
        inner = first[begin : begin + sample[0].shape[2]] - begin
        if (inner == places[: len(inner)]).all():
            parts.append(sample[2])
            continue
        within = torch.from_numpy(inner)[None] if inner.any() else None
        parts.append(TorchOps().attention(*sample, causal=True, starts=within))
    return torch.cat(parts, 2)
