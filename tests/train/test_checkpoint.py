"""Checkpoints survive damage, a full disk and a reader in between."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tpukit.train.checkpoint as checkpoint_module
from tpukit.errors import CheckpointError, NonFiniteLossError
from tpukit.train.checkpoint import (
    PlainState,
    list_checkpoints,
    newest_good,
    open_checkpoint,
    point,
    point_as_recorded,
    read_pointer,
)
from tpukit.train.checkpoint_writer import BackgroundWriter, write_checkpoint
from tpukit.train.finite import is_finite


class Made(dict):
    """A state of chosen values."""

    def state_dict(self):
        return self

    def load_state_dict(self, state_dict):
        self |= state_dict


def state(step: int, size: int = 5, plain: dict | None = None, **others) -> Made:
    values = torch.arange(size, dtype=torch.float32) + step
    tensors = {"model": {"w": values}, "ema": {"w": values + 1}, "optimizer": {"m/w": values + 2}}
    kept = PlainState(step, "tiny", {"lr": 0.1}, window=[0.1 + 0.2])
    beside = {"artifacts": {"mean.bin": b"mean"}, "extra": None, "stream": None, "trained": {"w"}}
    return Made({"plain": replace(kept, **plain or {}), **tensors, **beside, **others})


def test_what_is_written_is_read(tmp_path):
    write_checkpoint(tmp_path, state(7))
    checkpoint = newest_good(tmp_path, print)
    assert checkpoint.state == state(7)["plain"]
    assert torch.equal(checkpoint.tensors("ema")["w"], state(7)["ema"]["w"])
    assert checkpoint.artifacts() == {"mean.bin": b"mean"}
    assert read_pointer(tmp_path / "latest") == "step-00000007"


def test_each_file_is_opened_once(tmp_path, monkeypatch):
    """Many tensors are read in the time of their bytes: each opening reads the names of all."""
    many = {f"w{n}": torch.full((2,), float(n)) for n in range(9)}
    write_checkpoint(tmp_path, state(3, model=many, trained=set(many)))
    opened, safe_open = Counter(), checkpoint_module.safe_open

    def counted(path, framework):
        opened[path.name] += 1
        return safe_open(path, framework)

    monkeypatch.setattr(checkpoint_module, "safe_open", counted)
    read = list(open_checkpoint(next(tmp_path.glob("step-*"))).each_tensor())
    assert {name: float(t[0]) for file, name, t in read if file == "model"} == {
        f"w{n}": n for n in range(9)
    }
    assert opened == {f"{file}.safetensors": 1 for file in ("model", "ema", "optimizer")}


def test_the_last_two_and_the_best_are_kept(tmp_path):
    writer = BackgroundWriter(tmp_path)
    for step in (1, 2, 3, 4):
        writer.write(state(step), is_best=step == 1)
    writer.close()
    assert [p.name[-1] for p in list_checkpoints(tmp_path)] == ["4", "3", "1"]
    assert read_pointer(tmp_path / "best") == "step-00000001"


def damaged_places(folder: Path) -> list[tuple[Path, int]]:
    """Every file of a checkpoint, at its first, middle and last byte."""
    return [(f, at) for f in sorted(folder.iterdir()) for at in (0, f.stat().st_size // 2, -1)]


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_damage_anywhere_in_the_newest_falls_back_and_says_so(tmp_path, how):
    write_checkpoint(tmp_path, state(1))
    newest = write_checkpoint(tmp_path, state(2))
    for file, at in damaged_places(newest):
        content = file.read_bytes()
        if how == "flip":
            changed = bytearray(content)
            changed[at] ^= 0x10
            file.write_bytes(changed)
        elif how == "truncate":
            file.write_bytes(content[:at])
        else:
            file.unlink()
        told: list[str] = []
        assert newest_good(tmp_path, told.append).state.step == 1, (file.name, at)
        assert any("step-00000002" in line for line in told)
        assert any("step-00000001" in line for line in told)
        file.write_bytes(content)
    assert newest_good(tmp_path, print).state.step == 2


def test_a_changed_number_in_the_state_is_noticed(tmp_path):
    path = write_checkpoint(tmp_path, state(2)) / "state.json"
    body = json.loads(path.read_text())
    body["step"] = 3
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(path.parent)


def test_no_intact_checkpoint_is_an_error_with_a_way_on(tmp_path):
    (write_checkpoint(tmp_path, state(1)) / "state.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        newest_good(tmp_path, lambda line: None)
    assert "--no-resume" in caught.value.hint


def test_a_half_written_folder_is_not_seen_and_cleared(tmp_path):
    write_checkpoint(tmp_path, state(1))
    (tmp_path / ".step-00000002.partial").mkdir()
    assert newest_good(tmp_path, print).state.step == 1
    writer = BackgroundWriter(tmp_path)
    writer.write(state(3), is_best=False)
    writer.close()
    assert not list(tmp_path.glob(".*"))


def test_what_a_notebook_or_a_desktop_leaves_in_a_checkpoint_is_not_read(tmp_path):
    path = write_checkpoint(tmp_path, state(3))
    (path / ".ipynb_checkpoints").mkdir()
    (path / ".DS_Store").write_bytes(b"Finder")
    (path / "ema.safetensors.bak").write_bytes(b"a copy")
    (tmp_path / "step-00000009.bak").mkdir()
    checkpoint = newest_good(tmp_path, pytest.fail)
    assert checkpoint.artifacts() == {"mean.bin": b"mean"}
    assert checkpoint.stream() is None
    writer = BackgroundWriter(tmp_path)
    for step in (4, 5):
        writer.write(state(step), is_best=False)
    writer.close()
    assert (tmp_path / "step-00000009.bak").is_dir()


def test_a_checkpoint_made_the_best_one_keeps_all_else(tmp_path):
    path = write_checkpoint(tmp_path, state(3))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    writer = BackgroundWriter(tmp_path)
    writer.record_best(3, {"loss": 0.5, "step": 3.0})
    writer.close()
    checkpoint = open_checkpoint(path)
    assert checkpoint.state.best == {"loss": 0.5, "step": 3.0}
    assert read_pointer(tmp_path / "best") == path.name
    changed = {name for name, content in before.items() if (path / name).read_bytes() != content}
    assert changed == {"state.json"}


def test_pointers_that_a_killed_writer_left_behind_are_put_right(tmp_path):
    write_checkpoint(tmp_path, state(1))
    point(tmp_path / "best", "step-00000001")
    best = {"loss": 0.5, "step": 2.0}
    newest = write_checkpoint(tmp_path, state(2, plain={"best": best}))
    point(tmp_path / "latest", "step-00000001")
    point_as_recorded(open_checkpoint(newest))
    assert {read_pointer(tmp_path / name) for name in ("latest", "best")} == {newest.name}


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
     torch.int32, torch.bool],
)  # fmt: skip
def test_values_of_each_type_are_looked_at(dtype):
    values = torch.tensor([1.0, 0.0, 3.0]).to(dtype)
    assert is_finite(values) and is_finite(values[:0])
    if dtype.is_floating_point or dtype.is_complex:
        values[1] = torch.nan
        assert not is_finite(values)


def state_of(weight: float, buffer: float, moment: float) -> dict[str, dict[str, torch.Tensor]]:
    model = {"w": torch.tensor([0.0, weight]), "mask": torch.tensor([0.0, buffer])}
    return {"model": model, "optimizer": {"m/w": torch.tensor([0.0, moment])}}


@pytest.mark.parametrize(
    ("tensors", "allowed", "told"),
    [
        (state_of(1, 1, 1), [], None),
        (state_of(1, -torch.inf, torch.inf), [], None),
        (state_of(1, torch.nan, 1), ["mask"], None),
        (state_of(torch.inf, 1, 1), [], "w of model holds inf"),
        (state_of(torch.nan, 1, 1), [], "w of model holds nan"),
        (state_of(1, torch.nan, 1), [], "mask of model holds nan"),
        (state_of(1, 1, torch.nan), [], "m/w of optimizer holds nan"),
    ],
)
def test_no_checkpoint_holds_a_state_that_no_run_can_go_on_with(tmp_path, tensors, allowed, told):
    """Infinities are meant in masks; what was not finite at the start may stay so."""
    made = state(2, plain={"not_finite": allowed}, **tensors)
    write_checkpoint(tmp_path, state(1))
    if told is None:
        write_checkpoint(tmp_path, made)
        assert newest_good(tmp_path, pytest.fail).state.step == 2
    else:
        with pytest.raises(NonFiniteLossError, match=told):
            write_checkpoint(tmp_path, made)
        assert newest_good(tmp_path, pytest.fail).state.step == 1
