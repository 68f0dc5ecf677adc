"""Tables and samples that do not fit are refused before the first step, in two lines."""

import pytest
from PIL import Image
from runs import failure, tpukit

FLAGS = "Id,Focus,Eyes,Face"
"""A table of flags, of which a sample asks for something else."""


@pytest.mark.parametrize(
    ("table", "rows", "sample", "settings", "said", "hint"),
    [
        # A regression beside flags, with the column of a flag named.
        (f"{FLAGS},Pawpularity", "{i},{b},{c},0,{n}", "Id,Pawpularity\nt,41.5\n", ["columns=Focus"],
         "sample_submission.csv asks for Pawpularity", "Leave columns= out"),
        # The sample of another competition of the same ids.
        ("Id,ETT,NGT,PatientID", "{i},{b},{c},p{n}", "Id,ETT,CVC\nt,0,0\n", [],
         "asks for CVC, which the training table lacks (it has ETT)", "sample_submission=FILE"),
        # Several labels trained as one class.
        ("Id,ETT,NGT,PatientID", "{i},{b},{c},p{n}", "Id,ETT,NGT\nt,0,0\n", ["target=class"],
         "of the columns ETT, NGT, ... are 1: a row has one class", "--set target=labels"),
        # Numbers trained as classes.
        ("Id,Pawpularity", "{i},{n}.5", "Id,Pawpularity\nt,41.5\n", ["target=class"],
         "24 values of Pawpularity for 24 rows are no classes", "--set target=number"),
        # A class that the sample has no column for.
        ("Id,kind", "{i},{word}", "Id,cat,fox\nt,0,1\n", ["columns=kind"],
         "no column for the class 'dog'", "Give the sample submission of this table"),
        # Texts trained as numbers.
        ("Id,kind", "{i},{word}", None, ["target=number"],
         "row 1 (line 2): kind is 'cat', not a number", "name another kind or column"),
        # Labels that are not 0 and 1.
        ("Id,a,b", "{i},{b},{n}", "Id,a,b\nt,0,0\n", ["target=labels"],
         "row 3 (line 4): b is '2', not 0 or 1", "name another kind or column"),
        # A sample of texts for numbers.
        ("Id,Pawpularity", "{i},{n}.5", "Id,Pawpularity\nt,good\n", [],
         "sample_submission.csv has 'good' in Pawpularity", "Give the sample submission"),
        # A column that is not there, and the ids as what is to be learned.
        ("Id,kind", "{i},{word}", None, ["columns=Kind"],
         "columns Kind: there is no such column", "Its columns are Id, kind"),
        ("Id,kind", "{i},{word}", None, ["columns=Id"],
         "columns Id: it holds the ids", "columns=NAME"),
        # A loss of another kind.
        ("Id,kind", "{i},{word}", None, ["loss=huber"],
         "loss huber: what is predicted is 2 classes", "Its losses are cross_entropy"),
        # A constant.
        ("Id,score", "{i},7", "Id,score\nt,3.5\n", ["target=number"],
         "every score is 7", "columns=NAME"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, table, rows, sample, settings, said, hint):
    (tmp_path / "train").mkdir()
    lines = [table]
    for i in range(24):
        Image.new("L", (8, 8)).save(tmp_path / "train" / f"{i}.png")
        lines.append(rows.format(i=i, b=i // 2 % 2, c=i % 3 // 2, n=i, word=["cat", "dog"][i % 2]))
    (tmp_path / "train.csv").write_text("\n".join(lines))
    if sample:
        (tmp_path / "sample_submission.csv").write_text(sample)
    sets = [word for pair in settings for word in ("--set", pair)]
    done = tpukit("train", "--task", "images", "--data-path", tmp_path, "--hw", "cpu", "--set",
                  "model=test_convnext", "--set", "image_size=32", "--global-batch-size", "4",
                  "--max-steps", "1", "--results-dir", tmp_path / "run", *sets)  # fmt: skip
    told = failure(done)
    assert said in told and hint in told and len(told.splitlines()) == 2
    assert not (tmp_path / "run").exists()
