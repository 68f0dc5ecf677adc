"""`tpukit runs`: runs beside each other, with the settings that differ and how each ended."""

import json
import shutil

import pytest
from fake_backend import FakeBackend
from runs import failure, here, result, tpukit
from tiny_task import Tiny

from tpukit.errors import TpukitError
from tpukit.train.config import TrainConfig
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder, read_config, write_config


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs that are finished, stopped and failed."""
    folder = tmp_path_factory.mktemp("runs")

    def train(name, task=None, **config):
        settings = {"max_steps": 6, "global_batch_size": 16, "log_every": 2, "ckpt_every": 2,
                    "num_workers": 0, **config}  # fmt: skip
        task = task or Tiny()
        own = {n: v for n, v in task.given_settings.items() if n == "bad"}
        run = RunFolder(folder / name)
        train_run(
            TrainingRequest(task, TrainConfig(**settings), run, own), FakeBackend(), lambda _: None
        )
        return run

    train("one")
    train("two", lr=3e-3)
    shutil.copytree(folder / "one", folder / "stopped")
    tables = read_config(RunFolder(folder / "stopped"))
    tables["decided"]["total_steps"] = 99
    write_config(RunFolder(folder / "stopped"), tables)
    with pytest.raises(TpukitError):
        train("failed", Tiny(bad=3))
    return folder


def test_runs_of_a_folder_are_compared(place, tmp_path):
    page = tmp_path / "runs.html"
    done = here("runs", place / "two", place, "--out", page)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["run", "lr", "bad", "best", "at", "step", "steps", "time", "MFU",
                              "state"]  # fmt: skip
    names = ["two", "failed", "one", "stopped"]
    assert [line.split()[0].rpartition("/")[2] for line in lines[:4]] == names
    ends = dict(zip(names, lines[:4], strict=True))
    assert "0.003" in ends["two"] and ends["two"].endswith("finished")
    assert ends["stopped"].endswith("stopped: step 6 of 99")
    assert "failed: " in ends["failed"] and "stopped being finite in step 4" in ends["failed"]
    text = page.read_text()
    assert text.count("<tr>") == 5 and "<script" not in text
    assert f"{(place / 'two').as_uri()}/report.html" in text


def test_the_json_fields_of_compared_runs(place):
    one, two = result(tpukit("runs", place / "one", place / "two", "--json"))["runs"]
    assert one["settings"] == {"lr": 1e-3} and two["settings"] == {"lr": 3e-3}
    assert (one["state"], one["step"], one["total_steps"], one["metric"]) == (
        "finished", 6, 6, "loss",
    )  # fmt: skip
    rows = [json.loads(line) for line in (place / "one/metrics.jsonl").read_text().splitlines()]
    assert one["best"] == min(row["valid_loss"] for row in rows if "valid_loss" in row)


def test_a_folder_without_runs_is_an_error(tmp_path):
    assert "is not a run folder, and holds none" in failure(here("runs", tmp_path))


def test_time_that_nobody_logged_is_blank(place, tmp_path):
    """A run of a release before its log had `elapsed_seconds`."""
    shutil.copytree(place / "one", tmp_path / "old")
    log = tmp_path / "old" / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(row.pop("elapsed_seconds", None) for row in rows)
    rows = [{k: v for k, v in row.items() if k != "elapsed_seconds"} for row in rows]
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = result(tpukit("runs", tmp_path / "old", "--json"))
    assert [run["seconds"] for run in found["runs"]] == [None]
    assert "0.0s" not in here("runs", tmp_path / "old").stdout
