"""Checkpoints of the published code: a dict with `model` (a state dict) and `epoch`."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from tpukit.errors import CheckpointError
from tpukit.train.task import load_weights
from tpukit.train.weights import describe, read_foreign, state_dict_of


def read_published(path: Path) -> dict[str, Tensor]:
    """The weights of such a file, which executes nothing. Raises CheckpointError for any other."""
    content = read_foreign(path)
    weights = state_dict_of(content, "model")
    if weights is None:
        raise CheckpointError(
            f"Checkpoint {path} is not one of the published code: it holds {describe(content)}.",
            "Expected a dict with `model` (tensors by name) and `epoch`.",
        )
    return weights


def load_published(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads whole weights strictly. Raises CheckpointError naming the sizes, else what differs."""
    hint = "Name the size it was trained with (--set size=NAME); the released one is `published`."
    own, found = size_of(network.state_dict()), size_of(weights)
    if None not in (own, found) and own != found:
        raise CheckpointError(
            f"The checkpoint is not of this network: it has {found}, this network {own}.", hint
        )
    load_weights(network, weights, "The checkpoint", hint)


def size_of(weights: Mapping[str, Tensor]) -> str | None:
    """Width, levels, patch and input channels of the network that a state dict belongs to."""
    patches = weights.get("x_embedder.proj.weight")
    if patches is None or patches.ndim != 4:
        return None
    width, channels, patch, _ = patches.shape
    levels = {name.split(".")[2] for name in weights if name.startswith("blocks.downs.")}
    return f"width {width}, {len(levels)} levels, patch {patch}, {channels} input channels"
