"""Settings of the text task."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tpukit.io.ranges import DECAY, Range, setting
from tpukit.train.labelled import TableSettings
from tpukit.train.target_loss import LossName

SHARE = Range(0, 1, whole=False)
SCRATCH = "scratch"


@dataclass(frozen=True)
class TextConfig(TableSettings):
    """The task's settings (`--set NAME=VALUE`)."""

    model: str = "answerdotai/ModernBERT-base"
    """A model of transformers: a name on the hub or a folder; scratch is a small one that knows
    nothing."""
    text_columns: str | None = None
    """Column of the text, or of both texts of a pair, separated by commas (default: text or the
    like, else the only one of several words)."""
    max_length: int = setting(512, Range(8, 2**20))
    """Most tokens of a text."""
    long_texts: Literal["cut", "windows"] = "cut"
    """Longer texts are cut off, or read in windows, whose predictions are averaged."""
    overlap: int = setting(64, Range(0, 2**20))
    """Tokens that two windows share."""
    shapes: int = setting(4, Range(1, 32))
    """Number of lengths that batches have, chosen from the data."""
    pooling: Literal["model", "first", "mean", "max", "last"] = "model"
    """What is read of the tokens: what the model's own classifier reads, or the first, the mean,
    the largest values or the last, for a linear layer."""
    dropout: float | None = setting(None, DECAY)
    """Dropout in all layers (default: the model's)."""
    layer_decay: float = setting(1.0, Range(0.01, 1, whole=False))
    """Factor of the learning rate from each layer to the one before; 1 is off."""
    lora_rank: int = setting(0, Range(0, 2**16))
    """Rank of LoRA adapters beside frozen weights; 0 trains all weights."""
    lora_alpha: float = setting(16.0, Range(0, 1e6, whole=False, includes_low=False))
    """Scale of the adapters: their update is multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = setting(0.0, DECAY)
    """Dropout on the input of the adapters."""
    lora_targets: str = "qkv,attention_out"
    """Layers with an adapter: qkv, attention_out, mlp_in, mlp_out, or names of the model's."""
    recompute: bool | Literal["auto"] = "auto"
    """Computes layers again in the backward pass instead of keeping them: true, false, or where
    memory asks for it."""
    loss: LossName | None = None
    """Loss: of one class cross_entropy; of labels bce or asymmetric; of numbers mse, mae or huber;
    of an ordered score these, ordinal or cross_entropy (default: the first of each)."""
    smoothing: float = setting(0.0, SHARE)
    """Label smoothing of cross_entropy."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights in the training loss: balanced counts each class or score alike, and of each label
    both values."""
    probabilities: bool = False
    """Whether `predict` writes a column of probabilities for each class."""

    def problems(self) -> Iterator[str]:
        """What is wrong beyond types and ranges."""
        yield from super().problems()
        if self.long_texts == "windows" and self.overlap > self.max_length // 2:
            yield f"overlap {self.overlap} is more than half of max_length."

    @property
    def texts(self) -> list[str]:
        """The names in `text_columns`."""
        return [name.strip() for name in (self.text_columns or "").split(",") if name.strip()]
