"""Any module as a task of the batch search: inputs, outputs, and what cannot be used."""

import os
import sys
from dataclasses import dataclass

import pytest
import torch
from runs import printed, python
from torch import nn

from tpukit.commands import sizing
from tpukit.commands.options.training import GivenSettings
from tpukit.errors import ConfigError, TpukitError
from tpukit.hardware.backend import TorchOps
from tpukit.probe.batch.model_task import InputSpec, ModelTask, tensors_in
from tpukit.probe.batch.search import SearchSettings
from tpukit.probe.trials.carried import carried, carried_task
from tpukit.registry.classes import find_task
from tpukit.train.config import ConfigFile
from tpukit.train.task import PlanSettings
from tpukit.train.user_code import import_from


class Head(nn.Module):
    """Takes ids by any name, a mask by its name, and counts what it was given."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.out = nn.Linear(width, 3)

    def forward(self, ids, mask=None, *, scale=None):
        x = self.embedding(ids)
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        if scale is not None:
            x = x * scale.view(-1, 1, 1)
        return self.out(x)


def losses(task: ModelTask, rows: int = 4) -> tuple[nn.Module, dict, torch.Tensor]:
    """The model, a batch and its loss."""
    torch.manual_seed(0)
    model = task.build_model(TorchOps())
    [batch] = task.probe_batches(PlanSettings(rows, rows, 1, 0))
    return model, batch, task.loss(model, batch)["loss"]


@pytest.mark.parametrize(
    ("text", "shape", "dtype", "limit"),
    [
        ("image=3x224x224", (3, 224, 224), torch.float32, None),
        ("t=scalar", (), torch.float32, None),
        ("x=16:bfloat16", (16,), torch.bfloat16, None),
        ("input_ids=128:int64<1000", (128,), torch.int64, 1000),
        ("kind=scalar:int32", (), torch.int32, 2),
        ("mask=128:bool", (128,), torch.bool, 2),
    ],
)
def test_an_input_is_read(text, shape, dtype, limit):
    spec = InputSpec.parse(text)
    values = spec.batch(64, torch.Generator().manual_seed(0))
    assert (spec.shape, values.shape, values.dtype) == (shape, (64, *shape), dtype)
    if limit:
        assert values.min() == 0
        assert limit * 0.9 <= values.max() + 1 <= limit
    else:
        assert values.float().std() > 0.5


@pytest.mark.parametrize(
    "text",
    ["image", "=3", "image=", "image=3x", "image=0x3", "image=3,4", "x=3:float8", "x=3<10",
     "x=3:float32<10", "x=3:bool<2", "x=3:int64<0", "x=3:int64<", "1x=3", "x=-1"],
)  # fmt: skip
def test_an_input_that_cannot_be_read(text):
    with pytest.raises(ConfigError) as caught:
        InputSpec.parse(text)
    assert repr(text) in caught.value.message and "NAME=SHAPE" in caught.value.hint


def test_inputs_go_by_keyword_where_forward_names_them():
    """In any order; one that is not named is positional. `mask` is not the engine's own."""
    inputs = ["mask=5:bool", "scale=scalar", "tokens=5:int64<50"]
    model, batch, loss = losses(ModelTask(Head, inputs, {"width": 4}))
    assert model.out.in_features == 4
    given = {name: batch[f"input_{name}"] for name in ("tokens", "mask", "scale")}
    expected = model(given["tokens"], given["mask"], scale=given["scale"]).sum()
    assert torch.allclose(loss, expected)
    assert batch["mask"].tolist() == [1.0] * 4 and batch["input_mask"].shape == (4, 5)


@dataclass
class Result:
    first: torch.Tensor
    count: int


def test_all_tensors_of_an_output_count():
    one = torch.ones(2)
    outputs = (one, {"a": [one, None, 3], "b": Result(one, 2)}, torch.ones(2, dtype=torch.int64))
    assert len(list(tensors_in(outputs))) == 3


def test_a_models_own_loss_is_used():
    class WithLoss(Head):
        def forward(self, ids, labels=None):
            logits = super().forward(ids)
            loss = None if labels is None else nn.functional.cross_entropy(logits[:, 0], labels)
            return {"loss": loss, "logits": logits}

    with_labels = ["ids=5:int64<50", "labels=scalar:int64<3"]
    assert 0.5 < losses(ModelTask(WithLoss, with_labels, {}))[2] < 3
    model, batch, loss = losses(ModelTask(WithLoss, with_labels[:1], {}))
    assert torch.allclose(loss, model(batch["input_ids"])["logits"].sum())


def test_an_evaluation_computes_what_training_does():
    model, batch, loss = losses(task := ModelTask(Head, ["ids=5:int64<50"], {}))
    with torch.no_grad():
        assert torch.allclose(task.loss(model, batch)["loss"], loss)


class NoGradient(nn.Linear):
    def forward(self, x):
        return super().forward(x).argmax(-1)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nowhere.py:make", "there is no file"),
        ("{folder}/m.py:mkae", "has no function 'mkae'"),
        ("{folder}/broken.py:make", "1 / 0"),
        ("no_such_package.models:make", "cannot be imported: ModuleNotFoundError"),
        ("torch.nn:functional", "has no function 'functional'"),
        ("{folder}/m.py:number", "returns int, not a module"),
        (lambda: NoGradient(4, 4), "returns Tensor without a tensor to learn from"),
    ],
)
def test_what_cannot_be_used_is_named(model, says, tmp_path):
    (tmp_path / "m.py").write_text("def make():\n    return 1\n\n\ndef number():\n    return 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    name = model.format(folder=tmp_path) if isinstance(model, str) else model
    with pytest.raises(TpukitError) as caught:
        losses(ModelTask(name, ["x=4"], {}))
    assert says in caught.value.message
    assert caught.value.hint and "\n" not in caught.value.message


def test_a_module_is_taken_as_it_is_and_built_anew_for_each_trial():
    module = Head()
    task = ModelTask(module, ["ids=5:int64<50"], {})
    first, second = task.build_model(TorchOps()), task.build_model(TorchOps())
    assert first is not module and first is not second
    assert torch.equal(first.out.weight, module.out.weight)


def test_a_function_of_this_process_arrives_in_another():
    width = 6
    task = ModelTask(lambda: Head(width), ["ids=5:int64<50"], {})
    with carried(task) as source:
        assert source.factory == "tpukit.probe.trials.carried:carried_task"
        arrived = carried_task(**source.arguments)
    assert losses(arrived)[0].out.in_features == 6


def test_a_class_of_a_file_named_by_its_path_is_sent_whole(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        "from tiny_task import Tiny\nWIDTH = 5\n\n\nclass Mine(Tiny):\n"
        "    def build_model(self, ops):\n        return super().build_model(ops), WIDTH\n"
    )
    mine = find_task(f"{tmp_path / 'only_here.py'}:Mine")
    with carried(mine(width=4)) as source:
        # Another process has no such module.
        monkeypatch.delitem(sys.modules, mine.__module__)
        arrived = carried_task(**source.arguments)
    assert arrived.width == 4
    assert arrived.build_model(TorchOps())[1] == 5


def test_a_child_imports_what_its_parent_does_and_keeps_its_own_packages(tmp_path, monkeypatch):
    # The relative folder is one that the parent has behind the task's.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "here"), *sys.path])
    for name in ("beside/own_model", "here/own_model", "beside/wave", "compiler/compilers_own"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"WHERE = {name!r}\n")
    import_from(tmp_path / "beside")
    with carried(ModelTask(lambda: Head(6), ["ids=5:int64<50"], {})) as source:
        code = (
            "from tpukit.probe.trials.carried import carried_task\n"
            f"carried_task({source.arguments['file']!r})\n"
            "import compilers_own, own_model, wave\n"
            "print(compilers_own.WHERE, own_model.WHERE, hasattr(wave, 'WHERE'))"
        )
        path = f"{tmp_path / 'compiler'}{os.pathsep}here"
        said = printed(python("-c", code, cwd=tmp_path, env={"PYTHONPATH": path}))
    assert said.split() == ["compiler/compilers_own", "beside/own_model", "False"]


def test_what_cannot_be_sent_is_named():
    import threading

    lock = threading.Lock()
    task = ModelTask(lambda: lock, ["x=4"], {})
    says = "cannot be sent to the processes of the trials"
    with pytest.raises(ConfigError, match=says), carried(task):
        pass


def test_a_transformers_model(monkeypatch):
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=3,
    )  # fmt: skip
    inputs = ["input_ids=9:int64<60", "attention_mask=9:int64", "labels=scalar:int64<3"]
    made = transformers.BertForSequenceClassification
    assert 0.3 < losses(ModelTask(lambda: made(config), inputs, {}))[2] < 4
    assert losses(ModelTask(lambda: made(config), inputs[:1], {}))[2].isfinite()


@pytest.mark.parametrize(
    ("kind", "target", "compiled"), [("gpu", None, False), ("cpu", None, None), ("gpu", "t4", None)]
)
def test_a_gpu_measures_the_eager_step(monkeypatch, kind, target, compiled):
    """A bare model's loop is its user's own."""
    asked = []
    monkeypatch.setattr(sizing, "find_kind", lambda _: kind)
    monkeypatch.setattr(sizing, "size_batch", lambda request, *_: asked.append(request) or {})
    given = GivenSettings({}, {}, ConfigFile({}, {}), None)
    sizing.size_model(nn.Linear(4, 2), ["x=4"], given, target, SearchSettings(), print)
    assert asked[0].config.compile is compiled
