"""The conditional diffusion network: a U of transformer blocks.

It has the published parameters, names and values, and is the same function with less work:

- Tokens lie in nested-quadrant order from the first layer to the last: windows, patch merging and
  upsampling become reshapes, and nothing is copied to cut or join windows.
- Mapping a token commutes with repeating it, so upsampled tokens are mapped before they are
  repeated, and the skip is added instead of concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.hardware.backend import ModelOps
from tpukit.tasks.eit.model.blocks import (
    Attention,
    FinalLayer,
    ModulatedBlock,
    PatchEmbed,
    PatchMerging,
    TimeEmbedder,
    Upsample,
    WindowAttention,
    quadrant_order,
    sine_cosine_grid,
)
from tpukit.train.task import SampleSource

REFINEMENT_CELL = 4
"""Side of the square of pixels that the refinement's convolutions take as channels."""
WINDOWS_ACROSS = 4
"""Windows along each side of the grid."""
Floats = NDArray[np.floating[Any]]
RIDGE = 1e-2
"""Penalty a sample on the weights; the normalised voltages' second moments are 1."""
MAX_SAMPLES = 2000
"""More change the fit little: it has 208 inputs."""


@dataclass(frozen=True)
class NetworkConfig:
    """The network's shape. Sides are powers of two."""

    width: int = 512
    """Channels of a token."""
    heads: int = 16
    levels: int = 4
    """Number of halvings of the grid."""
    patch: int = 2
    """Side of the square of pixels that makes a token."""
    image_side: int = 128
    map_side: int = 16
    """Side of the voltage map."""
    learned_channels: int = 0
    """Images of `learned_side` that a small MLP makes from the voltages: further channels of the
    input, and the first of them is what the U's output is added to. 0 as published."""
    learned_side: int = 64
    learned_hidden: int = 512
    refinement_channels: int = 0
    """Width of the convolutions over the assembled image. 0 as published: none."""

    @property
    def grid(self) -> int:
        """Tokens along each side of the image."""
        return self.image_side // self.patch

    @property
    def window(self) -> int:
        """Tokens along each side of a window."""
        return self.grid // WINDOWS_ACROSS


SIZES: dict[str, NetworkConfig] = {
    "tiny": NetworkConfig(
        width=96, heads=3, levels=1, patch=16, learned_channels=1, refinement_channels=32
    ),
    "small": NetworkConfig(
        width=128,
        heads=4,
        levels=2,
        patch=8,
        learned_channels=2,
        learned_hidden=1024,
        refinement_channels=32,
    ),
    "published": NetworkConfig(),
}


class UNet(nn.Module):
    """The U: windowed blocks at full resolution around `levels` halvings and doublings."""

    def __init__(self, config: NetworkConfig, ops: ModelOps) -> None:
        super().__init__()
        width, heads = config.width, config.heads

        def global_block() -> nn.Module:
            return ModulatedBlock(width, Attention(width, heads), ops)

        def window_block() -> nn.Module:
            return ModulatedBlock(width, WindowAttention(width, heads, config.window), ops)

        self.swinIn1, self.swinIn2 = window_block(), window_block()
        self.swinOut1, self.swinOut2 = window_block(), window_block()
        self.downs = nn.ModuleList(
            nn.ModuleList([PatchMerging(width), global_block(), global_block()])
            for _ in range(config.levels)
        )
        self.ups = nn.ModuleList(
            nn.ModuleList(
                [Upsample(width), nn.Linear(2 * width, width), global_block(), global_block()]
            )
            for _ in range(config.levels)
        )
        self.mid = global_block()

    def join(self, upsample: nn.Module, linear: nn.Module, x: Tensor, skip: Tensor) -> Tensor:
        """Doubles the grid's side and takes in what was there on the way down."""
        assert isinstance(linear, nn.Linear)
        batch, tokens, width = x.shape
        of_raised, of_skip = torch.split(linear.weight, width, dim=1)
        raised = F.linear(upsample(x), of_raised, linear.bias).unsqueeze(2)
        joined = F.linear(skip, of_skip).view(batch, tokens, 4, width) + raised
        return joined.view(batch, 4 * tokens, width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x = self.swinIn2(self.swinIn1(x, c), c)
        skips: list[Tensor] = []
        for stage in self.downs:
            merging, first, second = parts_of(stage)
            skips.append(x)
            x = second(first(merging(x), c), c)
        x = self.mid(x, c)
        for stage in self.ups:
            upsample, linear, first, second = parts_of(stage)
            x = second(first(self.join(upsample, linear, x, skips.pop()), c), c)
        out: Tensor = self.swinOut2(self.swinOut1(x, c), c)
        return out


def parts_of(stage: nn.Module) -> list[nn.Module]:
    """A level's modules, in order."""
    assert isinstance(stage, nn.ModuleList)
    return list(stage)


class VoltageImages(nn.Module):
    """Images made from the voltages: (batch, 1, side, side) map to (batch, channels, image).

    The first is a fixed linear layer's, corrected by an MLP; further ones are the MLP's own.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.map_side**2, config.learned_side**2).requires_grad_(False)
        self.side = config.learned_side
        self.channels = config.learned_channels
        self.factor = config.image_side // self.side
        self.mlp = nn.Sequential(
            nn.Linear(config.map_side**2, config.learned_hidden),
            nn.SiLU(),
            nn.Linear(config.learned_hidden, self.channels * self.side**2),
        )

    def forward(self, voltage_map: Tensor) -> Tensor:
        voltages = voltage_map.flatten(1)
        images = self.mlp(voltages).view(-1, self.channels, self.side, self.side)
        first = images[:, :1] + self.linear(voltages).view(-1, 1, self.side, self.side)
        return enlarge(torch.cat([first, images[:, 1:]], dim=1), self.factor)

    @torch.no_grad()
    def start_from(self, weight: Floats, bias: Floats) -> None:
        """Sets the fixed layer, zero so far."""
        self.linear.weight.copy_(torch.from_numpy(weight))
        self.linear.bias.copy_(torch.from_numpy(bias))


class Refinement(nn.Module):
    """A correction by convolutions over the assembled image: they see across patches' borders.

    `forward(images, c)`: (batch, channels, side, side), the time's (batch, width) to
    (batch, 1, side, side).
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        width, cell = config.refinement_channels, REFINEMENT_CELL**2
        # The noisy image, the voltages' images and the U's.
        channels = 2 + config.learned_channels
        self.first = nn.Conv2d(channels * cell, width, 3, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(width, cell, 3, padding=1)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(config.width, 2 * width))

    def forward(self, images: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c)[..., None, None].chunk(2, dim=1)
        x = self.first(F.pixel_unshuffle(images, REFINEMENT_CELL))
        x = F.gelu(x * (1 + scale) + shift)
        for convolution in self.middle:
            x = x + F.gelu(convolution(x))
        refined: Tensor = F.pixel_shuffle(self.last(x), REFINEMENT_CELL)
        return refined


class Network(nn.Module):
    """Predicts the clean image from a noisy one, the diffusion time and the voltages.

    `forward(images, t, voltage_map)`: (batch, 1, side, side), (batch,), (batch, 1, 16, 16) to
    (batch, 1, side, side).
    """

    order: Tensor
    inverse: Tensor

    def __init__(self, config: NetworkConfig, ops: ModelOps) -> None:
        """The network on the hardware of `ops`."""
        super().__init__()
        blocks = UNet(config, ops)  # the order of random draws is the earlier one
        self.config = config
        width = config.width
        self.x_embedder = PatchEmbed(2 + config.learned_channels, config.patch, width)
        self.t_embedder = TimeEmbedder(width)
        self.pos_embed = nn.Parameter(
            sine_cosine_grid(width, config.grid).unsqueeze(0), requires_grad=False
        )
        self.blocks = blocks
        self.final_layer = FinalLayer(width, config.patch)
        self.voltage_images = VoltageImages(config) if config.learned_channels else None
        self.refinement = Refinement(config) if config.refinement_channels else None
        initialise(self)
        order = quadrant_order(config.grid)
        self.register_buffer("order", torch.from_numpy(order), persistent=False)
        self.register_buffer("inverse", torch.from_numpy(np.argsort(order)), persistent=False)

    def forward(self, images: Tensor, t: Tensor, voltage_map: Tensor) -> Tensor:
        c = self.t_embedder(t)
        enlarged = enlarge(voltage_map, self.config.image_side // self.config.map_side)
        if self.voltage_images is None:
            return self.predict(torch.cat([images, enlarged], dim=1), c)
        learned: Tensor = self.voltage_images(voltage_map).to(images.dtype)
        predicted = self.predict(torch.cat([images, enlarged, learned], dim=1), c)
        predicted = learned[:, :1] + predicted
        if self.refinement is None:
            return predicted
        refined: Tensor = self.refinement(torch.cat([images, learned, predicted], dim=1), c)
        return predicted + refined

    def predict(self, channels: Tensor, c: Tensor) -> Tensor:
        """The U's image from image and condition, stacked (batch, 2 or more, side, side)."""
        tokens = self.final_layer(self.blocks(self.embed(channels), c), c)
        return self.pixels(reorder(tokens, self.inverse, self.order))

    def embed(self, images: Tensor) -> Tensor:
        """Patches of images as ordered tokens, with their positions."""
        grid, patch = self.config.grid, self.config.patch
        cells = images.view(len(images), -1, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
        patches = cells.reshape(len(images), grid * grid, -1)
        tokens: Tensor = self.x_embedder(reorder(patches, self.order, self.inverse))
        return tokens + self.pos_embed.index_select(1, self.order)

    def pixels(self, tokens: Tensor) -> Tensor:
        """Tokens' patches (batch, positions, patch^2) as images (batch, 1, side, side)."""
        side, grid, patch = self.config.image_side, self.config.grid, self.config.patch
        cells = tokens.view(-1, grid, grid, patch, patch).permute(0, 1, 3, 2, 4)
        return cells.reshape(-1, 1, side, side)


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


def enlarge(images: Tensor, factor: int) -> Tensor:
    """Each pixel repeated factor x factor times (nearest neighbour), by plain operations.

    `F.interpolate` leaves the graph on XLA.
    """
    batch, channels, height, width = images.shape
    cells = images.view(batch, channels, height, 1, width, 1)
    cells = cells.expand(-1, -1, -1, factor, -1, factor)
    return cells.reshape(batch, channels, height * factor, width * factor)


ZERO_AT_THE_START = (
    "final_layer.linear",
    "voltage_images.linear",
    "voltage_images.mlp.2",
    "refinement.last",
)


def initialise(network: Network) -> None:
    """Initial values as published: modulation and output are zero, so each block is identity."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
    patches = network.x_embedder.proj.weight
    nn.init.xavier_uniform_(patches.data.view(patches.shape[0], -1))
    for name, parameter in network.named_parameters():
        if name.startswith("t_embedder.mlp") and name.endswith("weight"):
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("relative_position_bias_table"):
            nn.init.trunc_normal_(parameter, std=0.02)
        elif ".adaLN_modulation." in name or name.startswith(ZERO_AT_THE_START):
            nn.init.zeros_(parameter)


# -- where the smaller networks start: ridge regression of images on voltages ----------------------
def fit_images(data: SampleSource, side: int) -> tuple[Floats, Floats]:
    """Ridge regression of images, averaged down to side x side, on flattened voltage maps: weight
    (pixels, map entries) and bias (pixels,)."""
    from sklearn.linear_model import Ridge

    chosen = np.unique(np.linspace(0, len(data) - 1, min(len(data), MAX_SAMPLES)).astype(int))
    samples = [data[int(index)] for index in chosen]
    maps = np.stack([np.ravel(sample["voltages"]) for sample in samples]).astype(np.float64)
    images = np.stack([shrunk(sample["image"][0], side).ravel() for sample in samples])
    found = Ridge(alpha=RIDGE * len(maps)).fit(maps, images)
    return found.coef_.astype(np.float32), found.intercept_.astype(np.float32)


def shrunk(image: Floats, side: int) -> Floats:
    """A square image averaged over equal cells down to side x side."""
    cell = image.shape[0] // side
    smaller: Floats = image.reshape(side, cell, side, cell).mean((1, 3))
    return smaller
