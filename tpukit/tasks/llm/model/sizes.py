"""Public models by name, as fields of transformers' configurations; imports no transformers."""

import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tpukit.errors import ConfigError

GPT2_SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
"""Layers, heads and width of OpenAI's models."""


@cache
def named_sizes() -> dict[str, dict[str, Any]]:
    """Public models by name: `hub`, the name there, and the fields of a configuration."""
    text = (files("tpukit.tasks.llm.model") / "sizes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


SIZES = (*GPT2_SIZES, *named_sizes())
"""Names of public models."""


def parse_model_size(text: str) -> dict[str, Any]:
    """The configuration of a public model's name, or of a GPT-2 of LAYERSxHEADSxWIDTH."""
    if text in named_sizes():
        return {name: value for name, value in named_sizes()[text].items() if name != "hub"}
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if text not in GPT2_SIZES and not match:
        if "/" in text or Path(text).is_dir():
            raise ConfigError(
                f"--model {text!r} is not the name of a model.",
                f"Weights in a directory or on the hub are given with --init {text}.",
            )
        raise ConfigError(
            f"--model {text!r}: invalid size.",
            f"Choose {', '.join(SIZES)}, or LAYERSxHEADSxWIDTH such as 6x6x384.",
        )
    layers, heads, width = GPT2_SIZES.get(text) or (int(part) for part in match.groups())  # type: ignore[union-attr]
    if min(layers, heads, width) < 1 or width % heads:
        raise ConfigError(
            f"--model {text}: the width must be a multiple of the heads, and nothing zero.",
            f"For {heads or 1} heads try {layers or 1}x{heads or 1}x{64 * (heads or 1)}.",
        )
    return {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": width,
            "vocab_size": 50257}  # fmt: skip
