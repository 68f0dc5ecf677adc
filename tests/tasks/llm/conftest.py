"""What the tests of the summaries share: plain operations, small models, small files."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import compiled_without_inductor  # noqa: F401
from fake_backend import FakeBackend

from tpukit.tasks.llm.data.tokenizer import Tokenizer
from tpukit.tasks.llm.data.tokenizer_choice import train_tokenizer
from tpukit.tasks.llm.generate import make_dialogue

# transformers imports accelerate, which would take torch_xla's device for every later test.
with pytest.MonkeyPatch.context() as environment:
    environment.setenv("USE_TORCH_XLA", "0")
    import accelerate  # noqa: F401


@pytest.fixture
def ops() -> FakeBackend:
    """A CPU's."""
    return FakeBackend()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    samples = [make_dialogue(0, "train", index) for index in range(300)]
    return train_tokenizer((t for s in samples for t in (s.dialogue, s.summary)), 512)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the user's cache."""
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def write_csv() -> Callable[[Path, list[str], list[list[str]]], Path]:
    def write(path: Path, columns: list[str], rows: list[list[str]]) -> Path:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)
        return path

    return write
