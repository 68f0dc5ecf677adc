"""Embedding look-up whose gradient is as sparse as the hardware of its tensors supports."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def look_up(tokens: Tensor, embedding: Tensor) -> Tensor:
    """`embedding` at `tokens`.

    On an eager CPU the gradient is of those rows alone, and is added in place to that of a tied
    projection: a dense one took a tenth of a step.
    """
    sparse = embedding.device.type == "cpu" and not torch.compiler.is_compiling()
    return F.embedding(tokens, embedding, sparse=sparse)
