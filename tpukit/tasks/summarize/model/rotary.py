"""Rotary positions (Su et al., 2021) and their scalings, named as in transformers."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpukit.errors import DataError

ROTATES = {
    "default": {},
    # Within the positions a model knows, dynamic scaling is none.
    "dynamic": {"factor", "original_max_position_embeddings"},
    "linear": {"factor"},
    "llama3": {
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    },
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
    "longrope": {
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor",
        "long_factor",
    },
}  # fmt: skip
"""Kinds of scaling, and the fields of each."""


def check_rope(rope: Mapping[str, Any], source: str) -> None:
    """Raises `DataError` naming a kind of scaling or a field that is not known."""
    kind = rope["rope_type"]
    if kind not in ROTATES:
        raise DataError(
            f"{source}: rope_type {kind!r} is not known.", f"tpukit knows {', '.join(ROTATES)}."
        )
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "type", *ROTATES[kind]}
    if unknown := sorted(name for name in rope.keys() - known if rope[name] is not None):
        raise DataError(
            f"{source}: tpukit does not know {', '.join(unknown)} of rope_type {kind!r}.",
            "Remove it from config.json if the logits do not depend on it.",
        )


def frequencies(rope: Mapping[str, Any], width: int, positions: int) -> tuple[Tensor, float]:
    """Radians a position for each pair of a head's `width` numbers, and the scale of the result.

    positions: those of the context, which decide between LongRoPE's two sets of factors.
    """
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    pairs = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    plain = 1.0 / theta**pairs
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, width)
    if kind == "longrope":
        known, factor = rope["original_max_position_embeddings"], rope["factor"]
        factors = torch.tensor(rope["long_factor" if positions > known else "short_factor"])
        grown = math.sqrt(1 + math.log(factor) / math.log(known)) if factor > 1 else 1.0
        return 1.0 / (factors * theta**pairs), rope.get("attention_factor") or grown
    return plain, 1.0


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Slow waves are stretched, fast ones kept, those between in part (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    mixed: Tensor = (1 - kept) * plain / rope["factor"] + kept * plain
    return mixed


def _yarn(plain: Tensor, rope: Mapping[str, Any], width: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023)."""
    factor, known = rope["factor"], rope["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        """The pair that turns so often within the original context."""
        return width * math.log(known / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    stretched = (torch.arange(width // 2) - low) / max(high - low, 0.001)
    stretched = stretched.clamp(0, 1)
    scale = rope.get("attention_factor")
    if scale is None:
        first, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
        if first and of_all:
            scale = _magnitude(factor, first) / _magnitude(factor, of_all)
        else:
            scale = _magnitude(factor, 1.0)
    return plain / factor * stretched + plain * (1 - stretched), float(scale)


def _magnitude(factor: float, share: float) -> float:
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: Tensor, waves: Tensor) -> Tensor:
    """x (rows, heads, length, width) with its first numbers turned by `waves`.

    waves: (2, rows, length, pairs), cosines and sines; number i is paired with i + pairs.
    """
    pairs = waves.shape[-1]
    cosines, sines = waves[:, :, None]
    first, second, rest = torch.split_with_sizes(x, [pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], -1)
