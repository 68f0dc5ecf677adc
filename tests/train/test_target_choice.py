"""Which column of a table is learned: what decides, and what is refused."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from tpukit.errors import DataError
from tpukit.io.tables import Table, read_table
from tpukit.train.labelled import columns_of_tests, sample_beside
from tpukit.train.target import Target
from tpukit.train.target_choice import learned_target

ANIMALS = ["cat", "dog", "fox"]


def table(**columns):
    rows = [list(map(str, row)) for row in zip(*columns.values(), strict=True)]
    names = [name.replace("_", " ") for name in columns]
    return Table(Path("train.csv"), names, rows, list(range(2, 2 + len(rows))))


def sample(**columns):
    found = table(**columns)
    return Table(Path("sample_submission.csv"), found.columns, found.rows, found.lines)


ROWS = range(60)
IDS = [f"i{row}" for row in ROWS]
BINARY = {"Subject_Focus": [r % 2 for r in ROWS], "Eyes": [r % 3 // 2 for r in ROWS],
          "Face": [r % 5 // 4 for r in ROWS]}  # fmt: skip
KINDS = {name: [name[0] if r % 3 else "z" for r in ROWS] for name in ("breed", "colour")}
WHOLE, PARTS = [1 + r % 40 for r in ROWS], [r % 40 / 4 for r in ROWS]
PATIENT = [f"p{r // 4}" for r in ROWS]
ONE_EACH = {name: [int(r % 3 == k) for r in ROWS] for k, name in enumerate(ANIMALS)}


@pytest.mark.parametrize(
    ("columns", "given", "expected", "kind", "why"),
    [
        ({**BINARY, "Score": WHOLE}, {"sample": sample(id=["a"], Score=["4.5"])},
         ["Score"], "number", "named in sample_submission.csv"),
        ({**BINARY, "Score": WHOLE}, {"sample": sample(id=["a"], Score=["4"])},
         ["Score"], "score", "named in sample_submission.csv"),
        ({**BINARY, "Score": WHOLE}, {"tests": ["id", "Subject Focus", "Eyes", "Face"]},
         ["Score"], "score", "the only one to predict"),
        ({"Score": PARTS}, {}, ["Score"], "number", "the only one to predict"),
        ({"Score": [f"{r},5" for r in ROWS]}, {}, ["Score"], "number", "the only one to predict"),
        ({**KINDS, "label": PARTS}, {}, ["label"], "number", "its name"),
        ({**KINDS, "Score": PARTS}, {"named": ["Score"]}, ["Score"], "number", "columns"),
        (KINDS, {"named": ["colour"]}, ["colour"], "class", "columns"),
        (KINDS, {"sample": sample(id=["a"], c=[0], z=[0])}, ["colour"], "class",
         "its values are columns of sample_submission.csv"),
        ({"sex": [r % 2 for r in ROWS], "kind": [r % 3 for r in ROWS]},
         {"sample": sample(id=["a"], **{name: [0] for name in "012"})}, ["kind"], "class",
         "its values are columns of sample_submission.csv"),
        (KINDS, {"sample": sample(id=["a"], Class_c=[0], Class_z=[0])}, ["colour"], "class",
         "its values are columns of sample_submission.csv"),
        ({"grade": [r % 5 for r in ROWS]}, {"sample": sample(id=["a"], Predicted=["0.5"])},
         ["grade"], "number", "the only one to predict"),
        ({**KINDS, "target": PATIENT}, {}, ["target"], "class", "its name"),
        ({"fold": WHOLE, "breed": KINDS["breed"], "site": IDS}, {}, ["breed"], "class",
         "the only one whose values are classes"),
        ({"part": WHOLE, "breed": KINDS["breed"]}, {"apart": ["part"]}, ["breed"],
         "class", "the only one to predict"),
        (BINARY, {}, ["Subject Focus", "Eyes", "Face"], "labels", "they hold 0 and 1 alone"),
        ({**BINARY, "PatientID": PATIENT}, {}, ["Subject Focus", "Eyes", "Face"], "labels",
         "they hold 0 and 1 alone"),
        ({"PatientID": PATIENT, **BINARY}, {"sample": sample(id=["a"], Eyes=[0], Face=[0])},
         ["Eyes", "Face"], "labels", "named in sample_submission.csv"),
        ({**ONE_EACH, "PatientID": PATIENT}, {}, ANIMALS, "class", "they hold 0 and 1 alone"),
        ({name: [bool(v) for v in column] for name, column in BINARY.items()}, {},
         [name.replace("_", " ") for name in BINARY], "labels", "they hold 0 and 1 alone"),
        ({name: [str(bool(v)).upper() for v in column] for name, column in BINARY.items()}, {},
         [name.replace("_", " ") for name in BINARY], "labels", "they hold 0 and 1 alone"),
        ({"label": KINDS["breed"]}, {"sample": sample(row=["a"], label=["b"])}, ["label"],
         "class", "named in sample_submission.csv"),
        ({"x": WHOLE, "y": PARTS}, {"sample": sample(id=["a"], x=[0], y=[0])}, ["x", "y"],
         "number", "named in sample_submission.csv"),
    ],
)  # fmt: skip
def test_what_decides(columns, given, expected, kind, why):
    found = learned_target(table(id=IDS, **columns), "id", **given)
    assert [*found.columns] == expected and (found.kind, found.why) == (kind, why)


@pytest.mark.parametrize(
    ("columns", "given"),
    [(KINDS, {}), ({**BINARY, "Score": WHOLE}, {}), ({**BINARY, "breed": KINDS["breed"]}, {}),
     ({**ONE_EACH, "Score": [row / 7 for row in ROWS]}, {}),
     ({**KINDS, "Score": PARTS}, {"tests": ["id", "Score"]}),
     (KINDS, {"sample": sample(id=["a"], other=[0])}),
     ({"species": KINDS["breed"], "individual_id": PATIENT},
      {"sample": sample(id=["a"], predictions=["x y"])})],
)  # fmt: skip
def test_what_nothing_decides_is_an_error_with_the_columns(columns, given):
    with pytest.raises(DataError, match="which column is to be predicted is not clear") as caught:
        learned_target(table(id=IDS, **columns), "id", **given)
    assert all(name.replace("_", " ") in caught.value.message for name in columns)
    assert "--set columns=NAME" in caught.value.hint


def test_the_files_of_a_competition_are_found(tmp_path):
    assert sample_beside(tmp_path) is None and columns_of_tests(tmp_path) == []
    rows = io.StringIO()
    csv.writer(rows).writerows([["id", "x"], ["1", "2"]])
    for name in ("sampleSubmission.csv", "test.csv", "mine.csv"):
        (tmp_path / name).write_text(rows.getvalue())
    assert sample_beside(tmp_path).path.name == "sampleSubmission.csv"
    assert sample_beside(tmp_path, "mine.csv") == read_table(tmp_path / "mine.csv")
    assert columns_of_tests(tmp_path) == ["id", "x"]


@pytest.mark.parametrize(
    ("columns", "refused"),
    [({"price": [f"{900 + 977 * row:,}" for row in ROWS]}, "the comma of '1,877' separates"),
     ({"when": [1_700_000_000.5 + row for row in ROWS]}, "when deviates by 17.3 .*are 128 apart"),
     ({"label": ["1.0" if row == 7 else row % 3 for row in ROWS]}, "'1' and '1.0' are one"),
     ({"label": ["cafe\u0301" if row == 7 else ["caf\xe9", "bar"][row % 2] for row in ROWS]},
      r"'cafe\\u0301' and 'caf\\xe9' are one name|'caf\\xe9' and 'cafe\\u0301' are one name"),
     ({"label": ["NaN" if row == 7 else row % 3 for row in ROWS]}, "row 8 .*'NaN' among numbers")],
)  # fmt: skip
def test_numbers_that_may_mean_something_else_are_refused(columns, refused):
    with pytest.raises(DataError, match=refused):
        learned_target(table(id=IDS, **columns), "id")


def test_rows_may_lack_some_of_several_numbers():
    rows = table(id=IDS, x=["" if r % 3 else r / 4 for r in ROWS], y=["NaN", *PARTS[1:]])
    found = learned_target(rows, "id", sample=sample(id=["a"], x=[0], y=[0]))
    values = found.values(rows)
    assert found.kind == "number" and np.isnan(values).sum(0).tolist() == [40, 1]
    mean = [np.mean([r / 4 for r in ROWS if not r % 3]), np.mean(PARTS[1:])]
    assert found.fitted(values).mean == pytest.approx(mean)
    for refused in ({"x": ["", *PARTS[1:]]}, {"x": ["", *([0, 1] * 29), 1], "y": [0, 1] * 30}):
        with pytest.raises(DataError, match=r"row 1 .*: there is no x"):
            learned_target(table(id=IDS, **refused), "id", [*refused])


BLIGHTS = [["rust", "scab", "scab rust", "rust scab", "mould"][r % 5] for r in ROWS]


@pytest.mark.parametrize(
    ("given", "kind", "names"),
    [({}, "labels", ("mould", "rust", "scab")),
     ({"sample": sample(id=["a"], label=["rust"])}, "labels", ("mould", "rust", "scab")),
     ({"sample": sample(id=["a"], rust=[0], scab=[0], mould=[0], smut=[0])}, "labels",
      ("mould", "rust", "scab", "smut")),
     ({"kind": "class"}, "class",
      ("mould", "rust", "rust scab", "scab", "scab rust"))],
)  # fmt: skip
def test_fields_of_several_labels(given, kind, names):
    """Each combination was a class."""
    rows = table(id=IDS, label=BLIGHTS)
    found = learned_target(rows, "id", **given)
    assert (found.kind, found.classes, found.of_table) == (kind, names, ("label",))
    if kind == "labels":
        assert Target.from_json(found.to_json()) == found
        wanted = [[float(name in text.split()) for name in names] for text in BLIGHTS]
        assert found.values(rows).tolist() == wanted
        with pytest.raises(DataError, match="class 'wilt' is not one of the model's"):
            found.values(table(id=["a"], label=["rust wilt"]))


def test_classes_of_several_words_are_classes():
    for names in (["hot dog", "red wine", "dog"], ["good", "not good", "bad"],
                  ["small red", "small blue", "large red", "large blue", "red"]):  # fmt: skip
        found = learned_target(table(id=IDS, label=[names[r % len(names)] for r in ROWS]), "id")
        assert found.kind == "class" and {*found.classes} == {*names}


def test_what_looks_like_a_number_or_a_missing_one_may_be_a_class():
    names = {"label": [f"{row % 7}_{row % 3}" for row in ROWS]}
    assert learned_target(table(id=IDS, **names), "id").kind == "class"
    regions = {"label": ["NA" if row == 7 else "EU" if row % 2 else "AS" for row in ROWS]}
    assert learned_target(table(id=IDS, **regions), "id").classes == ("AS", "EU", "NA")
    decimals = {"price": [f"{row},{row:03}" for row in ROWS]}
    assert learned_target(table(id=IDS, **decimals), "id").kind == "number"
