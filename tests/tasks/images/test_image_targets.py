"""Labels, numbers and scores of images, with columns of the table beside: losses, submissions."""

import csv
import json
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from runs import ROOT, failure, result, tpukit
from safetensors.torch import load_file
from sklearn.metrics import cohen_kappa_score
from timm.data import create_transform, resolve_data_config
from timm.loss import AsymmetricLossMultiLabel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tpukit.errors import DataError
from tpukit.io.tables import read_table
from tpukit.tasks.images.predict import _texts_by_id, find_images
from tpukit.tasks.images.task import ImagesTask
from tpukit.train.features import TableFeatures, WithFeatures
from tpukit.train.labelled import LabelledTable, TableSettings, features_of
from tpukit.train.requests import PredictionRequest
from tpukit.train.target import Target
from tpukit.train.target_loss import LOSSES, TargetLoss, balanced_weights

PLAYED = run_path(str(ROOT / "scripts" / "play_competitions.py"), run_name="play_competitions")
MODEL = "test_convnext"
SMALL = ("--set", f"model={MODEL}", "--set", "image_size=32", "--global-batch-size", "16",
         "--max-steps", "6", "--hw", "cpu", "--set", "warmup_steps=0")  # fmt: skip
SCORE = Target("score", ("s",), ("1", "2", "4"), mean=(2.0,), spread=(1.25,))
LABELS = Target("labels", ("a", "b"), ("a", "b"))


@pytest.fixture(scope="module")
def competitions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("competitions")
    for name in ("appeal", "findings"):
        PLAYED[f"write_{name}"](folder / name, 32)
    return folder


def test_losses_are_those_of_torch_and_timm():
    rng = torch.Generator().manual_seed(0)
    scores, values = torch.randn(6, 2, generator=rng), torch.randint(0, 2, (6, 2), generator=rng)
    values = values.float()
    bce = F.binary_cross_entropy_with_logits(scores, values, reduction="none").mean(1)
    torch.testing.assert_close(TargetLoss(LABELS).losses(scores, values), bce)
    ours = TargetLoss(LABELS, "asymmetric").losses(scores, values).mean() * 2
    theirs = AsymmetricLossMultiLabel(gamma_neg=4, gamma_pos=1, clip=0.05)(scores, values)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    number = Target("number", ("y", "z"), mean=(10.0, -1.0), spread=(2.0, 0.5))
    truth = torch.randn(6, 2, generator=rng) * 3
    wanted = (truth - torch.tensor([10.0, -1.0])) / torch.tensor([2.0, 0.5])
    for name, loss in (("mse", F.mse_loss), ("mae", F.l1_loss), ("huber", F.huber_loss)):
        found = TargetLoss(number, name).losses(scores, truth)
        torch.testing.assert_close(found, loss(scores, wanted, reduction="none").mean(1))
    # What a row lacks is left out of its mean, and has no gradient.
    scores.requires_grad_()
    gaps = truth.clone()
    gaps[0, 1] = gaps[1, 0] = gaps[1, 1] = torch.nan
    found = TargetLoss(number).losses(scores, gaps)
    each = F.mse_loss(scores, wanted, reduction="none")
    torch.testing.assert_close(found, torch.stack([each[0, 0], 0 * each[0, 0], *each[2:].mean(1)]))
    (gradient,) = torch.autograd.grad(found.sum(), scores)
    assert gradient.isfinite().all() and gradient[gaps.isnan()].eq(0).all()
    back = TargetLoss(number).predictions(scores)
    torch.testing.assert_close(back, scores * torch.tensor([2.0, 0.5]) + torch.tensor([10.0, -1.0]))


@pytest.mark.parametrize("name", ["mse", "ordinal", "cross_entropy"])
def test_the_expected_score_is_in_the_unit_of_the_table(name):
    """What a certain network predicts is the score itself, and its loss is the least."""
    loss = TargetLoss(SCORE, name)
    for place, grade in enumerate((1.0, 2.0, 4.0)):
        if name == "mse":
            scores = torch.tensor([[(grade - 2.0) / 1.25]])
        elif name == "ordinal":
            scores = torch.tensor([[60.0 if place > cut else -60.0 for cut in range(2)]])
        else:
            scores = 60.0 * F.one_hot(torch.tensor([place]), 3).float()
        assert scores.shape[1] == loss.outputs
        assert loss.predictions(scores).item() == pytest.approx(grade, abs=1e-4)
        assert loss.losses(scores, torch.tensor([grade])).item() == pytest.approx(0, abs=1e-4)
        assert loss.losses(scores, torch.tensor([1.0 if place else 4.0])).item() > 0.1


@pytest.mark.parametrize(
    ("target", "names"),
    [(SCORE, LOSSES["score"]), (LABELS, LOSSES["labels"]),
     (Target("class", ("c",), ("a", "b")), LOSSES["class"]),
     (Target("number", ("y", "z"), mean=(10.0, -1.0), spread=(2.0, 0.5)), LOSSES["number"])],
)  # fmt: skip
def test_the_formula_of_an_export_is_what_is_predicted(target, names):
    """READMEs called standardised numbers the scores of classes."""
    for name in names:
        loss = TargetLoss(target, name)
        scores = torch.randn(5, loss.outputs, generator=torch.Generator().manual_seed(0))
        found = eval(loss.formula(), {"torch": torch, "scores": scores})
        torch.testing.assert_close(found.reshape(5, -1), loss.predictions(scores))


def test_balanced_weights_count_labels_and_scores_alike():
    rows = np.array([[1, 0], [0, 0], [0, 0], [0, 1]], np.float32)
    weights = balanced_weights(LABELS.fitted(rows), rows)
    for column, found in zip(rows.T, weights.T, strict=True):
        assert found[column == 1].sum() == pytest.approx(found[column == 0].sum()) == 2
    scores = np.array([1, 1, 1, 2, 4, 4], np.float32)
    found = balanced_weights(SCORE.fitted(scores), scores)
    assert [found[scores == grade].sum() for grade in (1, 2, 4)] == pytest.approx([2, 2, 2])
    # A class that pseudo-labels alone have.
    named = Target("class", ("c",), ("a", "b", "c"), counts=(3, 3, 0))
    assert balanced_weights(named, np.eye(3)).tolist() == pytest.approx([2 / 3, 2 / 3, 2])


def test_features_are_standardised_and_what_is_new_is_none():
    rows = [{"age": age, "kind": kind} for age, kind in (("1", "a"), ("3", "b"), ("5", "a"))]
    found = TableFeatures.from_json(TableFeatures.fitted(rows).to_json())
    assert found.values(rows[2]).tolist() == pytest.approx([2 / np.std([1, 3, 5]), 1])
    assert found.values({"age": "", "kind": "new"}).tolist() == [0, 0]


def test_features_of_missing_constant_and_new_values():
    """NA among numbers is a missing one, a column of one value nothing (its deviation, which is
    2.8e-17 for 0.1, divided what was new), and a new category the mean of the known ones."""
    texts = [("1", "0.1", "a"), ("NA", "0.1", "b"), ("5", "0.1", "a"), ("9", "0.1", "b")] * 3
    rows = [dict(zip(("age", "same", "kind"), row, strict=True)) for row in texts]
    found = TableFeatures.fitted(rows)
    assert found.numbers == {"age": (5, pytest.approx(np.std([1, 5, 9])))}
    assert found.categories == {"kind": ("a", "b")}
    with pytest.raises(DataError, match="'old' is no number"):
        found.values({"age": "old", "kind": "a"})
    new = {"age": "nan", "kind": "c"}
    assert len([*found.unseen([rows[0], new])]) == 1 and not [*found.unseen(rows)]
    model = WithFeatures(torch.nn.Identity(), 2, found, 1)
    beside = [found.values({**new, "kind": kind}).tolist() for kind in ("a", "b", "c")]
    a, b, c = model(torch.ones(3, 2), torch.tensor(beside)).flatten().tolist()
    assert c == pytest.approx((a + b) / 2, abs=1e-6)


def test_all_features_are_without_the_index_of_pandas(tmp_path):
    (tmp_path / "test.csv").write_text("Unnamed: 0,id,age\n0,b,4\n")
    (tmp_path / "train.csv").write_text("Unnamed: 0,id,age,y\n0,a,3,0.5\n")
    table, target = read_table(tmp_path / "train.csv"), Target("number", ("y",))
    found = LabelledTable(table, "id", target, target.values(table))
    assert features_of(found, TableSettings(str(tmp_path)), "all") == ["age"]


def test_rows_of_one_id_have_their_own_features(tmp_path):
    """All of them had the last one's."""
    (tmp_path / "test.csv").write_text("id,age\nx,1\nx,3\ny,5\n")
    found = TableFeatures({"age": (3.0, 1.0)}, {})
    rows = _texts_by_id(read_table(tmp_path / "test.csv"), found, "id", ["y", "x", "x", "y"])
    assert [row["age"] for row in rows] == ["5", "1", "3", "5"]


def test_a_sample_may_have_other_ids_than_the_images_names(tmp_path):
    for name in "ab":
        (tmp_path / "test").mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / "test" / f"{name}.png")
    (tmp_path / "test.csv").write_text("id,file\n7,b.png\n8,a.png\n")
    sample = tmp_path / "sample_submission.csv"
    sample.write_text("id,label\n8,0\n7,0\n")
    task = ImagesTask(predicts=LABELS.to_json(), data_path=str(tmp_path), id_column="file")
    request = PredictionRequest(None, sample_submission=sample)
    found, column = find_images(task, request)
    assert (column, found.ids) == ("id", ("8", "7"))
    assert [Path(file).name for file in found.files] == ["a.png", "b.png"]
    sample.write_text("id,label\n9,0\n")
    with pytest.raises(DataError, match=r"test\.csv has no row of id '9', whose file names its im"):
        find_images(task, request)
    assert find_images(task, PredictionRequest(None))[0].ids == ("b.png", "a.png")


def train(folder, run, *more):
    done = tpukit("train", "--task", "images", "--data-path", folder, *SMALL, "--results-dir", run,
                  "--json", *more)  # fmt: skip
    assert result(done)["finished"]
    return done


def submission(folder, run):
    out = run / "submission.csv"
    sample = folder / "sample_submission.csv"
    result(tpukit("predict", "--run", run, "--hw", "cpu", "--sample-submission", sample, "--out",
                  out, "--json"))  # fmt: skip
    with out.open() as file, sample.open() as given:
        rows, wanted = list(csv.DictReader(file)), list(csv.reader(given))
    assert [*rows[0]] == wanted[0] and [r[wanted[0][0]] for r in rows] == [r[0] for r in wanted[1:]]
    return rows


def by_hand(run, folder, ids, outputs, file=None):
    """The outputs of timm's model for images by id, and the run's state dict."""
    weights = load_file(file or next((run / "checkpoints").glob("step-*/model.safetensors")))
    network = {name.removeprefix("network."): value for name, value in weights.items()
               if not name.startswith(("head.weight", "head.bias", "embeddings"))}  # fmt: skip
    is_plain = not any(name.startswith("network.") for name in weights)
    model = timm.create_model("test_convnext", num_classes=outputs if is_plain else 0).eval()
    model.load_state_dict(weights if is_plain else network)
    config = model.pretrained_cfg
    names = ("crop_pct", "mean", "std", "interpolation")
    transform = create_transform(32, **{name: config[name] for name in names})
    files = [folder / "test_images" / f"{name}.png" for name in ids]
    images = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
    with torch.no_grad():
        return model(images), weights


def appeal_by_hand(run, checkpoint, folder, ids):
    """The numbers for images by id, whose columns of the table stand beside timm's features."""
    pooled, weights = by_hand(run, folder, ids, 1, checkpoint / "model.safetensors")
    with (folder / "test.csv").open() as file:
        table = {row["Id"]: row for row in csv.DictReader(file)}
    kept = json.loads((checkpoint / "features.json").read_text())
    beside = []
    for given in map(table.get, ids):
        numbers = [(float(given[n]) - m) / s for n, (m, s) in kept["numbers"].items()]
        place = 1 + kept["categories"]["Kind"].index(given["Kind"])
        beside.append([*numbers, *weights["embeddings.0.weight"][place].tolist()])
    whole = torch.cat([pooled, torch.tensor(beside)], 1)
    scores = whole @ weights["head.weight"].T + weights["head.bias"]
    return in_unit(scores[:, 0], checkpoint)


def in_unit(scores, checkpoint):
    """Standardised numbers in the unit of the table."""
    target = json.loads((checkpoint / "target.json").read_text())
    return scores * target["spread"][0] + target["mean"][0]


def essays_by_hand(fold, checkpoint, texts):
    """The scores of one fold, by transformers from what it exports."""
    export = fold / "export"
    result(tpukit("test", "--run", fold, "--export", export, "--json"))
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    with torch.no_grad():
        found = [model(**tokenizer(text, return_tensors="pt")).logits.squeeze() for text in texts]
    return in_unit(torch.stack(found), checkpoint)


def test_several_labels_are_submitted_as_timm_predicts_them(competitions, tmp_path):
    folder, run = competitions / "findings", tmp_path / "run"
    done = train(folder, run, "--set", "loss=asymmetric", "--set", "class_weights=balanced",
                 "--metric", "auc", "--set", "group_column=PatientID")  # fmt: skip
    assert "Learning 3 labels, each 0 or 1, in the columns ETT, NGT, CVC (named in" in done.stderr
    rows = submission(folder, run)
    scores, _ = by_hand(run, folder, [row["StudyInstanceUID"] for row in rows], 3)
    found = [[float(row[name]) for name in ("ETT", "NGT", "CVC")] for row in rows]
    np.testing.assert_allclose(found, scores.sigmoid(), atol=1e-5)
    tested = result(tpukit("test", "--run", run, "--hw", "cpu", "--json"))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert tested["metrics"]["auc"] == pytest.approx(last["valid_auc"], abs=1e-6)


@pytest.mark.slow
def test_a_number_is_learned_beside_columns_of_the_table(competitions, tmp_path):
    folder, run = competitions / "appeal", tmp_path / "run"
    done = train(folder, run, "--set", "features=all", "--metric", "rmse")
    assert "Learning a number in the column Pawpularity (named in" in done.stderr
    rows = submission(folder, run)
    checkpoint = next((run / "checkpoints").glob("step-*"))
    wanted = appeal_by_hand(run, checkpoint, folder, [row["Id"] for row in rows])
    np.testing.assert_allclose([float(row["Pawpularity"]) for row in rows], wanted, atol=1e-3)
    wrong = ("--set", "features=Eyes,Pawpularity", "--results-dir", tmp_path / "b")
    told = failure(tpukit("train", "--task", "images", "--data-path", folder, *SMALL, *wrong))
    assert "features Pawpularity" in told and "Subject Focus, Eyes, Kind" in told

    form = json.loads((checkpoint / "data_config.json").read_text())
    wanted = resolve_data_config({"input_size": (3, 32, 32)}, model=timm.create_model(MODEL))
    assert {name: wanted[name] for name in form} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in form.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_competitions_take_two_commands(tmp_path):
    """Each from the attached folder; the submission is the mean of what timm or transformers
    predicts with the weights of the folds."""
    PLAYED["write_competitions"](tmp_path, 32)
    for competition in PLAYED["COMPETITIONS"]:
        commands = competition.commands(tmp_path, tmp_path / "runs")
        for words in commands:
            done = tpukit(*words)
            assert done.returncode == 0, done.stderr[-2000:]
        folder, run = tmp_path / competition.name, tmp_path / "runs" / competition.name
        with (run / "submission.csv").open() as file:
            header, *rows = csv.reader(file)
        sample = [*csv.reader((folder / "sample_submission.csv").open())]
        assert header == sample[0] and [row[0] for row in rows] == [row[0] for row in sample[1:]]
        ids, found = [row[0] for row in rows], [row[1:] for row in rows]
        if competition.name == "replies":
            continue
        parts = []
        for fold in sorted(run.glob("fold-*")):
            best = fold / "checkpoints" / (fold / "checkpoints" / "best").read_text().strip()
            if competition.name == "appeal":
                parts.append(appeal_by_hand(fold, best, folder, ids))
            elif competition.name == "essays":
                with (folder / "test.csv").open() as file:
                    texts = {row["essay_id"]: row["full_text"] for row in csv.DictReader(file)}
                parts.append(essays_by_hand(fold, best, [texts[name] for name in ids]))
            else:
                scores = by_hand(fold, folder, ids, 3, best / "model.safetensors")[0]
                is_class = competition.name == "species"
                parts.append(scores.softmax(1) if is_class else scores.sigmoid())
        mean = torch.stack(parts).mean(0)
        if competition.name == "species":
            names = ("circle", "cross", "star")
            assert found == [[names[i]] for i in mean.argmax(1)]
        elif competition.name == "essays":
            kept = json.loads((run / "folds.json").read_text())
            cuts = torch.tensor(kept["cuts"])
            assert found == [[str(1 + int((cuts <= score).sum()))] for score in mean]
            with (run / "out_of_fold.csv").open() as file:
                held_out = [*csv.DictReader(file)]
            truth = [int(float(row["score"])) for row in held_out]
            cut = [1 + sum(c <= float(row["predicted_score"]) for c in kept["cuts"])
                   for row in held_out]  # fmt: skip
            kappa = cohen_kappa_score(truth, cut, weights="quadratic")
            assert kept["with_cuts"] == pytest.approx(kappa) and len(truth) == 32
        else:
            columns = mean.reshape(len(ids), -1)
            np.testing.assert_allclose([[*map(float, row)] for row in found], columns, 2e-5, 1e-5)
