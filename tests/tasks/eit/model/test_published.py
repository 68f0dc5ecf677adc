"""Checkpoints of the published code: read, and refused with a reason."""

import pickle

import pytest
import torch
from fake_backend import FakeBackend

from tpukit.errors import CheckpointError
from tpukit.tasks.eit.model.network import Network, NetworkConfig
from tpukit.tasks.eit.model.published import load_published, read_published

CONFIG = NetworkConfig(width=32, heads=2, levels=2, patch=4, image_side=64)


@pytest.fixture
def released(tmp_path):
    """A file as the published code writes it."""
    torch.manual_seed(1)
    path = tmp_path / "best.pt"
    torch.save({"model": Network(CONFIG, FakeBackend()).state_dict(), "epoch": 17}, path)
    return path


def test_a_released_checkpoint_loads_into_the_lean_form(released):
    network = Network(CONFIG, FakeBackend())
    weights = read_published(released)
    load_published(network, weights)
    expected = torch.load(released, weights_only=True)["model"]
    found = network.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_another_size_is_named(released):
    wider = NetworkConfig(width=64, heads=2, levels=3, patch=4, image_side=64)
    with pytest.raises(CheckpointError, match=r"width 32, 2 levels.*width 64, 3 levels") as caught:
        load_published(Network(wider, FakeBackend()), read_published(released))
    assert "size=NAME" in caught.value.hint


def test_missing_unknown_and_misshapen_tensors_are_named(released):
    content = torch.load(released, weights_only=True)
    weights = content["model"]
    del weights["final_layer.linear.bias"]
    weights["extra"] = torch.zeros(1)
    weights["blocks.mid.norm1.g"] = torch.zeros(1, 1, 5)
    torch.save(content, released)
    with pytest.raises(CheckpointError) as caught:
        load_published(Network(CONFIG, FakeBackend()), read_published(released))
    message = caught.value.message
    assert "lacks final_layer.linear.bias" in message
    assert "has an unknown extra" in message
    assert "blocks.mid.norm1.g of shape (1, 1, 5), not (1, 1, 32)" in message


class Trap:
    """Would run code when unpickled."""

    def __reduce__(self):
        return (print, ("executed",))


NO_CHECKPOINTS = {
    "missing": lambda path: None,
    "text": lambda path: path.write_bytes(b"no checkpoint"),
    "empty": lambda path: path.write_bytes(b""),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"model": Trap()})),
    "trap": lambda path: torch.save({"model": Trap()}, path),
    "no model": lambda path: torch.save({"weights": {}}, path),
    "list": lambda path: torch.save([1, 2], path),
    "no tensors": lambda path: torch.save({"model": {"a": 1}}, path),
    "integer keys": lambda path: torch.save({"model": {1: torch.zeros(1)}}, path),
    "unknown opcode": lambda path: path.write_bytes(bytes([128, 2, 101, 46])),
    "empty stack": lambda path: path.write_bytes(b"0."),
    "no mark": lambda path: path.write_bytes(b"]e."),
}


@pytest.mark.parametrize("write", NO_CHECKPOINTS.values(), ids=NO_CHECKPOINTS)
def test_anything_else_is_refused(tmp_path, write, capsys):
    path = tmp_path / "file.pt"
    write(path)
    with pytest.raises(CheckpointError) as caught:
        read_published(path)
    assert str(path) in caught.value.message and caught.value.hint
    assert "executed" not in capsys.readouterr().out


def test_a_truncated_file_is_refused(released):
    released.write_bytes(released.read_bytes()[:-1000])
    with pytest.raises(CheckpointError):
        read_published(released)
