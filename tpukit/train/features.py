"""Columns of a table as features beside what else a model sees: numbers and categories."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.errors import DataError
from tpukit.train.target import as_number, require_decimal_commas

MOST_CATEGORIES = 1000


@dataclass(frozen=True)
class TableFeatures:
    """What columns hold, as the training rows have it."""

    numbers: Mapping[str, tuple[float, float]]
    """Column -> mean and standard deviation."""
    categories: Mapping[str, tuple[str, ...]]
    """Column -> its values."""

    @classmethod
    def fitted(cls, rows: Sequence[Mapping[str, str]]) -> Self:
        """Of the training rows' texts by column. Raises DataError for texts that do not repeat."""
        numbers, categories = dict[str, tuple[float, float]](), dict[str, tuple[str, ...]]()
        for name in rows[0]:
            texts = [row[name].strip() for row in rows]
            found = [as_number(text) for text in texts if text]
            known = [number for number in found if number is not None]
            if known and len(known) == len(found):
                require_decimal_commas(texts, f"features {name}")
                numbers[name] = float(np.mean(known)), float(np.std(known)) or 1.0
                continue
            values = sorted({*texts})
            if len(values) > min(MOST_CATEGORIES, max(2, len(rows) / 2)):
                raise DataError(
                    f"features: {len(values)} texts of {name} for {len(rows)} rows are no"
                    " categories.",
                    "Leave it out: --set features=COLUMN,COLUMN",
                )
            categories[name] = tuple(values)
        return cls(numbers, categories)

    @classmethod
    def from_json(cls, content: bytes | str) -> Self:
        found = json.loads(content)
        numbers = {name: (float(m), float(s)) for name, (m, s) in found["numbers"].items()}
        return cls(numbers, {name: tuple(v) for name, v in found["categories"].items()})

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def columns(self) -> list[str]:
        """Numbers, then categories."""
        return [*self.numbers, *self.categories]

    def values(self, texts: Mapping[str, str]) -> NDArray[np.float32]:
        """(columns,): standardised numbers (0 where there is none), then places of categories from
        1 (0: not seen in training)."""
        found = []
        for name, (mean, spread) in self.numbers.items():
            number = as_number(texts[name])
            found.append(0.0 if number is None else (number - mean) / spread)
        for name, known in self.categories.items():
            text = texts[name].strip()
            found.append(1.0 + known.index(text) if text in known else 0.0)
        return np.array(found, np.float32)


class WithFeatures(nn.Module):
    """A network's features (rows, width) beside columns of a table, and one linear layer."""

    def __init__(self, network: nn.Module, width: int, features: TableFeatures, outputs: int):
        super().__init__()
        self.network, self.numbers = network, len(features.numbers)
        sizes = [len(values) + 1 for values in features.categories.values()]
        widths = [min(16, (size + 3) // 2) for size in sizes]
        pairs = zip(sizes, widths, strict=True)
        self.embeddings = nn.ModuleList(nn.Embedding(size, wide) for size, wide in pairs)
        self.head = nn.Linear(width + self.numbers + sum(widths), outputs)

    def forward(self, inputs: Tensor, features: Tensor) -> Tensor:
        """features: (rows, columns), as `TableFeatures.values` has them."""
        found = self.network(inputs)
        numbers, places = features[:, : self.numbers], features[:, self.numbers :].long()
        embedded = [layer(places[:, i]) for i, layer in enumerate(self.embeddings)]
        parts = [found, numbers.to(found.dtype), *(part.to(found.dtype) for part in embedded)]
        result: Tensor = self.head(torch.cat(parts, 1))
        return result
