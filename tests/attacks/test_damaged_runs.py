"""Damaged files of a run: it goes on to the same bytes, or an error says what is wrong."""

import functools
import hashlib
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from fake_backend import FakeBackend
from tiny_task import Tiny

from tpukit.errors import TpukitError
from tpukit.train.config import TrainConfig
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder, open_run

HOW = ("flip", "cut", "empty", "remove", "swap", "folder", "loop", "random", "append")


def _train(folder: Path, steps: int) -> str:
    """The digest of the weights, EMA and optimizer after `steps` steps."""
    config = TrainConfig(max_steps=steps, global_batch_size=16, ckpt_every=2, num_workers=0,
                         ema_decay=0.9, ema_every=2, ema_warmup=2)  # fmt: skip
    train_run(TrainingRequest(Tiny(), config, RunFolder(folder)), FakeBackend(), lambda _: None)
    last = folder / "checkpoints" / f"step-{steps:08d}"
    content = b"".join(p.read_bytes() for p in sorted(last.glob("*.safetensors")))
    return hashlib.sha256(content).hexdigest()


@functools.cache
def _original() -> tuple[Path, str]:
    """A run of four steps, and the digest of one of six that was never stopped."""
    folder = Path(tempfile.mkdtemp())
    _train(folder / "run", 4)
    return folder / "run", _train(folder / "whole", 6)


@pytest.mark.parametrize(
    "number", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 100))]
)
def test_a_run_with_one_damaged_file_is_used_and_resumed(number):
    rng = random.Random(number)
    run, expected = _original()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        shutil.copytree(run, folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        file = rng.choice(files)
        _damage(file, rng.choice(HOW), rng, files)
        try:
            open_run(folder, lambda _: None).weights()
        except TpukitError as error:
            assert error.message
        try:
            found = _train(folder, 6)
        except TpukitError as error:
            assert error.message
            return
        assert found == expected, f"{file.relative_to(folder)}: other weights"


def _damage(file: Path, how: str, rng: random.Random, files: list[Path]) -> None:
    content = bytearray(file.read_bytes())
    at = rng.randrange(max(len(content), 1))
    if how in ("remove", "folder", "loop"):
        file.unlink()
        if how == "folder":
            file.mkdir()
        if how == "loop":
            file.symlink_to(file)
        return
    if how == "flip" and content:
        content[at] ^= 1 << rng.randrange(8)
    changed = {
        "cut": bytes(content[:at]), "empty": b"", "append": bytes(content) + rng.randbytes(9),
        "swap": rng.choice(files).read_bytes(), "random": rng.randbytes(len(content)),
    }  # fmt: skip
    file.write_bytes(changed.get(how, bytes(content)))
    os.utime(file)
