"""The EIT network in its published form: the arithmetic that the package's own is held against.

Tokens lie in rows of the grid.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpukit.hardware.backend import TorchOps
from tpukit.tasks.eit.model.blocks import (
    Attention,
    BiasedAttention,
    ModulatedBlock,
    PatchMerging,
    WindowAttention,
    modulate,
)
from tpukit.tasks.eit.model.network import Network, NetworkConfig, UNet


def attended(attention: Attention, x: Tensor) -> Tensor:
    batch, tokens, width = x.shape
    qkv = attention.qkv(x).reshape(batch, tokens, 3, attention.heads, width // attention.heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if isinstance(attention, BiasedAttention):
        logits = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)
        bias = attention.bias(attention.relative_position_index)
        found = (logits + bias).softmax(dim=-1) @ value
    else:
        found = F.scaled_dot_product_attention(query, key, value)
    return attention.proj(found.transpose(1, 2).reshape(x.shape))


def attended_in_windows(attention: WindowAttention, x: Tensor) -> Tensor:
    batch, tokens, width = x.shape
    window = attention.window
    across = math.isqrt(tokens) // window
    cells = x.view(batch, across, window, across, window, width)
    windows = cells.permute(0, 1, 3, 2, 4, 5).reshape(-1, window**2, width)
    found = attended(attention.attn, windows).view(batch, across, across, window, window, width)
    return found.permute(0, 1, 3, 2, 4, 5).reshape(x.shape)


class PublishedBlock(ModulatedBlock):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        attend = attended_in_windows if isinstance(self.attn, WindowAttention) else attended
        branch = attend(self.attn, modulate(self.norm1(x), shift1, scale1))
        x = x + gate1.unsqueeze(1) * branch
        branch = self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x + gate2.unsqueeze(1) * branch


class PublishedMerging(PatchMerging):
    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        half = math.isqrt(tokens) // 2
        cells = x.view(batch, half, 2, half, 2, width).permute(0, 1, 3, 4, 2, 5)
        return self.reduction(self.norm(cells.reshape(batch, half * half, 4 * width)))


class PublishedUNet(UNet):
    block = PublishedBlock

    def join(self, upsample: nn.Module, linear: nn.Module, x: Tensor, skip: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        side = math.isqrt(tokens)
        image = x.transpose(1, 2).reshape(batch, width, side, 1, side, 1)
        image = image.expand(-1, -1, -1, 2, -1, 2).reshape(batch, width, 2 * side, 2 * side)
        raised = upsample.conv(image).flatten(2).transpose(1, 2)
        return linear(torch.cat((raised, skip), dim=2))


class PublishedNetwork(Network):
    unet = PublishedUNet

    def predict(self, channels: Tensor, c: Tensor) -> Tensor:
        tokens = self.x_embedder.proj(channels).flatten(2).transpose(1, 2)
        return self.pixels(self.final_layer(self.blocks(tokens + self.pos_embed, c), c))


def reference_network(config: NetworkConfig) -> Network:
    """The network with the published arithmetic."""
    network = PublishedNetwork(config, TorchOps())
    for module in network.modules():
        if isinstance(module, PatchMerging):
            module.__class__ = PublishedMerging
    return network
