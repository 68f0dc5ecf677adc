"""Fuzzed input for every reader and option: a result or an error of tpukit's, nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as some

from tpukit.errors import TpukitError
from tpukit.io.units import parse_bytes, parse_duration

EXAMPLES = 10
"""Inputs of one attack."""
TRACE = Path(tempfile.gettempdir()) / f"campaign-trap-{os.getpid()}"
Attack = Callable[[Path, bytes], Any]


class Trap:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(TRACE),))


def _csv(path: Path, content: bytes) -> None:
    from tpukit.tasks.summarize.data.csv_file import extra_columns, read_rows

    path.write_bytes(content)
    extra_columns(path)
    list(read_rows(path, summaries=True))


def _config(path: Path, content: bytes) -> None:
    from tpukit.train.config import read_config_file, resolve

    path.write_bytes(content)
    resolve(read_config_file(path).train)


def _run_config(path: Path, content: bytes) -> None:
    from tpukit.train.storage.run_folder import RunFolder, read_config

    (path.parent / "config.toml").write_bytes(content)
    read_config(RunFolder(path.parent))


def _state(path: Path, content: bytes) -> None:
    from tpukit.train.storage.checkpoint import open_checkpoint

    (path.parent / "state.json").write_bytes(content)
    open_checkpoint(path.parent)


def _published(path: Path, content: bytes) -> None:
    from tpukit.tasks.eit.model.published import read_published

    path.write_bytes(content)
    read_published(path)


def _nanogpt(path: Path, content: bytes) -> None:
    from tpukit.tasks.summarize.model.weights import read_pretrained

    path.write_bytes(content)
    read_pretrained(str(path))


def _transformers(path: Path, content: bytes) -> None:
    from tpukit.tasks.summarize.model.weights import read_pretrained

    (path.parent / "config.json").write_bytes(content)
    (path.parent / "model.safetensors").write_bytes(content[::-1])
    read_pretrained(str(path.parent))


def _normalisation(path: Path, content: bytes) -> None:
    from tpukit.tasks.eit.data.normalisation import Normalisation, find_normalisation

    for name in ("mean.pth", "std.pth"):
        (path.parent / name).write_bytes(content)
    with contextlib.suppress(TpukitError):
        Normalisation.from_bytes(content)
    find_normalisation([path.parent])


def _sample(path: Path, content: bytes) -> None:
    from tpukit.tasks.eit.data.sample_file import read_sample

    sample = path.with_suffix(".npz")
    sample.write_bytes(content)
    read_sample(sample)


def _tokenizer(path: Path, content: bytes) -> None:
    from tpukit.tasks.summarize.data.tokenizer_choice import load_tokenizer

    for suffix in (".tiktoken", ".json"):
        path.with_suffix(suffix).write_bytes(content)
        with contextlib.suppress(TpukitError):
            load_tokenizer(str(path.with_suffix(suffix)))


def _log(path: Path, content: bytes) -> None:
    from tpukit.knowledge.error_table import known_errors
    from tpukit.probe.logs import explain_log, open_log

    path.write_bytes(content)
    explain_log(open_log(str(path), 10.0), known_errors())


def _code(path: Path, content: bytes) -> None:
    from tpukit import cli

    path.with_suffix(".py").write_bytes(content)
    assert cli.run(["doctor", "--json", str(path.with_suffix(".py"))]) in (0, 1, 2)


def _units(path: Path, content: bytes) -> None:
    for parse in (parse_bytes, parse_duration):
        with contextlib.suppress(TpukitError):
            assert math.isfinite(parse(content.decode(errors="replace")))


def _settings(path: Path, content: bytes) -> None:
    """`--set NAME=VALUE` of every setting of the training, of decoding and of both tasks."""
    from tpukit.commands.options.training import parse_settings
    from tpukit.tasks.eit.task import EITConfig, EITTask
    from tpukit.tasks.registry import make_task
    from tpukit.tasks.summarize.settings import SummarizeConfig
    from tpukit.train.config import TrainConfig, resolve

    rng = random.Random(content)
    text = content.decode(errors="replace")
    for config in (TrainConfig, SummarizeConfig, EITConfig):
        name = rng.choice([field.name for field in dataclasses.fields(config)])
        with contextlib.suppress(TpukitError):
            [(name, value)] = parse_settings([f"{name}={text}"]).items()
            if config is TrainConfig:
                resolve({name: value})
            elif config is SummarizeConfig:
                SummarizeConfig(**{name: value}).check()
            else:
                make_task(EITTask, {name: value}, "./data")


READERS: dict[str, Attack] = {
    "csv": _csv, "config": _config, "run-config": _run_config, "state": _state,
    "published": _published, "nanogpt": _nanogpt, "transformers": _transformers,
    "normalisation": _normalisation, "sample": _sample, "tokenizer": _tokenizer, "log": _log,
    "units": _units, "settings": _settings,
}  # fmt: skip


# -- what they are given ------------------------------------------------------------------------
def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _archive(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


VALUES = [b"inf", b"nan", b"-1", b"1e400", b"9" * 25, b"''", b"[[[[", b"{a=1}", b"true",
          b"1" * 5000,
          b"2099-01-01", b"0x7fffffffffffffff", b"8h30m", b"4GB", b"\xf0\x9f\x98\x80"]  # fmt: skip
SEEDS: dict[str, list[bytes]] = {
    "csv": [b"id,dialogue,summary\n1,a,b\n", b'id,dialogue,summary\r\n1,"a\r\nb",c\r\n',
            b"\xef\xbb\xbfid;dialogue;summary\n"],
    "config": [b"lr = 0.1\n[train]\nmax_steps = 3\n[task]\nsize = 'tiny'\n", *VALUES],
    "run-config": [b"# SHA-256 of the lines below: 0\n[train]\n[task]\n",
                   b"[train]\n[task]\na=1\n"],
    "state": [b'{"format": 1, "step": 1, "sha256": {}}', b"[]", b"{}"],
    "published": [_saved({"model": {"a": torch.zeros(2)}, "epoch": 1}), _saved({"model": Trap()}),
                  pickle.dumps(Trap()), _saved([1]), _saved({"model": {1: torch.zeros(1)}})],
    "nanogpt": [_saved({"model": {"wte.weight": torch.zeros(2, 2)}, "model_args": {
        "n_layer": 1, "n_head": 1, "n_embd": 2, "vocab_size": 2, "block_size": 2}}),
        _saved({"model": {}, "model_args": {}}), pickle.dumps(Trap(), 2)],
    "transformers": [json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 2,
                                 "vocab_size": 2, "n_positions": 2}).encode(), b"[]", b"{}"],
    "normalisation": [_saved(torch.ones(1, 16, 13)), _saved(Trap()), pickle.dumps(Trap()),
                      _archive(mean=np.ones(208), std=np.ones(208))],
    "sample": [_archive(ys=np.zeros((208, 1)), xs=np.zeros((128, 128))), _archive(ys=np.zeros(3)),
               _archive(ys=np.array([Trap()], object)), pickle.dumps(Trap())],
    "tokenizer": [b"IQ== 0\nIg== 1\n", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}'],
    "log": [b"Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 'x'\n"],
    "units": VALUES,
    "settings": VALUES,
}  # fmt: skip


@some.composite
def mutated(draw: Any, kind: str) -> bytes:
    """A valid or a hostile input of a reader, with a few bytes cut, changed, added or repeated."""
    content = bytearray(draw(some.sampled_from(SEEDS[kind])))
    for _ in range(draw(some.integers(0, 4))):
        at = draw(some.integers(0, len(content)))
        match draw(some.sampled_from(["flip", "cut", "add", "repeat", "text"])):
            case "flip" if at < len(content):
                content[at] ^= 1 << draw(some.integers(0, 7))
            case "cut":
                del content[at : at + draw(some.integers(1, 64))]
            case "add":
                content[at:at] = draw(some.binary(max_size=16))
            case "repeat":
                content[at:at] = content[:at][-64:]
            case "text":
                content[at:at] = draw(some.text(max_size=16)).encode(errors="surrogatepass")
    return bytes(content)


def fuzz(number: int) -> None:
    """Attack `number`: ten inputs of one reader. Raises what was neither result nor error."""
    kind = sorted(READERS)[number % len(READERS)]

    @seed(number)
    @settings(max_examples=EXAMPLES, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(mutated(kind))
    def attack(content: bytes) -> None:
        with _folder() as folder:
            try:
                READERS[kind](folder / "file", content)
            except TpukitError as error:
                assert error.message and "\n" not in error.message, error.message
                assert len(error.message) < 3000, error.message[:100]
        assert not TRACE.exists(), "code of a pickle was executed"

    attack()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
