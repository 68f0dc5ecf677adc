"""Data sets whose samples are tuples, as most of PyTorch's are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from tpukit.errors import DataError
from tpukit.train.data.stream import is_stream


class NamedSamples:
    """A map-style data set of tuples as one of dicts."""

    def __init__(self, data: Any, names: tuple[str, ...]) -> None:
        self.data = data
        self.names = names

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.named_values(self.data[index], f"sample {index}")

    def named_values(self, values: Any, place: str) -> dict[str, Any]:
        """One sample. Raises DataError where there are more or fewer values than names."""
        if not isinstance(values, tuple | list) or len(values) != len(self.names):
            found = len(values) if isinstance(values, tuple | list) else type(values).__name__
            raise DataError(
                f"{place} of {type(self.data).__name__}: expected a tuple of {len(self.names)}"
                f" values ({', '.join(self.names)}), found {found}.",
                "Give `named` one name for each value of a sample.",
            )
        return dict(zip(self.names, values, strict=True))


class NamedStream(IterableDataset[dict[str, Any]]):
    """A stream of tuples as one of dicts; its state is the stream's."""

    def __init__(self, data: Any, names: tuple[str, ...]) -> None:
        self.data = data
        self.names = names
        for member in ("state_dict", "load_state_dict", "set_epoch"):
            if hasattr(data, member):
                setattr(self, member, getattr(data, member))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        samples = NamedSamples(self.data, self.names)
        for index, values in enumerate(self.data):
            yield samples.named_values(values, f"sample {index}")


def named(data: Any, *names: str) -> Any:
    """A data set of tuples with each value under a name: `named(CIFAR10(...), "image", "label")`.

    Works for map-style data sets and for streams.
    """
    return NamedStream(data, names) if is_stream(data) else NamedSamples(data, names)
