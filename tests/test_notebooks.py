"""The notebooks are what `notebooks/make.py` writes, and run from their first cell to the last."""

import csv
import importlib.util
import json
import os
import re
import shutil
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
import torch
import transformers
from competitions import SHARES, image_competition
from kernels import error_of, execute, notebook_of, printed, shown
from PIL import Image
from runs import ROOT, SUPPORT, VIRTUAL_TPU, metrics, result, tpukit
from timm.data import create_transform, resolve_data_config
from tiny_qwen import write_qwen
from tiny_readers import write_reader, write_tables

from tpukit import api

FOLDER = ROOT / "notebooks"
ALL = {"load", "eit", "summaries", "images", "own"}
PARTS = {"kaggle_tpu": ALL, "kaggle_t4x2": ALL, "colab_tpu": ALL, "kaggle_llm": {"load", "llm"}}
NAMES = [*PARTS]
SMALL = """
WORK, SCRATCH, SAMPLES = "work", "data", 160
LENGTH = "--max-steps 2 --log-every 1 --hw {hw}"
PROBE = "--start 1 --max 1"
"""
MOST_TEXT = 20_000
"""Characters that a cell may print."""


def make():
    spec = importlib.util.spec_from_file_location("make_notebooks", FOLDER / "make.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(name, parts, parameters):
    """A notebook's cells of these parts, with other parameters and nothing to install."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    kept = [c for c in notebook.cells if parts & {*c.metadata.get("tags", ())} or is_settings(c)]
    for cell in filter(is_settings, kept):
        cell.source += parameters
    notebook.cells = kept
    return notebook


def is_settings(cell):
    return "parameters" in cell.metadata.get("tags", ())


def require_success(notebook):
    for cell in notebook.cells:
        assert not error_of(cell), (cell.source, printed(cell)[-2000:], error_of(cell))
        assert len(printed(cell)) < MOST_TEXT, (cell.source, printed(cell)[:MOST_TEXT])


def pictures(notebook, part):
    """How many pictures each cell of a part displays, where it displays some."""
    cells = [c for c in notebook.cells if part in c.metadata.tags]
    return [count for c in cells if (count := len(shown(c, "image/png")))]


def test_the_notebooks_are_made_from_their_source():
    texts = make().texts()
    assert sorted(texts) == sorted(f"{name}.ipynb" for name in NAMES)
    for name, text in texts.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, "python notebooks/make.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_and_small(name):
    file = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert file.stat().st_size < 20_000
    assert {tag for c in notebook.cells for tag in c.metadata.get("tags", ())} >= PARTS[name]
    assert not any(c.get("outputs") for c in notebook.cells)


def test_a_task_of_a_notebook_trains_and_predicts(tmp_path):
    notebook = small("kaggle_t4x2", {"load", "own"}, SMALL.format(hw="cpu"))
    (load,) = (c for c in notebook.cells if "load" in c.metadata.tags)
    load.source = load.source.replace("%tpukit doctor", "")
    execute(notebook, tmp_path)
    require_success(notebook)
    assert pictures(notebook, "own") == [1]
    rows = list(csv.DictReader((tmp_path / "work/spirals.csv").open()))
    assert len(rows) == 1000 and {row["arm"] for row in rows} <= {"0", "1", "2"}


# -- installing -----------------------------------------------------------------------------------
PIP = """#!/bin/sh
printf '%s\\n' "$*" >> "$PIP_CALLS"
"""


def test_what_is_attached_is_installed(tmp_path):
    """A pip that records its arguments stands in for the real one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pip").write_text(PIP)
    (tmp_path / "bin/pip").chmod(0o755)
    wheel = "tpukit-0.2.0-py3-none-any.whl"
    for file in ("one/" + wheel, "all/" + wheel, "all/timm-1.0-py3-none-any.whl",
                 "code/tpukit-main/pyproject.toml"):  # fmt: skip
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (cell,) = small("kaggle_tpu", {"install"}, "").cells[1:]
    address = "https://example.org/" + wheel
    sources = [str(tmp_path / name) for name in ("one", "all", "code", "one/" + wheel)]
    cells = [f"TPUKIT = {source!r}\n{cell.source}" for source in (*sources, address)]
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PIP_CALLS": str(tmp_path / "calls")}
    notebook = execute(notebook_of(*cells), tmp_path, env)
    require_success(notebook)
    one, everything = tmp_path / "one" / wheel, tmp_path / "all"
    kept = "--constraint /tmp/tpukit-kept.txt"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"install --quiet {kept} {one}",
        f"install --quiet --no-index --find-links {everything} {kept} {everything / wheel}",
        f"install --quiet {kept} /tmp/tpukit-checkout",
        f"install --quiet {kept} {one}",
        f"install --quiet {kept} {address}",
    ]
    # The image's own release, with the build that its name may hold.
    assert f"torch=={version('torch')}" in Path("/tmp/tpukit-kept.txt").read_text().splitlines()


# -- whole notebooks -------------------------------------------------------------------------------
def whole(name, cwd, hw, parameters="", env=None):
    notebook = small(name, ALL, SMALL.format(hw=hw) + parameters)
    execute(notebook, cwd, env, timeout=1200)
    require_success(notebook)
    for file in ("submission.csv", "classes.csv", "spirals.csv"):
        assert len((cwd / "work" / file).read_text().splitlines()) > 10
    return notebook


def require_pictures(notebook):
    # A loss curve, reconstructions; a loss curve, a confusion matrix and mistakes, all of them.
    assert pictures(notebook, "eit")[-2:] == [1, 1]
    assert pictures(notebook, "images") == [1, 2, 3]
    assert pictures(notebook, "summaries") == pictures(notebook, "own") == [1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("hw", "more"), [("cpu", "--devices 2"), pytest.param("tpu", "", marks=pytest.mark.xla)]
)
def test_the_notebook_of_an_adapter_runs(tmp_path, hw, more):
    """From a table to an adapter, on two ranks and on eight virtual devices."""
    peft = pytest.importorskip("peft")
    write_qwen(tmp_path / "qwen")
    own = f"""
WORK, SCRATCH, SAMPLES = "work", "data", 160
MODEL = "--init qwen --set chat=true --hw {hw} {more}"
LENGTH = "--max-steps 2 --log-every 1 --global-batch-size 16 --max-new-tokens 8"
"""
    notebook = small("kaggle_llm", PARTS["kaggle_llm"], own)
    (load,) = (c for c in notebook.cells if "load" in c.metadata.tags)
    load.source = load.source.replace("%tpukit doctor", "")
    execute(notebook, tmp_path, VIRTUAL_TPU if hw == "tpu" else None, timeout=900)
    require_success(notebook)
    assert len((tmp_path / "work/answers.csv").read_text().splitlines()) > 10
    exported = tmp_path / "work/exported"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen")
    assert len(peft.PeftModel.from_pretrained(model, exported / "adapter").state_dict())
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_next_days_session_goes_on(tmp_path):
    """A session that its time limit ended; its output is attached to the next one, read-only."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    folders = [str(SUPPORT / "slow_steps"), *filter(None, [os.environ.get("PYTHONPATH")])]
    slow = {"PYTHONPATH": os.pathsep.join(folders)}
    whole("colab_tpu", first, "cpu", 'LENGTH += " --max-time 1s"', env=slow)
    output = tmp_path / "output"
    shutil.copytree(first / "work", output)
    for path in output.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    done = whole("colab_tpu", second, "cpu", f"YESTERDAY = {str(output)!r}")
    require_pictures(done)
    for part in ("eit", "summaries", "images", "own"):
        text = "".join(printed(c) for c in done.cells if part in c.metadata.tags)
        assert f"Starting from {output}" in text, part
        assert "Done: 2 steps" in text, part


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", ["!{python} -m tpukit", "%tpukit"])
def test_a_cell_of_ten_minutes_prints_little(tmp_path, cell):
    """A run with validations and checkpoints every few seconds, which its time limit ends."""
    result(tpukit("data", "eit", "--out", tmp_path / "data", "--n", "400", "--json"))
    words = (
        "train --preset quick --size tiny --hw cpu --max-steps 1000000 --max-time 10m "
        "--log-every 1 --ckpt-every 20 --data-path data --results-dir run"
    )
    train = f"{cell.format(python=sys.executable)} {words}"
    notebook = execute(notebook_of("%load_ext tpukit", train), tmp_path, timeout=1800)
    require_success(notebook)
    text = printed(notebook.cells[-1])
    assert "Time is up after step" in text and len(text.splitlines()) <= 300, text


# -- docs/kaggle.md -------------------------------------------------------------------------------
PAGE = ROOT / "docs/kaggle.md"
SHORTER = {
    "/kaggle/working": "work",
    "/kaggle/input/my-notebook": "yesterday",
    "/kaggle/input/my-competition": "competition",
    "--n 20000": "--n 60",
    "--start 4": "--start 2 --max 2 --preset quick --hw cpu",
    "--max-time 8h30m --log-every 10 --ckpt-every 100": "--preset quick --max-steps 2 --hw cpu",
    "--epochs 10": "--epochs 2 --log-every 1 --global-batch-size 16 --hw cpu",
    "--max-time 8h30m": "",
    "model=convnext_tiny": "model=test_convnext --set image_size=32",
    "pretrained=timm": "pretrained=none",
    "/kaggle/input/my-text-competition": "competition",
    "distilbert-base-uncased": "bert",
    "--model {MODEL}": "--model {MODEL} --max-length 16 --hw cpu "
    "--epochs 2 --lr 1e-2 --global-batch-size 4",
}
"""What the page's cells say, and what this machine does instead in seconds."""
SAMPLE = """
import csv
with open(f"{DATA}/test.csv") as tests, open(f"{DATA}/sample_submission.csv", "w") as sample:
    rows = [[row["id"], "none"] for row in csv.DictReader(tests)]
    csv.writer(sample).writerows([["id", "summary"], *rows])
"""


def page_cells(start, end):
    """The page's cells between two headings."""
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index(f"## {start}") : text.index(f"## {end}")]
    for long, short in SHORTER.items():
        part = part.replace(long, short)
    return re.findall(r"^```\n(.*?)\n```$", part, re.MULTILINE | re.DOTALL)


def test_the_page_links_every_notebook():
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"../notebooks/{name}.ipynb" in page for name in NAMES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_pages_cells_on_summaries_run(tmp_path):
    data, probe, train, *others = page_cells("4. Dialogue summaries", "Without a network")[1:]
    leave = "!mkdir yesterday && mv work/out-summarization yesterday"
    cells = [data, SAMPLE, probe, train, leave, *others]
    notebook = notebook_of("%load_ext tpukit", 'RUN = "work/out-summarization"', *cells)
    execute(notebook, tmp_path)
    require_success(notebook)
    assert "Starting from yesterday" in "".join(map(printed, notebook.cells))
    rows = list(csv.DictReader((tmp_path / "work/submission.csv").open()))
    assert len(rows) == 6 and list(rows[0]) == ["id", "summary"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_pages_image_competition_ends_in_a_submission(tmp_path):
    """Each epoch is validated; a training, a validation and a test image are damaged."""
    competition = image_competition(tmp_path / "competition", images=170)
    cells = page_cells("2. An image competition", "3. A text competition")
    notebook = execute(notebook_of("%load_ext tpukit", *cells), tmp_path)
    require_success(notebook)
    assert [len(shown(c, "image/png")) for c in notebook.cells] == [0, 0, 1, 2, 0, 0]
    train, test, predict, head = map(printed, notebook.cells[2:])
    validated, _, unseen = competition.damaged
    assert f"1 of 136 images cannot be read: {validated}.png" in train
    assert "1 of 14 images cannot be read and are left out:" in test and validated in test
    assert "1 of 34 images cannot be read and have a neutral row" in predict and unseen in predict
    assert head.count("image_id,star,cross,circle") == 2
    # 122 images to train on, 16 a step: an epoch is 7.6 steps.
    run = tmp_path / "work/images"
    assert [row["step"] for row in metrics(run) if "valid_loss" in row] == [8, 16]
    sample, ids = competition.sample.read_text().splitlines(), [*competition.answers]
    rows = list(csv.DictReader((tmp_path / "work/submission.csv").open()))
    assert ",".join(rows[0]) == sample[0]
    assert [row["image_id"] for row in rows] == [line.split(",")[0] for line in sample[1:]] == ids
    tested = csv.DictReader((run / "test-valid/predictions.csv").open())
    valid = {validated, *(Path(row["file"]).stem for row in tested)}
    trained_on = Counter(competition.labels[name] for name in competition.labels.keys() - valid)
    frequencies = {name: count / 122 for name, count in trained_on.items()}
    scores = plain_scores(run, competition)
    assert [*scores] == [name for name in ids if name != unseen]
    for row in rows:
        expected = scores.get(row.pop("image_id"), frequencies)
        assert {n: float(v) for n, v in row.items()} == pytest.approx(expected, abs=1e-5)


def plain_scores(run, competition):
    """The test images' probabilities by the run's model, timm and torch; damaged ones left out."""
    trained, found = api.load(run, log=str), {}
    config = resolve_data_config({"input_size": (3, 32, 32)}, model=trained.model)
    transform = create_transform(**config)
    for name in competition.answers.keys() - {*competition.damaged}:
        (file,) = (competition.folder / "test_images").glob(f"{name}.*")
        image = transform(Image.open(file).convert("RGB"))
        with torch.inference_mode():
            both = trained.model(torch.stack([image, image.flip(2)])).softmax(1).mean(0)
        found[name] = dict(zip(sorted(SHARES), both.tolist(), strict=True))
    return {name: found[name] for name in competition.answers if name in found}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_pages_text_competition_ends_in_a_submission(tmp_path):
    """Each epoch is validated; the sample has a column for each class, and another order."""
    write_reader(tmp_path / "bert", "bert")
    competition = write_tables(tmp_path / "competition", rows=40, tests=40)
    ids = [f"r{n}" for n in range(79, 39, -1)]
    sample = ["id,good,bad,fair", *(f"{name},0.3,0.3,0.4" for name in ids), ""]
    (competition / "sample_submission.csv").write_text("\n".join(sample))
    cells = page_cells("3. A text competition", "4. Dialogue summaries")
    notebook = execute(notebook_of("%load_ext tpukit", *cells), tmp_path)
    require_success(notebook)
    assert printed(notebook.cells[2]).count("valid_accuracy") >= 2
    rows = list(csv.DictReader((tmp_path / "work/submission.csv").open()))
    assert list(rows[0]) == ["id", "good", "bad", "fair"] and [row["id"] for row in rows] == ids
    assert all(abs(sum(map(float, [*row.values()][1:])) - 1) < 1e-5 for row in rows)
