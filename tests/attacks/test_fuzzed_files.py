"""Fuzzed input for every reader of files: a result or an error of tpukit's, nothing else."""

import contextlib
import dataclasses
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fuzzed_inputs import ALL_BYTES, SAMPLE, TRACE, mutated
from hypothesis import HealthCheck, given, seed, settings

from tpukit.errors import TpukitError
from tpukit.io.units import parse_bytes, parse_duration

EXAMPLES = 40
"""Inputs of each reader."""
Attack = Callable[[Path, bytes], Any]


def _csv(path: Path, content: bytes) -> None:
    from tpukit.tasks.llm.data.rows import extra_columns, read_rows

    path.write_bytes(content)
    extra_columns(path)
    list(read_rows(path, summaries=True))


def _config(path: Path, content: bytes) -> None:
    from tpukit.train.config import read_config_file, resolve

    path.write_bytes(content)
    resolve(read_config_file(path).train)


def _run_config(path: Path, content: bytes) -> None:
    from tpukit.train.run_folder import RunFolder, read_config

    (path.parent / "config.toml").write_bytes(content)
    read_config(RunFolder(path.parent))


def _state(path: Path, content: bytes) -> None:
    from tpukit.train.checkpoint import open_checkpoint

    (path.parent / "state.json").write_bytes(content)
    open_checkpoint(path.parent)


def _published(path: Path, content: bytes) -> None:
    from tpukit.tasks.eit.model.published import read_published

    path.write_bytes(content)
    read_published(path)


def _transformers(path: Path, content: bytes) -> None:
    import torch

    from tpukit.tasks.llm.model.load import load_lm, read_pretrained

    (path.parent / "config.json").write_bytes(content)
    (path.parent / "model.safetensors").write_bytes(content[::-1])
    found = read_pretrained(str(path.parent), 64)
    with torch.device("meta"):
        load_lm(found.shape, torch.float32, drawn=False)


def _normalisation(path: Path, content: bytes) -> None:
    from tpukit.tasks.eit.data.dataset import Normalisation, find_normalisation

    for name in ("mean.pth", "std.pth"):
        (path.parent / name).write_bytes(content)
    with contextlib.suppress(TpukitError):
        Normalisation.from_bytes(content)
    find_normalisation([path.parent])


def _sample(path: Path, content: bytes) -> None:
    from tpukit.tasks.eit.data.samples import read_sample

    sample = path.with_suffix(".npz")
    sample.write_bytes(content)
    read_sample(sample)


def _tokenizer(path: Path, content: bytes) -> None:
    from tpukit.tasks.llm.data.tokenizer_choice import load_tokenizer

    for suffix in (".tiktoken", ".json"):
        path.with_suffix(suffix).write_bytes(content)
        with contextlib.suppress(TpukitError):
            load_tokenizer(str(path.with_suffix(suffix)))


def _table(path: Path, content: bytes) -> None:
    from tpukit.tasks.images.data.listing import labelled_images
    from tpukit.tasks.images.settings import ImagesConfig
    from tpukit.train.labelled import labelled, table_with_rows

    path.write_bytes(content)
    rows = labelled(table_with_rows(path), ImagesConfig(data_path=str(path.parent)))
    labelled_images(rows, path.parent)


def _image(path: Path, content: bytes) -> None:
    from tpukit.tasks.images.data.files import decode

    path.write_bytes(content)
    decode(str(path), 32)


def _metrics(path: Path, content: bytes) -> None:
    """A damaged line is left out, and the page is written."""
    from tpukit.train.report.page import RunReport
    from tpukit.train.run_folder import RunFolder

    for name in ("metrics.jsonl", "tests.json", "log.txt"):
        (path.parent / name).write_bytes(content)
    (path.parent / "config.toml").write_text("[train]\n[task]\n")
    warnings: list[str] = []
    assert RunReport(RunFolder(path.parent), warnings.append).renew(), warnings


def _knowledge(path: Path, content: bytes) -> None:
    from tpukit.knowledge.error_table import read_known_errors

    path.write_bytes(content)
    read_known_errors([path])


def _test_set(path: Path, content: bytes) -> None:
    from tpukit.tasks.eit.data.measured import open_test_set

    (path.parent / ".simulation").mkdir()
    (path.parent / ".simulation" / "settings.json").write_bytes(content)
    (path.parent / "1.npz").write_bytes(SAMPLE)
    open_test_set(str(path.parent), None)


def _token_cache(path: Path, content: bytes) -> None:
    """A damaged cache is built again: its tokens are those of the file."""
    from tpukit.tasks.llm.data.token_cache import open_token_cache
    from tpukit.tasks.llm.data.tokenizer_choice import load_tokenizer

    path.with_suffix(".csv").write_bytes(b"id,dialogue,summary\n1,a b,c\n")
    path.with_suffix(".tiktoken").write_bytes(ALL_BYTES)
    tokenizer = load_tokenizer(str(path.with_suffix(".tiktoken")))
    with patch.dict(os.environ, TPUKIT_CACHE_DIR=str(path.parent)):
        opened = open_token_cache(path.with_suffix(".csv"), tokenizer, 64).example(0)
        expected = opened[0].tolist(), opened[1]
        [cache] = path.parent.rglob("*.tokens")
        whole = cache.read_bytes()
        at = random.Random(content).randrange(len(whole))
        cache.write_bytes(whole[:at] + content + whole[at + len(content) :])
        found = open_token_cache(path.with_suffix(".csv"), tokenizer, 64).example(0)
    assert (found[0].tolist(), found[1]) == expected, "other tokens"


def _units(path: Path, content: bytes) -> None:
    for parse in (parse_bytes, parse_duration):
        with contextlib.suppress(TpukitError):
            assert math.isfinite(parse(content.decode(errors="replace")))


def _settings(path: Path, content: bytes) -> None:
    """`--set NAME=VALUE` of every setting of the training, of decoding and of both tasks."""
    from tpukit.commands.options.training import parse_settings
    from tpukit.registry.classes import make_task
    from tpukit.tasks.eit.task import EITConfig, EITTask
    from tpukit.tasks.llm.settings import SummarizeConfig
    from tpukit.train.config import TrainConfig, build_settings, resolve

    rng = random.Random(content)
    text = content.decode(errors="replace")
    for config in (TrainConfig, SummarizeConfig, EITConfig):
        name = rng.choice([field.name for field in dataclasses.fields(config)])
        with contextlib.suppress(TpukitError):
            [(name, value)] = parse_settings([f"{name}={text}"]).items()
            if config is TrainConfig:
                resolve({name: value})
            elif config is SummarizeConfig:
                build_settings(SummarizeConfig, {name: value})
            else:
                make_task(EITTask, {name: value}, "./data")


READERS: dict[str, Attack] = {
    "csv": _csv, "config": _config, "run-config": _run_config, "state": _state,
    "published": _published, "transformers": _transformers,
    "normalisation": _normalisation, "sample": _sample, "tokenizer": _tokenizer,
    "units": _units, "settings": _settings,
    "table": _table, "image": _image, "metrics": _metrics, "knowledge": _knowledge,
    "test-set": _test_set, "token-cache": _token_cache,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
def test_fuzzed_input_of_a_reader(kind, tmp_path_factory):
    @seed(sorted(READERS).index(kind))
    @settings(max_examples=EXAMPLES, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(mutated(kind))
    def attack(content: bytes) -> None:
        try:
            READERS[kind](tmp_path_factory.mktemp(kind) / "file", content)
        except TpukitError as error:
            assert error.message and "\n" not in error.message, error.message
            assert len(error.message) < 3000, error.message[:100]
        assert not TRACE.exists(), "code of a pickle was executed"

    attack()
