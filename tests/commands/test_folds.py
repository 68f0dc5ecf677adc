"""`train --folds` and `predict` of its folder: of any task, killed anywhere, in the same bytes."""

import csv
import json
import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
from runs import failure, popen, result, tpukit, wait_until
from sklearn.metrics import cohen_kappa_score

from tpukit.commands.folds import Folds, _require_own_folders, _train
from tpukit.errors import ConfigError

TASK = """
import numpy as np
import torch
from torch import nn

from tpukit import Datasets, Predictions, Target, Task, TrainingDefaults, infer, split_rows

SCORES = Target("score", ("score",), tuple("123456"))


class Essays(Task):
    defaults = TrainingDefaults(global_batch_size=8, max_steps=30, lr=0.05)
    predicts = SCORES

    def __init__(self, fold=None, folds=None):
        self.fold, self.folds = fold, folds

    def rows(self, count, start=0):
        rng = np.random.default_rng(start)
        length = rng.uniform(0, 1, count).astype(np.float32)
        score = np.clip(1 + np.floor(7 * length**2), 1, 6).astype(np.float32)
        return [{"x": length[i : i + 1], "score": score[i]} for i in range(count)]

    def datasets(self):
        rows = self.rows(60)
        chosen = split_rows([r["score"] for r in rows], fold=self.fold, folds=self.folds)
        valid = sorted(chosen)
        train = [row for i, row in enumerate(rows) if i not in chosen]
        return Datasets(train, [rows[i] for i in valid], ids=[f"e{i}" for i in valid])

    def build_model(self, ops):
        return nn.Linear(1, 1)

    def scores(self, model, batch):
        return 1 + 5 * model(batch["x"])

    def loss(self, model, batch):
        return {"loss": (self.scores(model, batch)[:, 0] - batch["score"]).square()}

    def validation_rows(self, model, batch):
        return {"target": batch["score"], "prediction": self.scores(model, batch)[:, 0]}

    def predict_rows(self, model, backend, request, log):
        found = infer(self, self.rows(12, 1), lambda b: self.scores(model, b), backend)
        return Predictions([f"t{i}" for i in range(12)], found, SCORES)
"""
TRAIN = ("train", "--task", "essays.py:Essays", "--folds", "3", "--metric", "qwk", "--hw", "cpu",
         "--ckpt-every", "10")  # fmt: skip
SAMPLE = "id,score\n" + "".join(f"t{i},3\n" for i in reversed(range(12)))


def predict(place, run, out, *more):
    sample = () if more else ("--sample-submission", "sample.csv")
    return tpukit("predict", "--run", run, "--out", out, "--hw", "cpu", "--json", *sample, *more,
                  cwd=place)  # fmt: skip


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the task and its three folds, trained without a stop."""
    folder = tmp_path_factory.mktemp("folds")
    (folder / "essays.py").write_text(TASK)
    (folder / "sample.csv").write_text(SAMPLE)
    done = tpukit(*TRAIN, "--results-dir", "whole", "--json", cwd=folder)
    assert result(done)["finished"], done.stderr
    result(predict(folder, "whole", "whole.csv"))
    return folder


def test_the_scores_are_those_of_the_out_of_fold_predictions(place):
    rows = rows_of(place / "whole" / "out_of_fold.csv")
    assert sorted(int(row["id"][1:]) for row in rows) == [*range(60)]
    found = json.loads((place / "whole" / "folds.json").read_text())

    def kappa(rows, predicted=None):
        truth = [int(float(row["score"])) for row in rows]
        if predicted is None:
            predicted = [min(6, max(1, round(float(row["predicted_score"])))) for row in rows]
        return cohen_kappa_score(truth, predicted, weights="quadratic")

    by_fold = [kappa([row for row in rows if row["fold"] == name]) for name in "012"]
    assert [found["folds"][name]["qwk"] for name in "012"] == pytest.approx(by_fold)
    qwk = found["metrics"]["qwk"]
    assert qwk["mean"] == pytest.approx(np.mean(by_fold))
    assert qwk["deviation"] == pytest.approx(np.std(by_fold, ddof=1))
    assert qwk["together"] == pytest.approx(kappa(rows))
    assert qwk["interval"][0] < qwk["together"] < qwk["interval"][1]
    cut = [1 + sum(float(row["predicted_score"]) >= c for c in found["cuts"]) for row in rows]
    assert found["with_cuts"] == pytest.approx(kappa(rows, cut))
    assert found["with_cuts"] >= kappa(rows)
    assert "fold 2" in (place / "whole" / "report.html").read_text()


def test_a_folder_of_folds_predicts_the_mean_cut_where_it_was_fitted(place):
    values = []
    for name in "012":
        (place / "fractions.csv").write_text(SAMPLE.replace(",3", ",3.5"))
        fractions = ("--sample-submission", "fractions.csv")
        result(predict(place, f"whole/fold-{name}", "one.csv", *fractions))
        values.append({r["id"]: float(r["score"]) for r in rows_of(place / "one.csv")})
    cuts = json.loads((place / "whole" / "folds.json").read_text())["cuts"]
    for row in rows_of(place / "whole.csv"):
        mean = np.mean([found[row["id"]] for found in values])
        assert int(row["score"]) == 1 + sum(mean >= cut for cut in cuts)
    ids = [row["id"] for row in rows_of(place / "whole.csv")]
    assert ids == [f"t{i}" for i in reversed(range(12))]


def test_a_folder_of_folds_counts_as_one_run(place):
    (place / "fractions.csv").write_text(SAMPLE.replace(",3", ",3.5"))
    more = ("--sample-submission", "fractions.csv")
    for run in ("whole", "whole/fold-0"):
        result(predict(place, run, f"{run[-1]}.csv", *more))
    result(predict(place, "whole", "b.csv", "--run", "whole/fold-0", "--weights", "1,3", *more))
    all_folds, one, blend = ([float(r["score"]) for r in rows_of(place / f"{name}.csv")]
                             for name in ("e", "0", "b"))  # fmt: skip
    assert blend == pytest.approx((np.array(all_folds) + 3 * np.array(one)) / 4, abs=1e-6)


def test_the_mean_of_several_folders_is_cut_where_it_was_fitted(place):
    shutil.copytree(place / "whole", place / "other")
    truth, means = [], []
    for fold in "012":
        path = place / "other" / f"fold-{fold}" / "held_out.csv"
        rows = rows_of(path)
        for row in rows[::-1]:
            first = float(row["predicted_score"])
            row["predicted_score"] = str(0.7 * first + 1.5 * (int(row["id"][1:]) % 2))
            truth.append(int(float(row["score"])))
            means.append(0.25 * first + 0.75 * float(row["predicted_score"]))
        lines = [",".join(row.values()) for row in rows[::-1]]
        path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    more = ("--run", "other", "--weights", "1,3", "--sample-submission", "sample.csv")
    done = predict(place, "whole", "mean.csv", *more)
    result(done)
    said = re.search(r"has qwk (\S+), with cut points fitted to it (\S+)\.\n", done.stderr)
    cuts = re.search(r"cut at ([^)\n]+)", done.stderr)[1].split(", ")

    def kappa(predicted):
        return cohen_kappa_score(truth, predicted, weights="quadratic")

    assert float(said[1]) == pytest.approx(kappa(np.clip(np.round(means), 1, 6)), abs=1e-4)
    cut = 1 + np.searchsorted([float(c) for c in cuts], means, "right")
    assert float(said[2]) == pytest.approx(kappa(cut), abs=0.02)  # cuts are shown in three digits
    assert float(said[2]) > float(said[1])
    path.write_text(path.read_text().replace("\ne", "\nf"))
    assert "held out other samples" in predict(place, "whole", "mean.csv", *more).stderr


def test_other_folds_leave_the_folder_as_it_is(place):
    before = (place / "whole" / "out_of_fold.csv").read_bytes()
    told = failure(tpukit(*TRAIN, "--folds", "2", "--results-dir", "whole", cwd=place))
    assert "is of other folds (fold=0, folds=3)" in told
    assert (place / "whole" / "out_of_fold.csv").read_bytes() == before
    settings = {name: [f"fold={name}", "fold_column=site"] for name in ("a b", "a_b")}
    with pytest.raises(ConfigError, match="'a b' and 'a_b' have one folder"):
        _require_own_folders(Folds(place / "none", settings, ()))


def test_folds_without_time_are_named_and_left_out(place):
    done = tpukit(*TRAIN, "--results-dir", "short", "--max-time", "1s", "--json", cwd=place)
    assert not result(done)["finished"]
    assert "Not finished: fold " in done.stderr and "Go on with: tpukit train" in done.stderr
    told = failure(tpukit("train", "--task", "essays.py:Essays", "--folds", "1", cwd=place))
    assert "--folds" in told
    done = tpukit(*TRAIN, "--results-dir", "wrong", "--set", "x=1", cwd=place)
    assert done.returncode == 2 and "has no setting 'x'" in done.stderr
    assert "Not finished: fold 0, 1, 2." in done.stdout and "Go on with" not in done.stdout
    (place / "plain.py").write_text(TASK.replace("fold=None, folds=None", "fold=None"))
    told = failure(tpukit("train", "--task", "plain.py:Essays", "--folds", "3", cwd=place))
    assert "has no settings `fold` and `folds`" in told and "split_rows" in told


def test_folds_that_go_on_are_not_finished_until_they_are(place):
    """Out-of-fold predictions of the shorter run counted as those of the longer one."""
    fold = (*TRAIN[:3], "--set", "fold=0", "--set", "folds=3", "--set", "schedule=constant",
            "--hw", "cpu", "--results-dir", "longer/fold-0", "--json")  # fmt: skip
    assert result(tpukit(*fold, "--max-steps", "4", cwd=place))["finished"]
    assert (place / "longer/fold-0/held_out.csv").is_file()
    done = tpukit(*fold, "--max-steps", "1000000", "--max-time", "1s", cwd=place)
    assert not result(done)["finished"] and not (place / "longer/fold-0/held_out.csv").exists()
    folds = Folds(place / "whole", {name: [] for name in "012"}, ())
    assert _train(folds, {}, time.monotonic(), 1, None) == (0, ["0", "1", "2"])


def test_a_fold_that_is_not_there_is_named(place):
    shutil.copytree(place / "whole", place / "two")
    shutil.rmtree(place / "two" / "fold-1")
    done = predict(place, "two", "two.csv")
    assert result(done) and re.search("left out: .*two/fold-1$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("none", ["", "nan"])
def test_rows_without_a_fold_are_refused(tmp_path, none):
    rows = "".join(f"{n},text {n},{n % 2},{'ab'[n % 2] if n else none}\n" for n in range(8))
    (tmp_path / "train.csv").write_text("id,text,label,part\n" + rows)
    words = ("train", "--task", "text", "--data-path", tmp_path, "--folds", "part")
    told = failure(tpukit(*map(str, words), cwd=tmp_path))
    assert "1 of 8 rows have no value in the column 'part'" in told
    told = failure(tpukit(*map(str, words), "--folds", "site", cwd=tmp_path))
    assert "no such column" in told and "id, text, label, part: --folds NAME" in told


KILLS = ["fold-0/held_out.csv", "fold-1/checkpoints/step-00000010"]


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("kills", [KILLS, 30])
def test_folds_killed_anywhere_end_in_the_same_bytes(place, kills):
    """In training, between folds, in validation, in `predict`."""
    run = f"killed-{kills if isinstance(kills, int) else 'at'}"
    rng = random.Random(0)
    for at in range(kills) if isinstance(kills, int) else kills:
        command = popen(*TRAIN, "--results-dir", run, cwd=place)
        if isinstance(at, int):
            time.sleep(rng.uniform(0.5, 10))
        else:
            wait_until((place / run / at).exists, command)
        with suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGKILL)
        command.wait()
    assert result(tpukit(*TRAIN, "--results-dir", run, "--json", cwd=place))["finished"]
    for name in ("out_of_fold.csv", "folds.json"):
        assert (place / run / name).read_bytes() == (place / "whole" / name).read_bytes()
    command = popen("predict", "--run", run, "--out", "killed.csv", "--hw", "cpu", cwd=place)
    time.sleep(rng.uniform(0, 2))
    with suppress(ProcessLookupError):
        os.kill(command.pid, signal.SIGKILL)
    command.wait()
    result(predict(place, run, "killed.csv"))
    assert (place / "killed.csv").read_bytes() == (place / "whole.csv").read_bytes()
