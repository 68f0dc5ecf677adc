"""The models of the zoo: their table, and each one as a task with synthetic data."""

import importlib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpukit.probe.parity import SeededTask
from tpukit.train.task import stack_samples

FOLDER = Path(__file__).parent.parent / "zoo"
TABLE = FOLDER / "models.toml"
CLASSES, WORDS, LENGTH = 4, 96, 16


@dataclass(frozen=True)
class Entry:
    """One line of the table: a model, and what it is fed."""

    library: str
    family: str
    model: str
    inputs: str
    """Which function of `INPUTS` makes a sample."""
    loss: str
    """Which function of `LOSSES` turns outputs into a loss."""
    side: int = 32
    """Height and width of its images."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor or config."""
    cut: list[str] = field(default_factory=list)
    """Patterns of the names of repeated blocks that are left out, where no setting does that."""
    optimized: bool = False
    """Whether XLA optimizes its step for the CPU: some round coarsely or run slowly without."""
    quick: bool = False
    """Whether it is in the default run."""
    recorded: bool = False
    """Whether no test runs it, for its size: `zoo_page.py --run` does, and its result is kept."""

    @property
    def name(self) -> str:
        return f"{self.library}-{self.family}"


def entries() -> dict[str, Entry]:
    """The table, by name."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    found = [
        Entry(library, family, **{**DEFAULT_INPUTS[library], **fields})
        for library, families in table.items()
        for family, fields in families.items()
    ]
    return {entry.name: entry for entry in found}


DEFAULT_INPUTS = {
    "timm": {"inputs": "image", "loss": "classes"},
    "torchvision": {"inputs": "image", "loss": "classes"},
    "transformers": {"inputs": "text", "loss": "own"},
}


# -- models --------------------------------------------------------------------------------------
def build(entry: Entry) -> nn.Module:
    """The model with random weights; nothing is downloaded."""
    model = BUILDERS[entry.library](entry)
    for name, _ in list(model.named_modules()):
        if any(fnmatchcase(name, pattern) for pattern in entry.cut):
            model.set_submodule(name, LeftOut())
    return model


class LeftOut(nn.Identity):
    """Hands on the first input of a block that takes several."""

    def forward(self, input: Tensor, *others: Tensor) -> Tensor:
        return input


def _timm(entry: Entry) -> nn.Module:
    import timm

    settings = {"num_classes": CLASSES, **entry.settings}
    if "." in entry.model:  # a class, where no function takes smaller sizes
        module, _, name = entry.model.rpartition(".")
        found: nn.Module = getattr(importlib.import_module(module), name)(**settings)
        return found
    return timm.create_model(entry.model, pretrained=False, **settings)


def _torchvision(entry: Entry) -> nn.Module:
    import torchvision

    arguments = {"weights": None, "num_classes": CLASSES}
    if entry.loss == "segmentation":
        arguments["weights_backbone"] = None
    return torchvision.models.get_model(entry.model, **arguments)


def _transformers(entry: Entry) -> nn.Module:
    import transformers

    model_class = getattr(transformers, entry.model)
    return model_class(model_class.config_class(**entry.settings))


BUILDERS = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}


# -- samples ---------------------------------------------------------------------------------------
def _image(entry: Entry, rng: np.random.Generator) -> dict[str, Any]:
    image = rng.standard_normal((3, entry.side, entry.side), dtype=np.float32)
    return {"pixel_values": image, "labels": rng.integers(CLASSES)}


def _pixels(entry: Entry, rng: np.random.Generator) -> dict[str, Any]:
    """An image with a class for each pixel."""
    labels = rng.integers(CLASSES, size=(entry.side, entry.side))
    return {**_image(entry, rng), "labels": labels}


def _words(rng: np.random.Generator) -> dict[str, Any]:
    """Token ids of one of many lengths, padded to `LENGTH`."""
    attended = np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH + 1)
    ids = np.where(attended, rng.integers(3, WORDS, size=LENGTH), 0)
    return {"input_ids": ids, "attention_mask": attended.astype(np.int64)}


def _text(entry: Entry, rng: np.random.Generator) -> dict[str, Any]:
    return {**_words(rng), "labels": rng.integers(CLASSES)}


def _language(entry: Entry, rng: np.random.Generator) -> dict[str, Any]:
    """Text whose labels are its own tokens."""
    words = _words(rng)
    return {**words, "labels": np.where(words["attention_mask"], words["input_ids"], -100)}


def _translation(entry: Entry, rng: np.random.Generator) -> dict[str, Any]:
    return {**_words(rng), "labels": rng.integers(3, WORDS, size=LENGTH // 2)}


def _image_and_text(entry: Entry, rng: np.random.Generator) -> dict[str, Any]:
    return {"pixel_values": _image(entry, rng)["pixel_values"], **_words(rng)}


def _speech(entry: Entry, rng: np.random.Generator) -> dict[str, Any]:
    """A mel spectrogram and its words."""
    features = rng.standard_normal((16, 2 * LENGTH), dtype=np.float32)
    return {"input_features": features, "labels": rng.integers(3, WORDS, size=LENGTH // 2)}


def _wave(entry: Entry, rng: np.random.Generator) -> dict[str, Any]:
    return {"input_values": rng.standard_normal(800, dtype=np.float32),
            "labels": rng.integers(CLASSES)}  # fmt: skip


INPUTS: dict[str, Callable[[Entry, np.random.Generator], dict[str, Any]]] = {
    "image": _image,
    "pixels": _pixels,
    "text": _text,
    "language": _language,
    "translation": _translation,
    "image-and-text": _image_and_text,
    "speech": _speech,
    "wave": _wave,
}


# -- losses --------------------------------------------------------------------------------------
def _classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of the scores that the model returns for its images."""
    scores = model(batch["pixel_values"])
    # Some return one set of scores a head while they train.
    heads = scores if isinstance(scores, (tuple, list)) else [scores]
    losses = [F.cross_entropy(s.float(), batch["labels"], reduction="none") for s in heads]
    return torch.stack(losses).sum(0)


def _segmentation(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["pixel_values"])["out"]
    return F.cross_entropy(scores.float(), batch["labels"], reduction="none").mean((1, 2))


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model computes itself."""
    return model(**batch).loss


def _contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, return_loss=True).loss


def _boxes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every query learns one class and one box: matching is not part of the network."""
    found = model(pixel_values=batch["pixel_values"])
    queries = found.logits.shape[1]
    labels = batch["labels"][:, None].expand(-1, queries).flatten()
    classes = F.cross_entropy(found.logits.float().flatten(0, 1), labels, reduction="none")
    return classes.unflatten(0, (-1, queries)).mean(1) + found.pred_boxes.float().mean((1, 2))


def _features(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A regression of the model's features: for those that have no head."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    found = model(**inputs).last_hidden_state.float()
    return (found - 1).square().flatten(1).mean(1)


LOSSES: dict[str, Callable[[nn.Module, dict[str, Tensor]], Tensor]] = {
    "classes": _classes,
    "segmentation": _segmentation,
    "own": _own,
    "contrastive": _contrastive,
    "boxes": _boxes,
    "features": _features,
}


class Zoo(SeededTask):
    """One model of the table."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def build_model(self, ops: Any) -> nn.Module:
        return build(self.entry)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = {name: value for name, value in batch.items() if name != "mask"}
        return {"loss": LOSSES[self.entry.loss](model, inputs)}

    def seeded_batches(self, rows: int, seed: int = 0) -> list[dict[str, Tensor]]:
        rng = np.random.default_rng(seed)
        samples = [INPUTS[self.entry.inputs](self.entry, rng) for _ in range(rows)]
        return [stack_samples(samples, rows)]
