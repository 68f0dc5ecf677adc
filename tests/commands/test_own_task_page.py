"""What docs/own_task.md writes as code, run: its first task, its predictions, its recipes."""

import dataclasses
import re
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from runs import result, tpukit
from torch import nn
from typer.testing import CliRunner

import tpukit as package
from tpukit.cli import app
from tpukit.train.task import PlanSettings

PAGE = Path(__file__).parents[2] / "docs" / "own_task.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
IMPORTS = """
from pathlib import Path
import numpy as np
import timm
import torch.nn.functional as F
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor
from tpukit import Datasets, Task, TrainingDefaults, infer, named
transform = ToTensor()

"""


def block(beginning, having=""):
    [found] = [b for b in BLOCKS if b.startswith(beginning) and having in b]
    return found


def executed(text):
    names = {"np": np, "torch": torch, "F": F, "dataclasses": dataclasses, **vars(package)}
    names["ShuffledPlan"] = package.ShuffledPlan
    exec(text, names)
    return names


def method(text):
    """The one function that a block defines."""
    names = executed(text)
    return names[re.match(r"def (\w+)", text)[1]]


def test_the_script_that_became_a_task_trains_and_predicts(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("valid", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    predict = block("def predict(").replace("\n", "\n    ").rstrip()
    task = f"{block('class Photos')}\n    {predict}\n"
    (tmp_path / "my_task.py").write_text(IMPORTS + task)
    run = ["--task", "my_task.py:Photos", "--set", "model=resnet10t", "--hw", "cpu", "--json"]
    few = ["--global-batch-size", "8", "--max-steps", "2"]
    done = result(tpukit("train", *run, *few, cwd=tmp_path))
    assert done["run"] == "results/photos"
    base = ["--run", "results/photos", "--hw", "cpu", "--json"]
    fields = result(tpukit("predict", *base, "--out", "out.csv", cwd=tmp_path))
    assert fields == {"rows": 6, "path": "out.csv"}
    written = np.loadtxt(tmp_path / "out.csv", int)
    model = package.load(tmp_path / "results/photos", task=f"{tmp_path}/my_task.py:Photos").model
    files = sorted((tmp_path / "photos/valid").glob("*/*.png"))
    images = np.stack([np.asarray(Image.open(f), np.float32) / 255 for f in files])
    with torch.no_grad():
        scores = model(torch.from_numpy(images).permute(0, 3, 1, 2))
    assert written.tolist() == scores.argmax(1).tolist()


def test_declared_options_are_in_the_help_of_test_and_predict(tmp_path):
    declared = block("@dataclass", having="predict_options")
    file = tmp_path / "diffusion.py"
    file.write_text(f"from dataclasses import dataclass\nfrom tpukit import Task\n\n{declared}")
    for command in ("test", "predict"):
        words = [command, "--task", f"{file}:Diffusion", "--help"]
        shown = CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output
        assert "--steps" in shown and "Sampling steps" in shown and "--samples" not in shown


def test_weighted_classes_are_torchs():
    loss = method(block("def loss", having="weights[batch"))
    generator = torch.Generator().manual_seed(0)
    batch = {
        "image": torch.randn(12, 3, generator=generator),
        "label": torch.randint(0, 2, (12,), generator=generator),
    }
    model = nn.Linear(3, 2)
    given = loss(None, model, batch)
    mean = (given["loss"] * given["weight"]).sum() / given["weight"].sum()
    expected = F.cross_entropy(model(batch["image"]), batch["label"], torch.tensor([1.0, 5.0]))
    assert mean.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_weighted_plan_draws_in_proportion_and_alike_on_any_devices():
    plan_class = executed(block("class Weighted"))["Weighted"]
    weights = np.array([1.0, 0.0, 2.0, 5.0])

    def keys(micro_rows, step):
        plan = plan_class(weights, PlanSettings(64, micro_rows, 2, seed=3))
        return [key for micro in plan.step(step) for key in micro.keys]

    counts = Counter(key.sample for step in range(200) for key in keys(64, step))
    shares = [counts[index] / (200 * 64) for index in range(4)]
    assert shares == pytest.approx(weights / weights.sum(), abs=0.02) and counts[1] == 0
    assert keys(64, 7) == keys(64, 7) != keys(64, 8)
    assert len(keys(16, 7)) == 64 and {key.epoch for key in keys(16, 7)} == {7}


class Graphs:
    """Rings of two to six nodes; the label is their number."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        nodes = 2 + index % 5
        x = np.random.default_rng(index).standard_normal((nodes, 4), dtype=np.float32)
        edges = np.stack([np.arange(nodes), (np.arange(nodes) + 1) % nodes], 1)
        return {"nodes": x, "edges": edges, "label": np.float32(nodes)}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, batch):
        x = self.body(batch["nodes"])
        source, target = batch["edges"].T
        x = x.index_add(0, target, x[source]).relu()
        pooled = x.new_zeros(len(batch["label"]), 8).index_add(0, batch["graph"], x)
        return self.head(pooled)[:, 0]


class Rings(package.Task):
    defaults = package.TrainingDefaults(global_batch_size=8, max_steps=3)
    collate = method(block("def collate"))

    def build_model(self, ops):
        return Network()

    def datasets(self):
        return package.Datasets(Graphs(), Graphs())

    def loss(self, model, batch):
        return {"loss": (model(batch) - batch["label"]).square()}


def test_graphs_are_joined_and_each_counts_once(tmp_path):
    quiet = {"hw": "cpu", "log": lambda line: None}
    done = package.fit(Rings(), results_dir=tmp_path / "run", **quiet)
    found = package.evaluate(done, **quiet, task=Rings())["metrics"]["loss"]
    model, task, errors = package.load(done, task=Rings()).model, Rings(), []
    with torch.no_grad():
        for index in range(21):
            batch = task.collate([Graphs()[index]], types.SimpleNamespace(rows=1))
            errors.append(float(task.loss(model, batch)["loss"]))
    assert found == pytest.approx(np.mean(errors), rel=1e-4)
