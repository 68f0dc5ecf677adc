"""The EIT network in its published form, which the lean one is compared with."""

from torch import nn

from tpukit.tasks.eit.model.blocks import Attention, ModulatedBlock, WindowAttention
from tpukit.tasks.eit.model.network import Network, NetworkConfig, UNet


def reference_network(config: NetworkConfig) -> Network:
    """The network with the published arithmetic."""
    width, heads = config.width, config.heads

    def global_block() -> nn.Module:
        return ModulatedBlock(width, Attention(width, heads))

    def window_block() -> nn.Module:
        return ModulatedBlock(width, WindowAttention(width, heads, config.grid, config.window))

    return Network(config, UNet(config, global_block, window_block))
