"""What stands between the matrix products of a modulated transformer block, in plain operations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHORTEST = 1e-12
"""Least length that a token is divided by, as in `torch.nn.functional.normalize`."""


def channel_factor(gain: Tensor, scale: Tensor) -> Tensor:
    """(batch, 1, width): what a token of length 1 is multiplied with, channel by channel."""
    factor: Tensor = gain * math.sqrt(gain.shape[-1]) * (scale.unsqueeze(1) + 1)
    return factor


def modulated_norm(x: Tensor, gain: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `ModelOps.modulated_norm`."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(SHORTEST)
    return x, x / length * channel_factor(gain, scale) + shift.unsqueeze(1)


def gated_sum(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """See `ModelOps.gated_sum`."""
    return x + gate.unsqueeze(1) * branch


def silu_mlp(x: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor:
    """See `ModelOps.silu_mlp`."""
    mapped: Tensor = second(F.silu(first(x)))
    return mapped
