"""Exported weights load without a run, by the lines of their README, and compute the same."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from runs import TINY
from safetensors.torch import load_file
from tiny_task import Tiny
from torch import nn

import tpukit
from tpukit import cli
from tpukit.errors import DataError
from tpukit.hardware.backend import TorchOps
from tpukit.tasks.eit.task import EITTask
from tpukit.train.task import PlanSettings
from tpukit.train.weights import export, settings_of


def blocks(folder: Path) -> list[str]:
    """The code of a README."""
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)


def run_in(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch, **names: object) -> nn.Module:
    """The `model` that lines of a README make, run beside it."""
    monkeypatch.chdir(folder)
    exec(code, names)
    model = names["model"]
    assert isinstance(model, nn.Module) and not model.training
    return model


def test_a_tasks_weights(tmp_path, monkeypatch, capfd):
    run, folder = tmp_path / "run", tmp_path / "out"
    tpukit.fit(Tiny(width=16), results_dir=run, hw="cpu", max_steps=4, log=lambda line: None)
    capfd.readouterr()
    assert cli.run(["test", "--run", str(run), "--export", str(folder)]) == 0
    assert "model.safetensors, note.txt, README.md" in capfd.readouterr().out
    own, by_task = blocks(folder)
    built = Tiny(width=16).build_model(TorchOps())
    inputs, trained = torch.randn(3, 8), tpukit.load(run).model
    with torch.no_grad():
        expected = trained(inputs)
        assert torch.equal(run_in(folder, own, monkeypatch, model=built)(inputs), expected)
        assert torch.equal(run_in(folder, by_task, monkeypatch)(inputs), expected)
    assert TINY in (folder / "README.md").read_text()


class Tied(nn.Module):
    """An output layer that shares the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.output.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(3), persistent=False)


class TiedTask(Tiny):
    name = "tied"

    def build_model(self, ops):
        return Tied()


@dataclass
class Fields(Tiny):
    """A task whose constructor a dataclass writes."""

    width: int = 8
    samples: int = 64
    noise: float = 0.1
    name = "fields"
    dropout = bad = pause = 0


def test_the_settings_of_a_dataclass_are_named(tmp_path):
    task = Fields(width=3)
    export(task, task.build_model(TorchOps()).state_dict(), {}, tmp_path)
    assert "Fields(width=3, samples=64, noise=0.1).plain_model" in blocks(tmp_path)[1]


class Sized(Tiny):
    def __init__(self, widths=(1,), limits=None, layer=None):
        super().__init__()


def test_tuples_and_tables_are_recorded():
    given = {"widths": (2, 3), "limits": {"low": 0.1}}
    assert settings_of(Sized(**given, layer=torch.nn.ReLU())) == given


def test_tied_weights_stand_under_each_name(tmp_path):
    weights = {name: value.clone() for name, value in Tied().named_parameters()}
    weights |= {n: b.clone() for n, b in Tied().named_buffers() if n != "table"}
    export(TiedTask(), weights, {}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert Tied().load_state_dict(tensors, strict=True)
    assert torch.equal(tensors["output.weight"], tensors["embedding.weight"])
    again = TiedTask().plain_model(tensors)
    assert torch.equal(again.output.weight, weights["embedding.weight"])


def test_eit_weights(tmp_path, monkeypatch):
    task = EITTask(size="tiny")
    torch.manual_seed(0)
    built = task.build_model(TorchOps()).eval()
    export(task, built.state_dict(), {"normalisation.npz": b"kept"}, tmp_path)
    own, by_task = blocks(tmp_path)
    assert "EITTask(size='tiny')" in by_task
    batch = task.probe_batches(PlanSettings(2, 2, 1, 0))[0]
    inputs = batch["noise"], batch["t"], batch["voltages"]
    fresh = task.build_model(TorchOps())
    with torch.no_grad():
        expected = built(*inputs)
        for model in (run_in(tmp_path, own, monkeypatch, model=fresh),
                      run_in(tmp_path, by_task, monkeypatch)):  # fmt: skip
            assert torch.equal(model(*inputs), expected)
    assert (tmp_path / "normalisation.npz").read_bytes() == b"kept"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        export(TiedTask(), Tied().state_dict(), {}, tmp_path / "file" / "out")


def test_the_result_as_json(tmp_path):
    from runs import result
    from runs import tpukit as command

    run = tmp_path / "run"
    tpukit.fit(Tiny, results_dir=run, hw="cpu", max_steps=1, log=lambda line: None)
    fields = result(command("test", "--run", run, "--export", tmp_path / "out", "--json"))
    assert (fields["task"], fields["path"]) == ("tiny", str(tmp_path / "out"))
    assert json.dumps(fields["files"]).count("model.safetensors") == 1
    assert all(Path(file).is_file() for file in fields["files"])
