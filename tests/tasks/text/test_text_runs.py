"""A run of the text task: what it learns from, its predictions by hand, moved and offline."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import failure, latest, result, tpukit
from tiny_readers import LABELS, reviews, write_reader, write_tables

import tpukit as package
from tpukit.errors import ConfigError, DataError
from tpukit.hardware.backend import TorchOps
from tpukit.tasks.text.model.reader import build_reader, pooled, reader_groups
from tpukit.tasks.text.settings import TextConfig
from tpukit.tasks.text.task import TextTask
from tpukit.train.config import build_settings
from tpukit.train.target import Target

SIZES = ["--hw", "cpu", "--global-batch-size", "8", "--lr", "1e-3", "--max-length", "64",
         "--set", "warmup_steps=0", "--set", "schedule=constant", "--json"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, and the folders of a BERT and a Qwen."""
    folder = tmp_path_factory.mktemp("texts")
    write_tables(folder / "data")
    for kind in ("bert", "qwen"):
        write_reader(folder / kind, kind)
    return folder


def train(place, run, *more, data="data", model="bert", steps=6):
    return tpukit("train", "--task", "text", "--data-path", place / data, "--model", place / model,
                  *SIZES, "--max-steps", steps, "--results-dir", run, *more)  # fmt: skip


def by_hand(run, texts, kind="softmax"):
    """Predictions by the exported model, one text at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = run / "export"
    result(tpukit("test", "--run", run, "--export", folder, "--json"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        each = [tokenizer(t, truncation=True, max_length=64, return_tensors="pt") for t in texts]
        scores = torch.cat([model(**inputs).logits for inputs in each])
    return (scores.softmax(1) if kind == "softmax" else scores).numpy(), model


@pytest.mark.slow
def test_a_moved_run_predicts_without_its_model_what_transformers_does(place, tmp_path):
    model = shutil.copytree(place / "bert", tmp_path / "model")
    data = shutil.copytree(place / "data", tmp_path / "data")
    options = ("--model", model, "--data-path", data, "--metric", "macro_f1,auc")
    done = result(train(place, tmp_path / "run", *options, "--ckpt-every", "3", steps=3))
    assert {"macro_f1", "step"} == done["best"].keys()
    result(train(place, tmp_path / "whole", *options, "--ckpt-every", "3"))
    again = result(train(place, tmp_path / "run", *options, "--ckpt-every", "3"))
    assert again["resumed_from"] == 3
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, two = (latest(tmp_path / run) / name for run in ("run", "whole"))
        assert one.read_bytes() == two.read_bytes()
    shutil.rmtree(model)
    (data / "train.csv").unlink()
    moved = tmp_path / "elsewhere"
    (tmp_path / "run").rename(moved)
    sample, out = tmp_path / "sample.csv", tmp_path / "submission.csv"
    tests = [*csv.DictReader((data / "test.csv").open())][::-1]
    head = ["id", "good", "bad", "fair"]
    with sample.open("w", newline="") as file:
        csv.writer(file).writerows([head, *([row["id"], 0.1, 0.2, 0.7] for row in tests)])
    done = tpukit("predict", "--run", moved, "--data-path", data, "--sample-submission", sample,
                  "--out", out, "--hw", "cpu", "--json", env={"HF_HUB_OFFLINE": "1"})  # fmt: skip
    assert result(done)["rows"] == len(tests) and "newly initialized" not in done.stderr
    rows = [*csv.reader(out.open())]
    assert rows[0] == head and [row[0] for row in rows[1:]] == [row["id"] for row in tests]
    expected, model = by_hand(moved, [row["text"] for row in tests])
    assert [model.config.id2label[n] for n in range(3)] == [*LABELS]
    order = [LABELS.index(name) for name in head[1:]]
    found = np.array([[float(value) for value in row[1:]] for row in rows[1:]])
    assert found == pytest.approx(expected[:, order], abs=1e-5)


def write_scores(folder, *, pair=False):
    """Scores of essays, or of pairs of texts."""
    folder.mkdir()
    rows = reviews(48, seed=5)
    grade = {label: 1 + place for place, label in enumerate(LABELS)}
    head = ["essay_id", "full_text", *(["about"] if pair else []), "score"]
    made = [
        [i, t, *(["the " + t.split()[1]] if pair else []), grade[label]] for i, t, label in rows
    ]
    for name, part, columns in (("train", made[:36], len(head)), ("test", made[36:], -1)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([head[:columns], *(row[:columns] for row in part)])
    return folder


@pytest.mark.parametrize(
    ("target", "loss"),
    [(Target("labels", ("a", "b"), ("a", "b")), "bce"),
     (Target("class", ("c",), ("x", "y")), "cross_entropy"),
     (Target("number", ("n",), mean=(5.0,), spread=(2.0,)), "mse")],
)  # fmt: skip
def test_an_export_predicts_by_its_readme(place, tmp_path, monkeypatch, target, loss):
    """Without the kind of problem pipelines apply softmax to the scores of labels, and a sigmoid to
    numbers."""
    task = TextTask(model=str(place / "bert"), max_length=64)
    task.predicts, task.columns = target, ("text",)
    model = task.build_model(TorchOps()).eval()
    task.export(model.state_dict(), {"target.json": target.to_json()}, tmp_path)
    monkeypatch.chdir(tmp_path)
    names = {}
    with torch.no_grad():
        exec(re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)[0], names)
        scores = task.scores(model, names["inputs"])
        wanted = task.criterion.predictions(scores)
    torch.testing.assert_close(names["predictions"].reshape(wanted.shape), wanted)
    kind = {"bce": "multi_label_classification", "mse": "regression"}
    applied = kind.get(loss, "single_label_classification")
    assert names["model"].config.problem_type == applied


@pytest.mark.slow
def test_windows_of_a_text_are_averaged(place, tmp_path):
    data = write_scores(tmp_path / "essays")
    options = ("--data-path", data, "--max-length", "24", "--set", "long_texts=windows",
               "--set", "overlap=8", "--metric", "rmse,qwk")  # fmt: skip
    done = train(place, tmp_path / "run", *options)
    assert result(done)["best"].keys() == {"rmse", "step"}
    assert "an ordered score (1 < 2 < ... < 3) in the column score" in done.stderr
    out = tmp_path / "out.csv"
    result(tpukit("predict", "--run", tmp_path / "run", "--hw", "cpu", "--out", out,
                  "--sample-submission", _parts(tmp_path, data), "--json"))  # fmt: skip
    run = package.load(tmp_path / "run", log=print)
    texts = [row["full_text"] for row in csv.DictReader((data / "test.csv").open())]
    tokenizer, target = run.task.tokenizer, run.task.predicts
    expected = []
    with torch.no_grad():
        for text in texts:
            found = tokenizer(text, truncation=True, max_length=24, stride=8, padding=True,
                              return_overflowing_tokens=True, return_tensors="pt")  # fmt: skip
            found.pop("overflow_to_sample_mapping")
            scores = run.model(**found).logits.mean().item()
            expected.append(scores * target.spread[0] + target.mean[0])
    assert [float(row["score"]) for row in csv.DictReader(out.open())] == pytest.approx(
        expected, abs=1e-4
    )


def _parts(folder, data):
    """A sample submission of scores that are not whole."""
    ids = [row["essay_id"] for row in csv.DictReader((data / "test.csv").open())]
    path = folder / "sample.csv"
    path.write_text("".join(f"{name}\n" for name in ["essay_id,score", *(f"{i},1.5" for i in ids)]))
    return path


@pytest.mark.slow
def test_a_pair_of_texts_for_a_decoder_with_adapters(place, tmp_path):
    data = write_scores(tmp_path / "pairs", pair=True)
    more = ("--data-path", data, "--set", "lora_rank=2", "--set", "pooling=last",
            "--text-columns", "full_text,about")  # fmt: skip
    done = train(place, tmp_path / "run", *more, model="qwen")
    assert result(done)["finished"] and "of the text in full_text, about" in done.stderr
    weights = package.load(tmp_path / "run", log=print).model.state_dict()
    assert {"head.weight"} < {n for n in weights if "lora_A" in n or n.startswith("head")}
    frozen = write_reader(tmp_path / "again", "qwen")
    from safetensors.torch import load_file

    start = load_file(frozen / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(weights["lm.layers.0.mlp.up_proj.weight"], start)
    out = tmp_path / "out.csv"
    result(tpukit("predict", "--run", tmp_path / "run", "--hw", "cpu", "--out", out, "--json"))
    assert len([*csv.reader(out.open())]) == 13


@pytest.mark.parametrize("how", ["first", "mean", "max", "last"])
def test_what_is_read_of_the_tokens_leaves_the_filling_out(how):
    states = torch.randn(3, 6, 4)
    mask = torch.zeros(3, 6, dtype=torch.long)
    for row, length in enumerate((6, 2, 3)):
        mask[row, :length] = 1
        own = states[row, :length]
        expected = {"first": own[0], "mean": own.mean(0), "max": own.amax(0), "last": own[-1]}[how]
        assert torch.allclose(pooled(states, mask, how)[row], expected, atol=1e-6)


def test_rates_fall_from_the_head_to_the_embeddings(place):
    config = TextConfig(model=str(place / "bert"))
    task = TextTask(model=config.model, max_length=64)
    model = build_reader(config, task.form, TorchOps(), outputs=3, folder=place / "bert")
    scale = {}
    for group in reader_groups(model, 0.1, 0.5):
        for parameter in group.parameters:
            scale[parameter] = (group["lr_scale"], group["weight_decay"])
    named = {name: scale.pop(parameter) for name, parameter in model.named_parameters()}
    assert not scale
    assert named["classifier.weight"] == (1.0, 0.1) and named["classifier.bias"] == (1.0, 0.0)
    assert named["bert.encoder.layer.1.output.dense.weight"] == (0.5, 0.1)
    assert named["bert.encoder.layer.0.output.dense.bias"] == (0.25, 0.0)
    assert named["bert.embeddings.word_embeddings.weight"] == (0.125, 0.1)


@pytest.mark.parametrize(
    ("header", "sample", "own"),
    [("text,label", None, "id"), ("review,sentiment", None, "id"), ("text,toxic,rude", None, "id"),
     ("text,key,label", None, "key"), ("text,group_id,id,label", None, "id"),
     ("text,lang,label", None, "id"), ("text,label", "row_id,label", "id")],
)  # fmt: skip
def test_texts_are_no_ids(tmp_path, header, sample, own):
    def rows(names):
        for row in range(20):
            values = {"label": "ab"[row % 2], "sentiment": "ab"[row % 2], "toxic": row % 2,
                      "rude": row % 3 // 2, "key": f"k{row}", "id": 7 + row, "row_id": row,
                      "group_id": "g", "lang": "en"}  # fmt: skip
            yield [values.get(name, f"the text of row {row}") for name in names]

    def write(name, names):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([names, *rows(names)])

    names = header.split(",")
    write("train.csv", names)
    if sample is not None:
        write("sample_submission.csv", sample.split(","))
    task = TextTask(data_path=str(tmp_path), model="scratch")
    found = task._labelled(task._table())
    assert found.id_column == own and task._columns(found) == (names[0],)
    assert found.target.columns == (("toxic", "rude") if "rude" in names else (names[-1],))
    write("test.csv", [name for name in names if name not in found.target.columns])
    task.columns = (names[0],)
    tests, ids = task._tests()
    assert ids == own and tests.column(ids) == found.ids


def test_folds_are_of_the_training_table_and_a_run_keeps_its_scale(tmp_path):
    for name, start in (("train", 0), ("valid", 100)):
        rows = [[f"i{start + row}", f"the text of row {row}", start + row / 4] for row in range(20)]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["id", "text", "price"], *rows])
    ids = []
    for fold in "012":
        task = TextTask(data_path=str(tmp_path), model="scratch", folds=3, fold=fold)
        ids += task.datasets().ids
    assert sorted(ids) == sorted(f"i{row}" for row in range(20))
    task = TextTask(data_path=str(tmp_path), model="scratch")
    assert task.datasets().ids[0] == "i100"
    task.predicts = of_run = Target("number", ("price",), mean=(5.0,), spread=(2.0,))
    task.datasets()
    assert task.predicts == of_run


def test_what_is_wrong_is_said_in_two_lines(place, tmp_path):
    told = failure(train(place, tmp_path / "run", "--text-columns", "body"))
    assert "text_columns body: there is no such column" in told and "id, text, label" in told
    told = failure(train(place, tmp_path / "run", "--model", tmp_path))
    assert "there is no config.json in this folder" in told
    told = failure(train(place, tmp_path / "run", "--max-length", "4096"))
    assert "a bert has 160 positions. Use --set max_length=160" in " ".join(told.split())
    with pytest.raises(ConfigError, match="overlap 60 is more than half of max_length"):
        build_settings(TextConfig, {"max_length": 64, "long_texts": "windows", "overlap": 60})
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "train.csv").write_text(
        "id,a,b,label\n1,one two three,four five six,x\n2,a b c,d e f,y\n"
    )
    with pytest.raises(DataError, match="which column is the text is not clear: a, b"):
        TextTask(data_path=str(bare), model=str(place / "bert"), max_length=64).datasets()
    (bare / "test.csv").write_text("id,A\n3,one two three\n")
    with pytest.raises(DataError, match=r"none is a text that the test table has; .* id, A"):
        TextTask(data_path=str(bare), model=str(place / "bert"), max_length=64).datasets()
    broken = shutil.copytree(place / "bert", tmp_path / "broken")
    fields = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 3}))
    told = failure(train(place, tmp_path / "run", "--model", broken))
    assert "it has no tensor bert.encoder.layer.2" in told
