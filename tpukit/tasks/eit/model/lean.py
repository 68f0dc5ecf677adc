"""The network in lean form: the published function of the same parameters, with less work.

- Tokens lie in nested-quadrant order from the first layer to the last: windows, patch merging and
  upsampling become reshapes, and nothing is copied to cut or join windows.
- Attention and recomputation are asked of the hardware (`ModelOps`).
- Mapping a token commutes with repeating it, so upsampled tokens are mapped before they are
  repeated, and the skip is added instead of concatenated.
- A norm, its gain and its modulation are one scale and one shift of the token.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpukit.hardware.backend import ModelOps
from tpukit.tasks.eit.model import blocks
from tpukit.tasks.eit.model.network import Network, NetworkConfig, UNet

SHORTEST = 1e-12
"""Least norm that a token is divided by, as in `torch.nn.functional.normalize`."""


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(1, ctx.inverse), None, None


def reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows along dimension 1 in another order; backward, too, gathers instead of scattering."""
    reordered: Tensor = _Reorder.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return reordered


def modulated_norm(norm: blocks.RMSNorm, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """`modulate(norm(x), shift, scale)` with one scale and one shift for each channel.

    x (batch, tokens, width); shift, scale (batch, width).
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(SHORTEST)
    factor = norm.g * norm.root_width * (1 + scale.unsqueeze(1))
    modulated: Tensor = x / length * factor + shift.unsqueeze(1)
    return modulated


class LeanBlock(blocks.ModulatedBlock):
    """A block recomputed in the backward pass, its attention the hardware's own."""

    def __init__(self, width: int, attention: nn.Module, ops: ModelOps) -> None:
        super().__init__(width, attention)
        self.ops = ops

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.ops.recompute(self.branches, x, self.adaLN_modulation(c))

    def branches(self, x: Tensor, modulation: Tensor) -> Tensor:
        """Both branches added; modulation is (batch, 6 width)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attend(modulated_norm(self.norm1, x, shift1, scale1))
        branch: Tensor = self.mlp(modulated_norm(self.norm2, x, shift2, scale2))
        return x + gate2.unsqueeze(1) * branch

    def attend(self, x: Tensor) -> Tensor:
        """The attention branch of normed, modulated tokens."""
        assert isinstance(self.attn, blocks.Attention)
        return self.attend_within(self.attn, x, None)

    def attend_within(self, attention: blocks.Attention, x: Tensor, bias: Tensor | None) -> Tensor:
        """Attention over all tokens of each row of x."""
        batch, tokens, _ = x.shape
        # Split before the heads are moved: the backward pass joins the three in one copy.
        parts = attention.qkv(x).view(batch, tokens, 3, attention.heads, -1).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        attended = self.ops.attention(query, key, value, bias)
        out: Tensor = attention.proj(attended.transpose(1, 2).reshape(x.shape))
        return out


class LeanWindowBlock(LeanBlock):
    """A windowed block whose windows are runs of tokens."""

    index: Tensor

    def __init__(self, width: int, attention: blocks.WindowAttention, ops: ModelOps) -> None:
        super().__init__(width, attention, ops)
        order = torch.from_numpy(blocks.quadrant_order(attention.window))
        index = attention.attn.relative_position_index[order][:, order]
        self.register_buffer("index", index.contiguous(), persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        assert isinstance(self.attn, blocks.WindowAttention)
        attention = self.attn.attn
        windows = x.reshape(-1, self.index.shape[0], x.shape[-1])
        return self.attend_within(attention, windows, attention.bias(self.index)).view(x.shape)


class LeanUNet(UNet):
    """The U over tokens in nested-quadrant order."""

    def merge(self, merging: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(merging, blocks.PatchMerging)
        batch, tokens, width = x.shape
        merged: Tensor = merging.reduction(merging.norm(x.view(batch, tokens // 4, 4 * width)))
        return merged

    def join(self, upsample: nn.Module, linear: nn.Module, x: Tensor, skip: Tensor) -> Tensor:
        assert isinstance(upsample, blocks.Upsample) and isinstance(linear, nn.Linear)
        batch, tokens, width = x.shape
        conv = upsample.conv
        raised = F.linear(x, conv.weight.view(width, width), conv.bias)
        of_raised, of_skip = torch.split(linear.weight, width, dim=1)
        raised = F.linear(raised, of_raised, linear.bias).unsqueeze(2)
        joined = F.linear(skip, of_skip).view(batch, tokens, 4, width) + raised
        return joined.view(batch, 4 * tokens, width)


class LeanNetwork(Network):
    """The network over tokens in nested-quadrant order."""

    order: Tensor
    inverse: Tensor

    def __init__(self, config: NetworkConfig, unet: LeanUNet) -> None:
        super().__init__(config, unet)
        order = blocks.quadrant_order(config.grid)
        self.register_buffer("order", torch.from_numpy(order), persistent=False)
        self.register_buffer("inverse", torch.from_numpy(np.argsort(order)), persistent=False)

    def predict(self, channels: Tensor, c: Tensor) -> Tensor:
        x = self.embed(channels)
        tokens = self.final_layer(self.blocks(x, c), c)
        return self.pixels(reorder(tokens, self.inverse, self.order))

    def embed(self, images: Tensor) -> Tensor:
        """Patches of images as ordered tokens, with their positions."""
        grid, patch = self.config.grid, self.config.patch
        cells = images.view(len(images), -1, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
        patches = cells.reshape(len(images), grid * grid, -1)
        proj = self.x_embedder.proj
        tokens = F.linear(
            reorder(patches, self.order, self.inverse), proj.weight.flatten(1), proj.bias
        )
        return tokens + self.pos_embed.index_select(1, self.order)


def lean_network(config: NetworkConfig, ops: ModelOps) -> LeanNetwork:
    """The network with lean arithmetic on the hardware of `ops`."""
    width, heads = config.width, config.heads

    def global_block() -> nn.Module:
        return LeanBlock(width, blocks.Attention(width, heads), ops)

    def window_block() -> nn.Module:
        attention = blocks.WindowAttention(width, heads, config.grid, config.window)
        return LeanWindowBlock(width, attention, ops)

    return LeanNetwork(config, LeanUNet(config, global_block, window_block))
