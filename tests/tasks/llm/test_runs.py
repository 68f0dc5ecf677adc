"""Whole runs: the same arithmetic everywhere, graphs counted, killed and resumed, predicted."""

import csv
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import (
    VIRTUAL_TPU,
    latest,
    metrics,
    parameters,
    python,
    relative_difference,
    result,
    started,
    tpukit,
)

from tpukit import cli, load
from tpukit.commands.output import Output
from tpukit.registry import trained
from tpukit.tasks.llm.generate import write_dialogues
from tpukit.tasks.llm.task import SummarizeTask

SMALL = [
    "--model", "2x2x32", "--tokenizer", "train", "--set", "vocabulary_size=400",
    "--block-size", "256",
    "--global-batch-size", "16", "--precision", "fp32", "--set", "score_samples=6",
    "--set", "max_new_tokens=12", "--set", "warmup_steps=2",
    "--num-workers", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):  # type: ignore[no-untyped-def]
    """A folder with data and a cache that all runs of this file share."""
    folder = tmp_path_factory.mktemp("summaries")
    write_dialogues(folder / "data", 150, 0)
    return folder


def env_of(place: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    return {"TPUKIT_CACHE_DIR": str(place / "cache"), **(extra or {})}


def here(place: Path, *arguments: object) -> None:
    """One command line in this process; the environment is as it was afterwards."""
    before = dict(os.environ)
    os.environ.update(env_of(place))
    try:
        assert cli.run([str(argument) for argument in arguments]) == 0
    finally:
        os.environ.clear()
        os.environ.update(before)


def train_here(place: Path, name: str, *options: object) -> None:
    here(place, "summarize-train", "--data-path", place / "data", "--results-dir", place / name,
         "--hw", "cpu", *SMALL, *options)  # fmt: skip


def train(place: Path, name: str, *options: object, env: dict[str, str] | None = None, hw="cpu"):  # type: ignore[no-untyped-def]
    arguments = [
        "summarize-train", "--data-path", place / "data", "--results-dir", place / name,
        "--hw", hw, "--json", *SMALL, *options,
    ]  # fmt: skip
    return tpukit(*arguments, env=env_of(place, env))


@pytest.fixture(scope="module")
def whole(place):  # type: ignore[no-untyped-def]
    """The run that others are compared with: one process, ten steps."""
    train_here(place, "whole", "--max-steps", 10, "--ckpt-every", 5)
    return place / "whole"


@pytest.mark.parametrize("options", [
    pytest.param(["--accumulate", 2, "--set", "recompute=true"], marks=pytest.mark.slow),
    ["--accumulate", 4],
    pytest.param(["--compile"], marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_the_same_parameters_however_a_step_is_cut(place, whole, options):  # type: ignore[no-untyped-def]
    name = "run" + "".join(map(str, options))
    train_here(place, name, "--max-steps", 10, "--ckpt-every", 5, *options)
    assert relative_difference(parameters(place / name), parameters(whole)) < 1e-4


@pytest.mark.slow
def test_what_a_model_imports_does_not_count_against_the_limit(place):  # type: ignore[no-untyped-def]
    """The largest batch of `probe-batch` would not train: transformers alone takes 150 MB. In a new
    process: a fork has imported it."""
    words = ["summarize-train", "--data-path", place / "data", "--results-dir", place / "limited",
             "--hw", "cpu", "--json", *SMALL, "--max-steps", 1,
             "--memory-limit", "200MB"]  # fmt: skip
    result(python("-m", "tpukit", *words, env=env_of(place)))


@pytest.mark.slow
def test_two_processes_train_what_one_does(place, whole):  # type: ignore[no-untyped-def]
    result(train(place, "two", "--max-steps", 10, "--ckpt-every", 10, "--devices", 2))
    assert relative_difference(parameters(place / "two"), parameters(whole)) < 1e-4


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize("packing", ["true", "false"])
def test_eight_virtual_devices(place, whole, packing):  # type: ignore[no-untyped-def]
    """The same parameters; one train graph, and none after the first pass."""
    name = f"xla-{packing}"
    options = ["--max-steps", 10, "--ckpt-every", 5, "--accumulate", 2]
    # Packing is the default.
    options += [] if packing == "true" else ["--set", "packing=false"]
    told = result(train(place, name, *options, env=VIRTUAL_TPU, hw="tpu"))
    assert relative_difference(parameters(place / name), parameters(whole)) < 1e-4
    # That of the one shape, and the update's.
    assert told["graphs"]["train"] == 1 + 1
    assert told["compilations_after_warmup"] == 0
    assert told["graphs"]["score"] <= 2 + 1
    log = (place / name / "log.txt").read_text()
    assert f"{told['compilations']} compilations" in log


# -- prediction -------------------------------------------------------------------------------
def predict(place: Path, run: str, out: str, *options, env=None, hw="cpu", **more):  # type: ignore[no-untyped-def]
    command = predict_command(place, run, out, *options, hw=hw)
    return result(tpukit(*command, "--json", env=env_of(place, env), **more))


def predict_command(place: Path, run: str, out: str, *options, hw="cpu"):  # type: ignore[no-untyped-def]
    return ["predict", "--run", place / run, "--out", place / out, "--hw", hw,
            "--precision", "fp32", "--max-new-tokens", 16, *options]  # fmt: skip


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_submission_has_every_id_once_in_order(place, whole):  # type: ignore[no-untyped-def]
    sample = place / "data" / "test_references.csv"
    here(place, *predict_command(place, "whole", "submission.csv", "--sample-submission", sample))
    made = rows_of(place / "submission.csv")
    assert len(made) == 15
    assert list(made[0]) == ["id", "summary"]
    assert [row["id"] for row in made] == [row["id"] for row in rows_of(sample)]
    assert not list(place.glob(".submission.csv*"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--num-beams", 3], ["--temperature", 0.7]], ids=str)
def test_two_processes_predict_what_one_does(place, whole, options):  # type: ignore[no-untyped-def]
    here(place, *predict_command(place, "whole", "one.csv", *options))
    predict(place, "whole", "two.csv", *options, "--devices", 2)
    assert (place / "one.csv").read_bytes() == (place / "two.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize("options", [[], ["--num-beams", 3], ["--temperature", 0.7]], ids=str)
def test_one_virtual_device_predicts_what_a_cpu_does(place, whole, options):  # type: ignore[no-untyped-def]
    """Prompts come one at a time into their rows of the cache there."""
    here(place, *predict_command(place, "whole", "cpu.csv", *options))
    one = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "1"}
    predict(place, "whole", "xla.csv", *options, env=one, hw="tpu")
    assert (place / "cpu.csv").read_bytes() == (place / "xla.csv").read_bytes()


@pytest.mark.slow
def test_a_killed_prediction_ends_in_the_same_file(place, whole):  # type: ignore[no-untyped-def]
    """Killed after some chunks: those are kept, and the answer is that of an uninterrupted run."""
    write_dialogues(place / "many", 6000, 1)
    more = ["--test-csv", place / "many" / "test.csv", "--temperature", 0.9]
    command = predict_command(place, "whole", "killed.csv", *more)
    journal = place / ".killed.csv.journal-0"
    with started(*command, env=env_of(place)) as child:
        while not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
            assert child.poll() is None, "it was over before it could be killed"
            time.sleep(0.01)
    assert not (place / "killed.csv").exists()
    # As a kill in the middle of a write would leave it.
    with journal.open("ab") as file:
        file.write(b'{"chunk": 1, "rows": {"3": "half a li')
    here(place, *command)
    here(place, *predict_command(place, "whole", "uninterrupted.csv", *more))
    assert (place / "killed.csv").read_bytes() == (place / "uninterrupted.csv").read_bytes()
    assert not journal.exists()


def test_evaluation_reports_scores_intervals_and_baselines(place, whole, monkeypatch):  # type: ignore[no-untyped-def]
    told: dict = {}
    monkeypatch.setattr(Output, "result", lambda self, fields: told.update(fields))
    here(place, "test", "--run", whole, "--hw", "cpu")
    assert (told["task"], told["samples"] + told["skipped"]) == ("llm", 15)
    found = told["metrics"]
    for kind in ("rouge1", "rouge2", "rougeL"):
        assert found[f"{kind}_low"] <= found[kind] <= found[f"{kind}_high"]
        better = max(found[f"{kind}_lead"], found[f"{kind}_nearest"])
        assert found[f"{kind}_baseline"] == better
    assert 0 < found["loss"] < 7
    assert len(told["best"]) == len(told["worst"]) == 3
    assert len(rows_of(whole / "test" / "predictions.csv")) == told["samples"]


@pytest.mark.slow
def test_a_run_of_an_earlier_name_and_settings_is_read(place, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    own, run = SummarizeTask.identity, tmp_path / "run"
    with monkeypatch.context() as before:
        before.setattr(SummarizeTask, "identity", lambda task: own(task) | {"buckets": 3})
        before.setattr(SummarizeTask, "name", "summarize")
        train_here(place, str(run), "--max-steps", 2, "--ckpt-every", 2)
    train_here(place, str(run), "--max-steps", 2, "--ckpt-every", 2)
    opened = trained.open_run(run, print)
    assert opened.task == "summarize"
    recorded = replace(opened, task_config=opened.task_config | {"buckets": 3, "loss": "lean"})
    monkeypatch.setattr(trained, "open_run", lambda *_: recorded)
    here(place, *predict_command(place, str(run), "earlier.csv"))


@pytest.mark.slow
def test_a_run_that_learned_prompts_is_tested_on_them(place, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    told: dict = {}
    train_here(place, str(tmp_path), "--max-steps", 2, "--set", "loss_on_prompt=true")
    monkeypatch.setattr(Output, "result", lambda self, fields: told.update(fields))
    here(place, "test", "--run", tmp_path, "--hw", "cpu", "--data", "valid")
    losses = [row["valid_loss"] for row in metrics(tmp_path) if "valid_loss" in row]
    assert told["metrics"]["loss"] == pytest.approx(min(losses), rel=1e-5)


def test_the_rows_held_out_of_training_are_tested_on(place, whole, tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    """A competition's test.csv has no summaries."""
    told: dict = {}
    monkeypatch.setattr(Output, "result", lambda self, fields: told.update(fields))
    for name in ("train.csv", "test.csv"):
        shutil.copy(place / "data" / name, tmp_path)
    test = ["test", "--run", whole, "--hw", "cpu", "--data-path", tmp_path]
    here(place, *test, "--data", "valid", "--out", tmp_path)
    asked = (tmp_path / "predictions.csv").read_bytes()
    here(place, *test, "--out", tmp_path)
    assert (tmp_path / "predictions.csv").read_bytes() == asked
    out = capsys.readouterr().out
    assert "testing on the rows held out of training" in out and "may have learned" not in out
    losses = [row["valid_loss"] for row in metrics(whole) if "valid_loss" in row]
    assert told["metrics"]["loss"] == pytest.approx(min(losses), rel=1e-5)
    held_out = {row["id"] for row in rows_of(tmp_path / "predictions.csv")}
    assert len(held_out) == told["samples"] == round(0.05 * len(rows_of(tmp_path / "train.csv")))
    # The nearest training summary is not a row's own.
    assert told["metrics"]["rougeL_nearest"] < 0.9
    (tmp_path / "train.csv").write_text((tmp_path / "train.csv").read_text() + "new,a: b,c\n")
    here(place, *test, "--data", "valid", "--out", tmp_path)
    assert "may have learned some of the rows" in capsys.readouterr().out


def test_a_run_is_exported_and_started_from(place, whole):  # type: ignore[no-untyped-def]
    """The exported directory is a start for another training, adapters and all."""
    train_here(place, "whole", "--max-steps", 10, "--ckpt-every", 5, "--export", place / "hf")
    lora = [option for option in SMALL if option not in ("--model", "2x2x32")]
    # The tokenizer comes with the weights.
    del lora[lora.index("--tokenizer") : lora.index("train") + 1]
    here(place, "summarize-train", "--data-path", place / "data", "--results-dir", place / "lora",
         "--hw", "cpu", *lora, "--init", place / "hf", "--lora-rank", 4, "--max-steps", 2,
         "--lora-layers", "1", "--set", "weights=bf16", "--set", "recompute=auto",
         "--export", place / "merged")  # fmt: skip
    trained = {n.replace(".base_layer", ""): t for n, t in parameters(place / "lora").items()}
    base = parameters(place / "whole")
    assert all(torch.equal(trained[name], base[name].bfloat16()) for name in base)
    added = trained.keys() - base.keys()
    assert added == {f"lm.transformer.h.1.attn.c_attn.lora_{kind}.default.weight" for kind in "AB"}
    assert all(trained[name].dtype == torch.float32 for name in added)
    assert "recompute = " in (place / "lora" / "log.txt").read_text()
    transformers = pytest.importorskip("transformers")
    exported = transformers.GPT2LMHeadModel.from_pretrained(place / "merged", dtype="auto")
    assert (exported.config.n_layer, exported.dtype) == (2, torch.bfloat16)
    assert (latest(place / "lora") / "tokenizer.tiktoken").is_file()


def test_test_exports_what_transformers_loads(place, whole, tmp_path):  # type: ignore[no-untyped-def]
    here(place, "test", "--run", whole, "--export", tmp_path)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = "\n\n### DIALOGUE:\nTom: Hello.\n\n### SUMMARY:\n"
    assert repr("\n\n### SUMMARY:\n") in (tmp_path / "README.md").read_text()
    tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
    trained = load(whole)
    assert tokens[0].tolist() == list(trained.task.tokenizer.encode(prompt))
    with torch.no_grad():
        assert (theirs(tokens).logits - trained.model(tokens)).abs().max() < 1e-4
