"""Predictions of test rows that are trained on: as rows of the table, and as mixed labels."""

import csv
import re

import fsspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from runs import latest, metrics, result, tpukit
from safetensors.torch import load_file
from tiny_readers import LABELS, reviews, write_reader

from tpukit.errors import DataError
from tpukit.tasks.text.settings import TextConfig
from tpukit.train.pseudo import pseudo_labels
from tpukit.train.target import Target
from tpukit.train.target_loss import TargetLoss

TRAINING, TESTS = 24, 16
SIZES = ("--hw", "cpu", "--global-batch-size", "8", "--max-steps", "5", "--set", "warmup_steps=0",
         "--set", "log_every=1", "--json")  # fmt: skip
MODELS = {
    "text": ("--max-length", "64"),
    "images": ("--set", "model=test_convnext", "--set", "image_size=32"),
}


def write(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.fixture(scope="module")
def rows():
    """(id, text, label) of the training and of the test rows."""
    made = reviews(TRAINING + TESTS)
    return made[:TRAINING], made[TRAINING:]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return write_reader(tmp_path_factory.mktemp("models") / "bert", "bert")


def data(folder, task, training, tests, more=()):
    """A folder of both; more: test rows that the training table has too."""
    folder.mkdir()
    beside = slice(None) if task == "text" else slice(None, None, 2)  # a text, or an image's file
    head = ("id", "text", "label")
    write(folder / "train.csv", [head[beside], *(row[beside] for row in (*training, *more))])
    write(folder / "valid.csv", [head[beside], *(row[beside] for row in training[:6])])
    write(folder / "test.csv", [head[beside][:-1], *(row[beside][:-1] for row in tests)])
    if task == "images":
        for name, part in (("images", [*training, *more]), ("test", tests)):
            (folder / name).mkdir()
            for row in part:
                seed = int(row[0][1:])
                pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{row[0]}.png")
    return folder


@pytest.fixture
def losses(tmp_path, reader):
    """Of a run's steps, with its weights at the end."""

    def train(task, folder, *more):
        run = tmp_path / f"run{len([*tmp_path.iterdir()])}"
        model = ("--model", reader) if task == "text" else ()
        done = tpukit("train", "--task", task, "--data-path", folder, *SIZES, *MODELS[task],
                      *model, "--results-dir", run, *more)  # fmt: skip
        assert result(done)["finished"]
        found = [line["loss"] for line in metrics(run) if "loss" in line]
        return np.array(found), load_file(latest(run) / "model.safetensors"), done.stderr

    return train


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "images"])
def test_classes_that_are_predicted_train_as_rows_of_the_table(task, rows, losses, tmp_path):
    training, tests = rows
    few = data(tmp_path / "few", task, training, tests)
    all_of_them = data(tmp_path / "all", task, training, tests, tests)
    pseudo = write(tmp_path / "pseudo.csv", [("id", "label"), *(row[::2] for row in tests[::-1])])
    found, weights, said = losses(task, few, "--set", f"pseudo={pseudo}")
    assert f"Trained on too: {TESTS} rows of {pseudo}" in said
    write(all_of_them / "train.csv", [("id", "text", "label")[:: 1 if task == "text" else 2],
          *(row[:: 1 if task == "text" else 2] for row in (*training, *tests[::-1]))])  # fmt: skip
    expected, others, _ = losses(task, all_of_them)
    assert len(found) == 5 and found == pytest.approx(expected, abs=2e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=2e-4)


@pytest.mark.slow
def test_the_loss_is_linear_in_probabilities(rows, losses, tmp_path):
    """The first step's, of a batch of all rows."""
    training, tests = rows
    folder = data(tmp_path / "data", "text", training, tests)
    first = [row[2] for row in tests]
    second = [LABELS[(LABELS.index(name) + 1) % 3] for name in first]
    found = []
    for parts in ((first, first), (second, second), (first, second)):
        rows_of = [
            (row[0], *(0.7 * (one == label) + 0.3 * (other == label) for label in LABELS))
            for row, one, other in zip(tests, *parts, strict=True)
        ]
        pseudo = write(tmp_path / "pseudo.csv", [("id", *LABELS), *rows_of])
        batch = ("--global-batch-size", TRAINING + TESTS, "--max-steps", "1")
        found.append(losses("text", folder, "--set", f"pseudo={pseudo}", *batch)[0][0])
    assert abs(found[0] - found[1]) > 1e-4
    assert found[2] == pytest.approx(0.7 * found[0] + 0.3 * found[1], abs=1e-6)


def test_a_score_between_two_is_between_their_losses():
    target = Target("score", ("s",), ("1", "2", "4"), mean=(2.0,), spread=(1.25,))
    scores = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    found = TargetLoss(target, "ordinal").losses(scores, torch.tensor([3.5, 1.25, 4.0]))
    above = torch.tensor([[1.0, 0.75], [0.25, 0.0], [1.0, 1.0]])
    expected = F.binary_cross_entropy_with_logits(scores, above, reduction="none").sum(1)
    torch.testing.assert_close(found, expected)
    logits = torch.cat([scores, scores[:, :1]], 1)
    found = TargetLoss(target, "cross_entropy").losses(logits, torch.tensor([3.5, 1.25, 4.0]))
    torch.testing.assert_close(
        found, F.cross_entropy(logits, torch.tensor([2, 0, 2]), reduction="none")
    )


def labels_of(folder, content, target=Target("class", ("label",), LABELS)):  # noqa: B008
    config = TextConfig(data_path=str(folder), pseudo=str(write(folder / "pseudo.csv", content)))
    found = pseudo_labels(config, target)
    return found.test_rows(config), found.values.tolist()


def test_predictions_are_matched_by_their_ids(tmp_path):
    write(tmp_path / "test.csv", [("id", "text"), ("a", "one"), ("b", "two"), ("c", "three")])
    soft = [("id", "good", "bad", "fair"), ("c", 0.2, 0.7, 0.1), ("a", 0, 0, 1)]
    table, values = labels_of(tmp_path, soft)
    assert table.column("text") == ["three", "one"]
    assert np.array(values) == pytest.approx(np.array([[0.7, 0.1, 0.2], [0, 1, 0]]))
    pets = Target("class", ("pet",), ("cat", "dog"))
    for name, expected in (("cat", [0.75, 0.25]), ("dog", [0.25, 0.75]), ("pet", [0.25, 0.75])):
        assert labels_of(tmp_path, [("id", name), ("b", 0.75)], pets)[1] == [expected]
    two = Target("class", ("y",), ("0", "1"))
    assert labels_of(tmp_path, [("id", "y"), ("b", 0.25)], two)[1] == [[0.75, 0.25]]
    assert labels_of(tmp_path, [("id", "y"), ("b", 1)], two)[1] == [[0.0, 1.0]]
    score = Target("score", ("s",), ("1", "2", "4"))
    assert labels_of(tmp_path, [("id", "s"), ("b", 3.5)], score)[1] == [3.5]


def test_they_may_lie_in_an_object_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    address, content = "memory://bucket/soft.csv", b"id,good,bad,fair\nb,0.2,0.7,0.1\n"
    with fsspec.open(address, "wb") as file:
        file.write(content)
    config = TextConfig(data_path=str(tmp_path), pseudo=address)
    found = pseudo_labels(config, Target("class", ("label",), LABELS))
    assert np.array(found.values) == pytest.approx(np.array([[0.7, 0.1, 0.2]]))


def test_rows_of_one_id_are_taken_in_their_order(tmp_path):
    write(tmp_path / "test.csv", [("id", "text"), ("a", "one"), ("b", "two"), ("a", "three")])
    score = Target("score", ("s",), ("1", "2", "4"))
    rows = [("id", "s"), ("a", 1), ("a", 2), ("b", 4)]
    table, values = labels_of(tmp_path, rows, score)
    assert table.column("text") == ["one", "three", "two"] and values == [1, 2, 4]
    with pytest.raises(DataError, match="has no row of id 'b' more"):
        labels_of(tmp_path, [*rows, ("b", 1)], score)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([("id", "good"), ("a", 1)], "column good: '1' is not one of the classes"),
        ([("id", "good", "bad"), ("a", 1, 0)], "the columns good, bad, not one for each of"),
        ([("id", *LABELS), ("a", 0.5, 0.2, 0.2)], "add up to 0.9, not to 1"),
        ([("id", *LABELS), ("a", 1.5, -0.5, 0)], "is '1.5', not a number from 0 to 1"),
        ([("id", *LABELS), ("r99", 1, 0, 0)], "has no row of id 'r99'"),
        ([("id", *LABELS)], "has no rows"),
    ],
)
def test_what_is_no_prediction_is_an_error_that_names_it(content, said, tmp_path):
    write(tmp_path / "test.csv", [("id", "text"), ("a", "one")])
    with pytest.raises(DataError, match=re.escape(said)) as error:
        labels_of(tmp_path, content)
    assert "pseudo.csv" in str(error.value)
