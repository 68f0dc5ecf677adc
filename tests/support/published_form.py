"""The published network written plainly as one function of its state dict, from its description.

Slow and literal on purpose; `PublishedArithmetic` shares no code with the package. Global attention
and the perceptrons are timm's own, which the published code uses.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.vision_transformer import Attention

from tpukit.hardware.backend import TorchOps
from tpukit.tasks.eit.model.network import Network

HEADS = 16


def published_keys(levels=4):
    """Every parameter's and buffer's name."""
    block = [
        "norm1.g", "norm2.g", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias",
        "adaLN_modulation.1.weight", "adaLN_modulation.1.bias",
    ]  # fmt: skip
    linears = ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    wide = block + [f"attn.{name}" for name in linears]
    biased = [*linears, "relative_position_bias_table", "relative_position_index"]
    windowed = block + [f"attn.attn.{name}" for name in biased]
    keys = ["pos_embed", "x_embedder.proj.weight", "x_embedder.proj.bias"]
    keys += [f"t_embedder.mlp.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    for name in ("swinIn1", "swinIn2", "swinOut1", "swinOut2"):
        keys += [f"blocks.{name}.{key}" for key in windowed]
    for level in range(levels):
        down, up = f"blocks.downs.{level}", f"blocks.ups.{level}"
        keys += [f"{down}.0.{key}" for key in ("reduction.weight", "norm.weight", "norm.bias")]
        keys += [f"{down}.{i}.{key}" for i in (1, 2) for key in wide]
        keys += [f"{up}.{i}.{kind}" for i in ("0.2", "1") for kind in ("weight", "bias")]
        keys += [f"{up}.{i}.{key}" for i in (2, 3) for key in wide]
    keys += [f"blocks.mid.{key}" for key in wide]
    keys += ["final_layer.norm_final.g", "final_layer.linear.weight", "final_layer.linear.bias"]
    return [*keys, *(f"final_layer.adaLN_modulation.1.{kind}" for kind in ("weight", "bias"))]


class PublishedArithmetic:
    """The clean image from `(images, t, maps)` and a state dict, everything in its dtype."""

    def __init__(self, weights, heads=HEADS, levels=4):
        self.weights = weights
        self.heads = heads
        self.levels = levels

    def __call__(self, images, t, maps):
        factor = images.shape[-1] // maps.shape[-1]
        condition = F.interpolate(maps, scale_factor=factor, mode="nearest")
        return self.predict(torch.cat([images, condition], 1), self.time(t))

    def predict(self, channels, c):
        w = self.weights
        weight, bias = (w[f"x_embedder.proj.{name}"] for name in ("weight", "bias"))
        patch = weight.shape[-1]
        tokens = F.conv2d(channels, weight, bias, stride=patch)
        grid = tokens.shape[-1]
        x = tokens.flatten(2).transpose(1, 2) + w["pos_embed"]
        x = self.final(self.unet(x, c, grid), c)
        return F.pixel_shuffle(x.transpose(1, 2).reshape(len(x), -1, grid, grid), patch)

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def time(self, t):
        k = torch.arange(128, dtype=torch.float64)
        angles = t.double()[:, None] * 10000.0 ** (-k / 128)
        code = torch.cat([angles.cos(), angles.sin()], 1).to(self.weights["pos_embed"].dtype)
        return self.linear("t_embedder.mlp.2", F.silu(self.linear("t_embedder.mlp.0", code)))

    def norm(self, name, x):
        return x / x.norm(dim=-1, keepdim=True) * math.sqrt(x.shape[-1]) * self.weights[name][0]

    def block(self, name, x, c, window=None):
        parts = self.linear(f"{name}.adaLN_modulation.1", F.silu(c)).unsqueeze(1).chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        y = self.norm(f"{name}.norm1.g", x) * (1 + scale1) + shift1
        y = self.windows(f"{name}.attn.attn", y, window) if window else self.wide(name, y)
        x = x + gate1 * y
        y = self.norm(f"{name}.norm2.g", x) * (1 + scale2) + shift2
        mlp = Mlp(x.shape[-1], 4 * x.shape[-1], act_layer=torch.nn.SiLU)
        return x + gate2 * self.timm(mlp, f"{name}.mlp", y)

    def wide(self, name, x):
        attention = Attention(x.shape[-1], num_heads=self.heads, qkv_bias=True)
        return self.timm(attention, f"{name}.attn", x)

    def timm(self, module, name, x):
        prefix = f"{name}."
        own = {k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)}
        return torch.func.functional_call(module, own, (x,))

    def windows(self, name, x, window):
        """Every window and head on its own."""
        grid = math.isqrt(x.shape[1])
        qkv = self.linear(f"{name}.qkv", x).view(len(x), grid, grid, 3, self.heads, -1)
        table = self.weights[f"{name}.relative_position_bias_table"]
        place = np.array([(r, c) for r in range(window) for c in range(window)])
        offset = place[:, None] - place[None, :] + window - 1
        bias = table[torch.from_numpy(offset[..., 0] * (2 * window - 1) + offset[..., 1])]
        out = torch.zeros(len(x), grid, grid, self.heads, qkv.shape[-1], dtype=x.dtype)
        for top in range(0, grid, window):
            for left in range(0, grid, window):
                cell = (slice(None), slice(top, top + window), slice(left, left + window))
                q, k, v = qkv[cell].flatten(1, 2).unbind(2)
                logits = torch.einsum("bqhd,bkhd->bqkh", q, k) / math.sqrt(q.shape[-1]) + bias
                attended = torch.einsum("bqkh,bkhd->bqhd", logits.softmax(2), v)
                out[cell] = attended.view(len(x), window, window, self.heads, -1)
        return self.linear(f"{name}.proj", out.reshape(x.shape))

    def unet(self, x, c, grid):
        for name in ("swinIn1", "swinIn2"):
            x = self.block(f"blocks.{name}", x, c, grid // 4)
        skips = []
        for level in range(self.levels):
            skips.append(x)
            x = self.merge(f"blocks.downs.{level}.0", x)
            for i in (1, 2):
                x = self.block(f"blocks.downs.{level}.{i}", x, c)
        x = self.block("blocks.mid", x, c)
        for level in range(self.levels):
            x = self.upsample(f"blocks.ups.{level}.0.2", x)
            x = self.linear(f"blocks.ups.{level}.1", torch.cat([x, skips.pop()], 2))
            for i in (2, 3):
                x = self.block(f"blocks.ups.{level}.{i}", x, c)
        for name in ("swinOut1", "swinOut2"):
            x = self.block(f"blocks.{name}", x, c, grid // 4)
        return x

    def merge(self, name, x):
        grid = math.isqrt(x.shape[1])
        cells = x.view(len(x), grid, grid, -1)
        corners = [cells[:, i::2, j::2] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))]
        stacked = torch.cat(corners, -1).flatten(1, 2)
        w, width = self.weights, stacked.shape[-1]
        normed = F.layer_norm(stacked, (width,), w[f"{name}.norm.weight"], w[f"{name}.norm.bias"])
        return self.linear(f"{name}.reduction", normed)

    def upsample(self, name, x):
        grid = math.isqrt(x.shape[1])
        image = x.transpose(1, 2).reshape(len(x), -1, grid, grid)
        image = F.interpolate(image, scale_factor=2, mode="nearest")
        mapped = F.conv2d(image, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
        return mapped.flatten(2).transpose(1, 2)

    def final(self, x, c):
        modulation = self.linear("final_layer.adaLN_modulation.1", F.silu(c)).unsqueeze(1)
        shift, scale = modulation.chunk(2, -1)
        normed = self.norm("final_layer.norm_final.g", x)
        return self.linear("final_layer.linear", normed * (1 + scale) + shift)


def published_form(network):
    """A network of the same weights whose U, embedding and last layer are the published ones."""
    config = network.config
    other = Network(config, TorchOps())
    other.load_state_dict(network.state_dict())
    weights = dict(other.named_parameters())
    other.predict = PublishedArithmetic(weights, config.heads, config.levels).predict
    return other
