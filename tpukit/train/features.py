"""Columns of a table as features beside what else a model sees: numbers and categories."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.errors import DataError
from tpukit.train.target import as_number, is_missing, require_decimal_commas

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
        """Of the training rows' texts by column; a column of one value is left out.

        Raises DataError for texts that do not repeat."""
        numbers, categories = dict[str, tuple[float, float]](), dict[str, tuple[str, ...]]()
        for name in rows[0]:
            texts = [row[name].strip() for row in rows]
            found = [as_number(text) for text in texts if not is_missing(text)]
            known = [number for number in found if number is not None]
            if len({*known}) > 1 and len(known) == len(found):
                require_decimal_commas(texts, f"features {name}")
                numbers[name] = float(np.mean(known)), float(np.std(known))
                continue
            values = sorted({*texts})
            if len(values) > min(MOST_CATEGORIES, max(2, len(rows) / 2)):
                raise DataError(
                    f"features: {len(values)} texts of {name} for {len(rows)} rows are no"
                    " categories.",
                    "Leave it out: --set features=COLUMN,COLUMN",
                )
            if len(values) > 1:
                categories[name] = tuple(values)
        return cls(numbers, categories)

    @classmethod
    def from_json(cls, content: bytes | str) -> Self:
        found = json.loads(content)
        numbers = {name: (float(m), float(s)) for name, (m, s) in found["numbers"].items()}
        return cls(numbers, {name: tuple(v) for name, v in found["categories"].items()})

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        """For a log line."""
        many = (f"{name} ({len(values)} categories)" for name, values in self.categories.items())
        return ", ".join([*(f"{name} (a number)" for name in self.numbers), *many])

    @property
    def columns(self) -> list[str]:
        """Numbers, then categories."""
        return [*self.numbers, *self.categories]

    def require(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Raises what `values` raises of any of these rows."""
        for row in rows:
            self.values(row)

    def unseen(self, rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Lines about categories that training has not shown."""
        for name, known in self.categories.items():
            new = [text for row in rows if (text := row[name].strip()) not in known]
            if new:
                yield (
                    f"Warning: {len(new)} of {len(rows)} rows have a {name} that training had not"
                    f" ({new[0]!r}): the mean of the known ones ({', '.join(known[:3])}, ...)"
                    " stands for it."
                )

    def values(self, texts: Mapping[str, str]) -> NDArray[np.float32]:
        """(columns,): standardised numbers (0 where there is none), then places of categories from
        1 (0: not seen in training). Raises DataError for a text among numbers."""
        found = []
        for name, (mean, spread) in self.numbers.items():
            number = as_number(texts[name])
            if number is None and not is_missing(texts[name].strip()):
                raise DataError(
                    f"features {name}: {texts[name]!r} is no number, as the training rows have.",
                    "Correct it, or leave it empty.",
                )
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
        embedded = [_embedded(layer, places[:, i]) for i, layer in enumerate(self.embeddings)]
        parts = [found, numbers.to(found.dtype), *(part.to(found.dtype) for part in embedded)]
        result: Tensor = self.head(torch.cat(parts, 1))
        return result


def _embedded(layer: nn.Module, places: Tensor) -> Tensor:
    """(rows, width); of a category that training has not shown the mean of those it has."""
    weight: Any = layer.weight
    found: Tensor = layer(places)
    return torch.where(places[:, None] > 0, found, weight[1:].mean(0))
