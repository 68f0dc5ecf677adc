"""What a task wrote is put into a sample submission's order, or differs by name."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest

from tpukit.commands.predict import prediction
from tpukit.errors import ConfigError, DataError
from tpukit.io.tables import read_table
from tpukit.tasks.eit.predict import image_file
from tpukit.train.labelled import sample_beside
from tpukit.train.requests import PredictionOptions, PredictionRequest
from tpukit.train.submission import Predictions, match_sample, write_submission
from tpukit.train.target import Target
from tpukit.train.task import Task


def put(path, *rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def match(tmp_path, written, sample):
    """The rows that are left of `written`, and what was logged."""
    told = []
    out = put(tmp_path / "out.csv", *written)
    match_sample(out, read_table(put(tmp_path / "sample.csv", *sample)), told.append)
    with out.open(newline="", encoding="utf-8") as file:
        return [*csv.reader(file)], told


def test_rows_and_columns_take_the_samples_order(tmp_path):
    written = [["text", "id"], ['two,\n"lines"', "b"], ["x", "a"], ["second b", "b"]]
    sample = [["id", "text"], ["b", ""], ["b", ""], ["a", ""]]
    rows, told = match(tmp_path, written, sample)
    assert rows == [["id", "text"], ["b", 'two,\n"lines"'], ["b", "second b"], ["a", "x"]]
    assert told == [f"{tmp_path / 'out.csv'}: put into the order of {tmp_path / 'sample.csv'}"]


def test_a_file_that_matches_stays_as_it_is(tmp_path):
    out = tmp_path / "out.csv"
    out.write_text('"id","p"\n"1","0.50"\n')
    match_sample(out, read_table(put(tmp_path / "sample.csv", ["id", "p"], ["1", "0"])), print)
    assert out.read_text() == '"id","p"\n"1","0.50"\n'


def test_the_ids_may_be_another_column_than_the_first(tmp_path):
    written = [["id", "label"], ["b", "1"], ["a", "0"]]
    rows, _ = match(tmp_path, written, [["label", "id"], ["0", "a"], ["0", "b"]])
    assert rows == [["label", "id"], ["0", "a"], ["1", "b"]]


def test_what_differs_is_named(tmp_path):
    written = [["id", "b", "c"], *([str(i), "0", "0"] for i in (1, 2, 2))]
    sample = [["id", "a", "b"], *([str(i), "0", "0"] for i in range(2, 8))]
    with pytest.raises(DataError) as caught:
        match(tmp_path, written, sample)
    for told in (
        "it lacks 1 column (a)", "it should not have 1 column (c)",
        "it lacks 5 ids (3, 4, 5, ...)", "it should not have 2 ids (1, 2)",
    ):  # fmt: skip
        assert told in caught.value.message
    with pytest.raises(DataError, match=r"it lacks 1 column \(id\)"):
        match(tmp_path, [["name"], ["1"]], [["id"], ["1"]])


def test_a_column_without_a_name_is_named_before_training(tmp_path):
    put(tmp_path / "sample_submission.csv", ["", "id", "label"], ["0", "a", "1"])
    with pytest.raises(DataError, match="a column without a name, as pandas writes its index"):
        sample_beside(tmp_path)


@pytest.mark.parametrize(
    ("classes", "sample", "written"),
    [("abc", "c a", ["b c", "a b"]), ("abc", "b", ["b", "a"]),
     (("0.0", "1.0", "2.0"), "0", ["1", "0"]), (("False", "True"), "0", ["1", "0"]),
     (("0", "1"), "False", ["True", "False"]), (("False", "True", "7"), "0", ["True", "False"]),
     (("007", "008"), "9", ["008", "007"])],
)  # fmt: skip
def test_classes_are_written_as_the_sample_writes_them(tmp_path, classes, sample, written):
    values = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])[:, : len(classes)]
    found = Predictions(["x", "y"], values, Target("class", ("label",), tuple(classes)))
    path = put(tmp_path / "sample.csv", ["label", "id"], [sample, "y"], [sample, "x"])
    write_submission(found, tmp_path / "out.csv", read_table(path), print)
    rows = [*csv.reader((tmp_path / "out.csv").open())]
    assert rows == [["label", "id"], [written[1], "y"], [written[0], "x"]]


THREE, TWO = Target("class", ("label",), ("a", "b", "ab")), Target("class", ("label",), ("0", "1"))
VALUES = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])


@pytest.mark.parametrize(
    ("target", "columns", "sample", "raw", "written"),
    [(THREE, ["x_ab", "x_a", "x_b"], "000", False, [["0.3", "0.2", "0.5"], ["0.1", "0.6", "0.3"]]),
     (THREE, ["label"], ["new a b"], False, [["b ab a"], ["a b ab"]]),
     (THREE, ["label"], ["not a class"], False, [["b"], ["a"]]),
     (TWO, ["label"], "0", False, [["1"], ["0"]]), (TWO, ["label"], "0", True, [["0.5"], ["0.3"]]),
     (Target("number", ("y",)), ["Predicted"], "0", False, [["0.2"], ["0.6"]]),
     (Target("score", ("y",), ("0", "1", "2")), ["Predicted"], "0", False, [["0"], ["1"]]),
     (Target("score", ("y",), ("0", "1", "2")), ["y"], "0", True, [["0.2"], ["0.6"]]),
     (Target("labels", ("a", "b"), ("a", "b")), ["p_b", "p_a"], "00", False,
      [["0.5", "0.2"], ["0.3", "0.6"]])],
)  # fmt: skip
def test_what_the_columns_of_a_sample_stand_for(tmp_path, target, columns, sample, raw, written):
    """raw: of a run whose metric is one of probabilities or numbers."""
    rows = [["id", *columns], ["x", *sample], ["y", *sample]]
    path, out = put(tmp_path / "sample.csv", *rows), tmp_path / "s.csv"
    found = Predictions(["x", "y"], VALUES[:, : len(target.predicted)], target)
    write_submission(found, out, read_table(path), print, raw=raw)
    assert read_table(out).columns == rows[0]
    assert [row[1:] for row in read_table(out).rows] == written


@pytest.mark.parametrize(
    ("metric", "written"), [("auc,f1", ["0.5"]), ("f1,auc", ["1"]), (None, ["1"])]
)
def test_a_runs_metric_says_whether_probabilities_are_meant(tmp_path, metric, written):
    """A sample of zeros had classes, whose AUC is that of one threshold."""

    class Ranked(Task):
        name, build_model, datasets, loss = "ranked", None, None, None

        def predict_rows(self, model, backend, request, log):
            return Predictions(["x"], VALUES[:1, :2], TWO)

    sample, out = put(tmp_path / "sample.csv", ["id", "label"], ["x", "0"]), tmp_path / "s.csv"
    run = SimpleNamespace(unfinished=None, train_config={"metric": metric})
    trained = SimpleNamespace(task=Ranked(), run=run)
    write = prediction(trained, PredictionOptions(out=out, sample_submission=sample), {})
    write(None, SimpleNamespace(is_main=True), print)
    assert read_table(out).column("label") == written


def test_labels_of_a_row_are_written_into_one_field(tmp_path):
    """At least the likeliest, as the sample has no empty field."""
    target = Target("labels", ("a", "b", "c"), ("a", "b", "c"), joined="tags")
    values = np.array([[0.9, 0.1, 0.6], [0.2, 0.3, 0.1]])
    sample = read_table(put(tmp_path / "sample.csv", ["id", "tags"], ["y", "a"], ["x", "a"]))
    told, out = [], tmp_path / "s.csv"
    write_submission(Predictions(["x", "y"], values, target), out, sample, told.append)
    assert out.read_text() == "id,tags\ny,b\nx,a c\n"
    assert "at least the likeliest" in told[0]
    cuts = [0.95, 0.05, 0.95]
    write_submission(Predictions(["x", "y"], values, target), out, sample, print, cuts)
    assert out.read_text() == "id,tags\ny,b\nx,b\n"


@pytest.mark.parametrize(("cuts", "written"), [(None, ["0.4", "0.1"]), ([0.3, 0.3], ["1", "0"])])
def test_labels_with_thresholds_are_decided_where_the_sample_is_zeros(tmp_path, cuts, written):
    """Where a metric such as F1 was asked for, which takes no probabilities."""
    target, out = Target("labels", ("a", "b"), ("a", "b")), tmp_path / "s.csv"
    sample = read_table(put(tmp_path / "sample.csv", ["id", "a", "b"], ["x", "0", "0"]))
    found = Predictions(["x"], np.array([[0.4, 0.1]]), target)
    write_submission(found, out, sample, print, cuts)
    assert read_table(out).rows == [["x", *written]]


def test_small_predictions_keep_their_digits(tmp_path):
    """Eight digits behind the point were those of a probability near 1: 1e-9 became 0."""
    target, out = Target("number", ("y",)), tmp_path / "s.csv"
    values = np.array([[1.25e-9], [-3.5e-12], [1234567.25]])
    write_submission(Predictions(["a", "b", "c"], values, target), out, None, print)
    assert [float(v) for v in read_table(out).column("y")] == values[:, 0].tolist()


def test_images_of_eit_have_no_sample():
    request = PredictionRequest(None, sample_submission="sample.csv")
    with pytest.raises(ConfigError, match="--sample-submission: images are no table"):
        image_file(request)


def test_files_that_are_no_tables_are_named(tmp_path):
    np.savez(tmp_path / "out.npz", x=np.arange(300))
    with pytest.raises(DataError, match=r"out\.npz: not a CSV or JSON file"):
        read_table(tmp_path / "out.npz")
    (tmp_path / "empty.csv").write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        read_table(tmp_path / "empty.csv")
    with pytest.raises(DataError, match=r"row 1 .line 2. has 1 fields, the header 2"):
        read_table(put(tmp_path / "short.csv", ["a", "b"], ["1"]))
    with pytest.raises(DataError, match=r"column 'label' occurs 2 times"):
        read_table(put(tmp_path / "twice.csv", ["id", "label", "label"], ["1", "a", "b"]))
    empty = put(tmp_path / "commas.csv", ["id", "label", "", ""], ["1", "a", "", ""])
    assert read_table(empty).columns == ["id", "label", "", ""]
    with pytest.raises(DataError, match="Cannot read"):
        read_table(tmp_path / "nowhere.csv")
