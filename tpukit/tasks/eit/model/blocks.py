"""The network's parts: their parameters by their published names, and leaner arithmetic.

Tokens are (batch, positions, width), in the order of nested quadrants (`quadrant_order`); the
condition, the embedded diffusion time, is (batch, width).

- Attention and recomputation are asked of the hardware (`ModelOps`).
- A norm, its gain and its modulation are one scale and one shift of the token.

Source: Shi, Kang and Liatsis, IEEE TIM 2025, doi 10.1109/TIM.2025.3550245; adaLN-Zero: Peebles and
Xie, DiT, 2023; windows: Liu et al., Swin Transformer, 2021.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.hardware.backend import ModelOps

TIME_CODE_WIDTH = 256
MLP_RATIO = 4
LONGEST_PERIOD = 10_000.0
SHORTEST = 1e-12
"""Least norm that a token is divided by, as in `torch.nn.functional.normalize`."""


class RMSNorm(nn.Module):
    """Divides each token by its root mean square, scales by `g` and modulates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, 1, width))
        self.root_width = math.sqrt(width)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """x (batch, tokens, width); shift, scale (batch, width): one of each for a channel."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(SHORTEST)
        factor = self.g * self.root_width * (1 + scale.unsqueeze(1))
        modulated: Tensor = x / length * factor + shift.unsqueeze(1)
        return modulated


class TimeEmbedder(nn.Module):
    """Embeds diffusion times, (batch,) to (batch, width)."""

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(TIME_CODE_WIDTH, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.register_buffer(
            "frequencies", time_frequencies(TIME_CODE_WIDTH // 2), persistent=False
        )

    def forward(self, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * self.frequencies[None]
        embedded: Tensor = self.mlp(torch.cat([torch.cos(angles), torch.sin(angles)], dim=1))
        return embedded


class PatchEmbed(nn.Module):
    """Embeds patches of images, (batch, patches, channels patch^2), as tokens."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Mlp(nn.Module):
    """Two linear layers with SiLU between, on each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.silu(self.fc1(x)))
        return out


class Attention(nn.Module):
    """Self-attention over all tokens of each row, as timm's `Attention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, ops: ModelOps, bias: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        # Split before the heads are moved: the backward pass joins the three in one copy.
        parts = self.qkv(x).view(batch, tokens, 3, self.heads, -1).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        attended = ops.attention(query, key, value, bias)
        out: Tensor = self.proj(attended.transpose(1, 2).reshape(x.shape))
        return out


class BiasedAttention(Attention):
    """Self-attention within one window, with a bias for each offset of query and key."""

    relative_position_index: Tensor

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__(width, heads)
        offsets = (2 * window - 1) ** 2
        self.relative_position_bias_table = nn.Parameter(torch.zeros(offsets, heads))
        self.register_buffer("relative_position_index", relative_positions(window))

    def bias(self, index: Tensor) -> Tensor:
        """The bias (1, heads, tokens, tokens) of the pairs whose offsets `index` numbers."""
        table = self.relative_position_bias_table.index_select(0, index.reshape(-1))
        return table.view(*index.shape, self.heads).permute(2, 0, 1).unsqueeze(0)


class WindowAttention(nn.Module):
    """Self-attention within windows of window x window tokens, which are runs of them."""

    index: Tensor

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.attn = BiasedAttention(width, heads, window)
        order = torch.from_numpy(quadrant_order(window))
        index = self.attn.relative_position_index[order][:, order]
        self.register_buffer("index", index.contiguous(), persistent=False)

    def forward(self, x: Tensor, ops: ModelOps) -> Tensor:
        windows = x.reshape(-1, self.index.shape[0], x.shape[-1])
        attended: Tensor = self.attn(windows, ops, self.attn.bias(self.index))
        return attended.view(x.shape)


class ModulatedBlock(nn.Module):
    """A transformer block whose norms and branches the condition modulates (adaLN-Zero); recomputed
    in the backward pass, its attention the hardware's own."""

    def __init__(self, width: int, attention: nn.Module, ops: ModelOps) -> None:
        super().__init__()
        self.norm1 = RMSNorm(width)
        self.attn = attention
        self.norm2 = RMSNorm(width)
        self.mlp = Mlp(width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.ops = ops

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.ops.recompute(self.branches, x, self.adaLN_modulation(c))

    def branches(self, x: Tensor, modulation: Tensor) -> Tensor:
        """Both branches added; modulation is (batch, 6 width)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=1)
        branch: Tensor = self.attn(self.norm1(x, shift1, scale1), self.ops)
        x = x + gate1.unsqueeze(1) * branch
        branch = self.mlp(self.norm2(x, shift2, scale2))
        return x + gate2.unsqueeze(1) * branch


class PatchMerging(nn.Module):
    """Merges 2x2 tokens into one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        merged: Tensor = self.reduction(self.norm(x.view(batch, tokens // 4, 4 * width)))
        return merged


class Upsample(nn.Sequential):
    """Maps each token; it is repeated after that, with which mapping commutes. Its 1x1 convolution
    is the third entry, as published."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Identity(), nn.Identity(), nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        conv = self[2]
        assert isinstance(conv, nn.Conv2d)
        return F.linear(x, conv.weight.flatten(1), conv.bias)


class FinalLayer(nn.Module):
    """Turns tokens into the pixels of their patches, (batch, positions, patch^2)."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.norm_final = RMSNorm(width)
        self.linear = nn.Linear(width, patch * patch)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        pixels: Tensor = self.linear(self.norm_final(x, shift, scale))
        return pixels


# -- position codes, and the order in which tokens lie ---------------------------------------------
def sine_cosine_grid(width: int, grid: int) -> Tensor:
    """Position codes of a square grid, (grid * grid, width), rows first.

    The first half of a code is for the column, the second for the row; each is sines, then
    cosines, of width / 4 frequencies (He et al., Masked Autoencoders, 2022).
    """
    rates = LONGEST_PERIOD ** -(np.arange(width // 4, dtype=np.float64) / (width / 4))
    angles = np.arange(grid, dtype=np.float64)[:, None] * rates
    line = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    column = np.broadcast_to(line[None, :, :], (grid, grid, width // 2))
    row = np.broadcast_to(line[:, None, :], (grid, grid, width // 2))
    codes = np.concatenate([column, row], axis=2).reshape(grid * grid, width)
    return torch.from_numpy(codes).float()


def time_frequencies(count: int) -> Tensor:
    """Angular rates (count,) of a diffusion time's code, from 1 down towards 1 / LONGEST_PERIOD."""
    return torch.exp(-math.log(LONGEST_PERIOD) * torch.arange(count, dtype=torch.float32) / count)


def quadrant_order(grid: int) -> NDArray[np.int64]:
    """Row-major indices of a square grid, (grid * grid,), in the order of nested quadrants.

    In this order each 2x2 cell, 4x4 cell, ... is one run of tokens, so that merging cells,
    repeating them and cutting windows are reshapes. Within a cell: (0, 0), (1, 0), (0, 1), (1, 1)
    as (row, column), the order in which published patch merging stacks them. `grid` is a power
    of two.
    """
    position = np.arange(grid * grid)
    row = np.zeros_like(position)
    column = np.zeros_like(position)
    for bit in range(grid.bit_length() - 1):
        row |= ((position >> (2 * bit)) & 1) << bit
        column |= ((position >> (2 * bit + 1)) & 1) << bit
    return row * grid + column


def relative_positions(window: int) -> Tensor:
    """Index of each (query, key) pair's offset, (window^2, window^2), rows first.

    Offsets (row, column) of query minus key, each shifted to start from 0, number a table of
    (2 window - 1)^2 rows (Liu et al., Swin Transformer, 2021).
    """
    place = torch.arange(window)
    row = place.repeat_interleave(window)
    column = place.repeat(window)
    rows = row[:, None] - row[None, :] + window - 1
    columns = column[:, None] - column[None, :] + window - 1
    return rows * (2 * window - 1) + columns
