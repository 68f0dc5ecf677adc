"""Compiled models: as many shapes as training and validation need, and a word beyond them."""

import pytest
import torch
from fake_backend import FakeBackend
from torch import nn

from tpukit.hardware.eager import compiling


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


class Recomputing(nn.Module):
    """A layer whose activations are recomputed where memory is scarcer than time, as on a GPU."""

    def __init__(self, ops):
        super().__init__()
        self.ops, self.layer = ops, nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(3):
            x = self.ops.recompute(lambda y: torch.tanh(self.layer(y)), x)
        return x.sum()


def run(module, x):
    return module(x)


@pytest.fixture
def compiled(compiled_without_inductor, monkeypatch):
    monkeypatch.setattr(compiling.LIMIT_REACHED, "hits", 0)
    backend = FakeBackend()
    backend.compiles = True
    return backend, backend.prepare(Twice())


def test_a_new_shape_of_training_is_compiled_after_twenty_of_validation(compiled):
    backend, model = compiled
    with torch.no_grad():
        for rows in range(2, 22):
            backend.call(model.eval(), run, torch.ones(rows, 8))
    before = backend.compilations()
    backend.call(model.train(), run, torch.ones(40, 8))
    assert (before, backend.compilations()) == (20, 21)


def test_the_first_shape_that_is_not_compiled_is_said_once(compiled, capfd):
    backend, model = compiled
    with torch._dynamo.config.patch(recompile_limit=3):
        for rows in range(2, 9):
            backend.call(model, run, torch.ones(rows, 8))
    told = capfd.readouterr().err
    assert told.count("further ones run uncompiled") == 1
    assert "_dynamo" not in told
    assert compiling.LIMIT_REACHED.hits > 0


def test_a_model_of_torch_s_own_classes_is_compiled(compiled):
    """`nn.Module.compile` alone does nothing for nn.Sequential."""
    backend, _ = compiled
    model = backend.prepare(nn.Sequential(nn.Linear(8, 2), nn.GELU()))
    x = torch.ones(3, 8)
    before = backend.compilations()
    found = backend.call(model, run, x)
    assert backend.compilations() == before + 1
    model(x[:2])
    assert backend.compilations() == before + 1, "a pass of its own is not compiled"
    torch.testing.assert_close(found, model.forward(x))


def test_recomputed_activations_are_part_of_one_program(compiled, monkeypatch):
    """Dynamo would end a program at each part that asks for a context variable."""
    backend, _ = compiled
    monkeypatch.setattr(backend.eager, "recomputes", True)
    model = Recomputing(backend)
    model(torch.ones(3, 8)).backward()
    expected = model.layer.weight.grad.clone()
    model.zero_grad()
    before = backend.compilations()
    backend.call(backend.prepare(model), run, torch.ones(3, 8)).backward()
    assert backend.compilations() == before + 1
    torch.testing.assert_close(model.layer.weight.grad, expected)


def test_a_part_of_a_recorded_program_is_recomputed_within_it(monkeypatch):
    """torch's own checkpointing would draw other random numbers in the second pass."""
    monkeypatch.setattr("tpukit.hardware.eager.backend.recomputed", lambda f, *tensors: "within")
    # Libraries leave out what reads values, as they do while Dynamo traces.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with compiling.uncompiled_passes():
        assert FakeBackend().recompute(torch.tanh, torch.ones(1)) == "within"
