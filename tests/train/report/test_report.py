"""report.html: what it shows, when it is written, and that it ends no run."""

import json
import random
import re
import time
from datetime import datetime
from html.parser import HTMLParser

import numpy as np
import pytest
from fake_backend import FakeBackend
from PIL import Image
from runs import TINY, result, tpukit
from tiny_task import Tiny

from tpukit.errors import TaskFailedError
from tpukit.train.config import TrainConfig
from tpukit.train.plan import TrainingRequest
from tpukit.train.report.curves import MOST_POINTS, MetricSeries, Series
from tpukit.train.report.history import History
from tpukit.train.report.page import RunReport, report_test
from tpukit.train.report.tested import MetricCell, metric_lines, metric_table, number_text
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder, open_run, write_config

MOST_BYTES = 3_000_000
SECRET = "hf_7f3a9cdonotshowthis"
TRAIN = ["train", "--task", TINY, "--hw", "cpu", "--log-every", "2", "--ckpt-every", "4",
         "--max-steps", "8", "--num-workers", "0"]  # fmt: skip


class Tags(HTMLParser):
    """The tags of a page with their attributes, and what its scripts hold."""

    def __init__(self, page):
        super().__init__()
        self.found, self.scripts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.lasttag == "script" and data.strip():
            self.scripts.append(data)

    @property
    def data(self):
        return json.loads(self.scripts[0])


def page_of(folder):
    return folder.report.read_text(encoding="utf-8")


def charts(page):
    return {chart["title"]: chart for chart in Tags(page).data["charts"]}


def trained(path, task=None, log=lambda line: None, **settings):
    """The folder of a short run."""
    folder = RunFolder(path)
    config = TrainConfig(
        max_steps=6, global_batch_size=16, log_every=2, ckpt_every=3, num_workers=0
    )
    request = TrainingRequest(
        task or Tiny(), config, folder, settings, command="tpukit train --x 1"
    )
    train_run(request, FakeBackend(), log)
    return folder


def written(path, rows, **more):
    """A folder with a config and these lines of metrics, without a report."""
    folder = RunFolder(path)
    folder.create()
    tables = {"train": {}, "task": {"name": "tiny"}, "decided": {"total_steps": 9}, **more}
    write_config(folder, tables)
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def warned(folder):
    """What writing the report warned of."""
    lines = []
    RunReport(folder, lines.append).renew()
    return lines


# -- what it shows ---------------------------------------------------------------------------------
def test_a_page_shows_the_run_and_needs_nothing_else(tmp_path):
    page = page_of(trained(tmp_path / "run"))
    found = charts(page)
    assert [series["label"] for series in found["Loss"]["series"]] == ["training", "validation"]
    assert [point[0] for point in found["Loss"]["series"][0]["points"]] == [2, 4, 6]
    assert {"Worst", "Rate", "Learning rate", "Gradient norm"} <= found.keys()
    assert "tpukit train --x 1" in page and "Done: 6 steps" in page
    assert re.search(r"<th>global_batch_size</th><td>16</td>", page)
    assert re.search(r"<th>torch</th><td>2\.", page)
    addresses = set(re.findall(r"https?://[^\"'\s<]*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}
    links = [a.get("src", a.get("href", "data:")) for _, a in Tags(page).found]
    assert all(link.startswith("data:") for link in links)


def test_a_users_text_is_escaped(tmp_path):
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"

    class Named(Tiny):
        def loss(self, model, batch):
            outputs = super().loss(model, batch)
            return {"loss": outputs["loss"], bad: outputs["worst"]}

    folder = trained(tmp_path / bad.replace("/", "|"), Named(), note=bad)
    found = {"data": bad, "metrics": {bad: 1.0}, "worst": [{bad: bad}]}
    folder.tests.write_text(json.dumps({"x": found}))
    assert warned(folder) == []
    tags = Tags(page_of(folder))
    assert sum(tag == "script" for tag, _ in tags.found) == 2
    # The loss curve, for those without scripts.
    assert [a.keys() for tag, a in tags.found if tag == "img"] == [{"src", "alt"}]
    assert any(bad in chart["title"].lower() for chart in tags.data["charts"])


def test_secrets_are_left_out(tmp_path):
    folder = trained(tmp_path / "run", api_token="abc123456", note=SECRET, wandb_key="abc123457")
    warning = {"time": "2026-01-01T00:00:00", "kind": "warning",
               "text": f"no access to https://me:{SECRET}@host/x"}  # fmt: skip
    with folder.events.open("a") as events:
        events.write(json.dumps(warning) + "\n")
    RunReport(folder, pytest.fail).renew()
    page = page_of(folder)
    assert "no access to https://[left out]@host" in page
    assert not re.search(f"{SECRET}|abc12345", page)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """100,000 lines of metrics, one damaged and one with a peak, and large pictures."""
    draw = random.Random(0)
    row = '{"kind":"train","step":%d,"loss":%f,"lr":0.001,"samples_per_second":%f}\n'
    lines = [row % (i, 1 + draw.random(), 90 + draw.random()) for i in range(1, 100_001)]
    lines[65_432] = row % (65_433, 77.0, 90)
    lines[65_433] = lines[65_433][:40] + "\n"
    folder = written(tmp_path_factory.mktemp("long") / "run", [])
    folder.metrics.write_text("".join(lines))
    (folder.path / "test").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (400, 400, 3), np.uint8)
    for name in range(18):
        Image.fromarray(noise).save(folder.path / "test" / f"{name}.png", compress_level=0)
    assert warned(folder) == []
    return folder


def test_the_size_of_a_page_is_bounded_and_its_peaks_are_kept(long_run):
    assert long_run.report.stat().st_size < MOST_BYTES
    page = page_of(long_run)
    assert page.count("<img") == 16
    [loss] = charts(page)["Loss"]["series"]
    assert MOST_POINTS / 2 <= len(loss["points"]) <= MOST_POINTS
    assert max(max(point[1:]) for point in loss["points"]) == 77.0
    assert loss["points"][-1][0] == 100_000


def test_many_metrics_share_the_size(tmp_path):
    names = [f"valid_class{i}_accuracy" for i in range(200)]
    rows = [{"kind": "valid", "step": s, **dict.fromkeys(names, 1 / (s + 3))} for s in range(1200)]
    folder = written(tmp_path / "run", rows, train={f"name{i}": "x" * 5000 for i in range(1000)})
    assert warned(folder) == []
    assert folder.report.stat().st_size < MOST_BYTES


def test_points_keep_minima_maxima_and_the_last_value():
    values = np.random.default_rng(0).normal(size=7 * MOST_POINTS + 13).tolist()
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    assert MOST_POINTS / 2 <= len(series.points) <= MOST_POINTS
    first = 0
    for step, last, low, high in series.points:
        rows = values[first : step + 1]
        assert (last, low, high) == (rows[-1], min(rows), max(rows))
        first = step + 1
    assert first == len(values)
    assert len(series.thinned(50)) <= 50


def test_training_and_validation_share_a_chart(tmp_path):
    rows = [
        {"kind": "train", "step": 5, "loss": 1.0, "worst_loss": 2.0},
        {
            "kind": "valid",
            "step": 5,
            "valid_near_loss": 3.0,
            "valid_far_worst_loss": 4.0,
            "valid_auc": 0.5,
        },
    ]
    folder = written(tmp_path / "run", rows)
    assert warned(folder) == []
    found = {title: [series["label"] for series in chart["series"]]
             for title, chart in charts(page_of(folder)).items()}  # fmt: skip
    assert found == {"Loss": ["training", "validation, near"], "Auc": ["validation"],
                     "Worst loss": ["training", "validation, far"]}  # fmt: skip


def event(kind, time, **values):
    return json.dumps({"time": f"2026-01-{time}", "kind": kind, **values}) + "\n"


def test_events_give_sessions_and_warnings(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log.write_text("any line\n")
    folder.events.write_text(
        event("session", "01T10:00:01", step=0, command="tpukit train")
        + event("warning", "01T10:00:11", text="gradient norm 1.5e+03 is large")
        + event("failure", "01T10:00:12", text="ValueError: no")
        + event("session", "02T09:00:00", step=10, command="tpukit again")
    )
    history = History(folder)
    history.read()
    assert (history.sessions, history.step, history.ended, history.failure) == (2, 10, "", None)
    with folder.events.open("a") as file:
        file.write(event("warning", "02T09:00:06", text="gradient norm 9.1e+03 is large"))
        file.write(event("end", "02T09:00:25", step=30, text="Done: 30 steps.") + '{"time": "20')
    history.read()
    assert (history.sessions, history.step, history.ended) == (2, 30, "Done: 30 steps.")
    assert history.session["command"] == "tpukit again" and [*history.tail] == ["any line"]
    assert history.began == datetime(2026, 1, 1, 10, 0, 1)
    [warning] = history.warnings.values()
    assert (warning.count, warning.last) == (2, datetime(2026, 1, 2, 9, 0, 6))
    assert "9.1e+03" in warning.text


SCORED = {
    "metrics": {"rouge1": 0.4, "rouge1_low": 0.3, "rouge1_high": 0.5, "rouge1_baseline": 0.2,
                "rmse": 2.0, "rmse_pooled": 2.5, "rmse_baseline": 1.0, "own": 3.0},
    "intervals": {"rmse": [1.9, 2.1]},
    "methods": {"": "ours, mean of 4", "baseline": "Tikhonov"},
    "metric_names": {"rouge1": "ROUGE-1 ↑", "rmse": "RMSE ↓", "rmse_pooled": "RMSE, all frames ↓"},
}  # fmt: skip


def test_a_table_of_metrics_has_intervals_baselines_and_the_best():
    table = metric_table(SCORED)
    assert table.ways == ["ours, mean of 4", "Tikhonov"]
    assert table.rows == {
        "ROUGE-1 ↑": [MetricCell(0.4, [0.3, 0.5], is_best=True), MetricCell(0.2)],
        "RMSE ↓": [MetricCell(2.0, [1.9, 2.1]), MetricCell(1.0, is_best=True)],
        "RMSE, all frames ↓": [MetricCell(2.5), MetricCell(None)],
        "own": [MetricCell(3.0), MetricCell(None)],
    }
    unnamed = {"metrics": {"a": 1.0, "a_lead": 2.0, "b": 1.0, "b_lead": 2.0}}
    assert metric_table(unnamed).ways == ["this run", "lead"]


def test_text_and_page_name_the_columns_alike(tmp_path):
    lines = list(metric_lines(SCORED))
    assert lines[1].startswith("  ROUGE-1 ↑ ")
    assert lines[1].endswith(" ours, mean of 4  0.4000 [0.3000, 0.5000] *")
    assert lines[4].split()[-3:] == ["Tikhonov", "1.000", "*"]
    assert max(map(len, lines)) < 80
    assert list(metric_lines({"metrics": {"loss": 1.0}})) == []
    folder = written(tmp_path / "run", [{"kind": "train", "step": 1, "loss": 1.0}])
    folder.tests.write_text(json.dumps({"x": SCORED}))
    assert warned(folder) == []
    page = page_of(folder)
    assert '<th class="number">ours, mean of 4</th><th class="number">Tikhonov</th>' in page
    assert "<th>RMSE ↓</th>" in page and '<td class="number"><b>1.000</b></td>' in page


def test_the_tiles_agree_with_the_log_and_the_rate_is_the_mean(tmp_path):
    """Steps 1 to 100 at 10 samples a second, 101 to 105 at 100; three more without a log line."""
    row = {"kind": "train", "loss": 1.0, "lr": 0.1, "compilations": 0, "skipped_steps": 0,
           "memory_used": 2**30, "memory_peak": 2**30}  # fmt: skip
    rows = [{**row, "step": 100, "samples_per_second": 10.0},
            {**row, "step": 105, "samples_per_second": 100.0}]  # fmt: skip
    folder = written(tmp_path / "run", rows)
    folder.events.write_text(
        event("session", "01T10:00:01", step=0)
        + event("end", "01T10:00:12", step=108, text="Time is up after step 108.")
    )
    assert warned(folder) == []
    page = page_of(folder)
    tiles = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)", page))
    assert (tiles["Steps"], tiles["Rate"]) == ("108", number_text(105 / (100 / 10 + 5 / 100)))
    assert "at step 105; 1.000 at first" in page and "No validation yet" in page
    # Nothing was compiled or skipped: no chart of zeros. Memory is not drawn as if it grew.
    found = charts(page)
    assert (
        found.keys() == {"Loss", "Rate", "Memory", "Learning rate"} and "Compilations" not in tiles
    )
    assert found["Memory"]["zero"] and not found["Loss"]["zero"]
    assert [line["dashed"] for line in found["Memory"]["series"]] == [False, True]


def test_odd_results_of_a_test_do_not_lose_the_page(tmp_path):
    folder = written(tmp_path / "run", [{"kind": "train", "step": 1, "loss": 1.0}])
    odd = {"metrics": [1], "intervals": {"a": 3}, "best": 4, "worst": [5], "samples": "x"}
    fine = {"metrics": {"a": 0.25, "b": None, "c": True}, "intervals": {"a": ["x", 1]}}
    folder.tests.write_text(json.dumps({"odd": odd, "fine": fine, "text": "x"}))
    assert warned(folder) == []
    assert '<th>a</th><td class="number">0.2500</td>' in page_of(folder)
    folder.tests.write_text("{")
    assert warned(folder) == []


# -- when it is written ----------------------------------------------------------------------------
class Watching(Tiny):
    """Keeps the page that is there when a line is logged, of after the first checkpoint."""

    page = None

    def on_log(self, row):
        report = self.folder.report
        if row["step"] == 4:
            deadline = time.monotonic() + 60
            while not report.exists() and time.monotonic() < deadline:
                time.sleep(0.01)  # it is written in the background
            self.page = report.read_text()


def test_a_checkpoint_renews_it(tmp_path):
    task = Watching()
    task.folder = RunFolder(tmp_path / "run")
    trained(tmp_path / "run", task)
    # Of step 3, or 4: the line of step 4 is written beside it.
    assert re.search("At step [34] of 6", task.page) and "Best validation loss" in task.page
    assert "Done" in page_of(task.folder) and "Done" not in task.page


def test_two_ranks_write_one_and_a_test_renews_it(tmp_path):
    run = tmp_path / "run"
    result(tpukit(*TRAIN, "--devices", 2, "--results-dir", run, "--json", ranks=2))
    before = page_of(RunFolder(run))
    assert "Done: 8 steps" in before and "<h2>Test" not in before
    assert "could not be written" not in (run / "log.txt").read_text()
    assert not list(run.glob(".report*"))
    found = result(tpukit("test", "--run", run, "--hw", "cpu", "--json"))
    page = page_of(RunFolder(run))
    assert "<h2>Test" in page
    assert f"{found['metrics']['loss']:#.4g}" in page
    # A run folder of before gets one, and the results stay.
    RunFolder(run).report.unlink()
    assert warned(RunFolder(run)) == [] and "<h2>Test" in page_of(RunFolder(run))


class Failing(Tiny):
    """Raises in its fourth step, with a secret in the message."""

    def on_log(self, row):
        self.fails = row["step"] >= 2

    def loss(self, model, batch):
        if getattr(self, "fails", False) and model.training:
            raise ValueError(f"no access with token={SECRET}\nand more")
        return super().loss(model, batch)


def test_a_failed_run_says_so(tmp_path):
    with pytest.raises(TaskFailedError):
        trained(tmp_path / "run", Failing())
    page = page_of(RunFolder(tmp_path / "run"))
    assert "Failed: ValueError: no access with token=[left out]" in page
    assert len(charts(page)["Loss"]["series"][0]["points"]) == 1


class Obstructing(Tiny):
    """Puts a folder in the place of the page."""

    def on_log(self, row):
        (self.folder.report / "x").mkdir(parents=True, exist_ok=True)


def test_a_page_that_cannot_be_written_is_one_warning(tmp_path):
    task, lines = Obstructing(), []
    task.folder = RunFolder(tmp_path / "run")
    trained(tmp_path / "run", task, log=lines.append)
    assert len([line for line in lines if "could not be written" in line]) == 1
    assert any(line.startswith("Done: 6 steps") for line in lines)


def test_a_test_whose_result_cannot_be_kept_ends_well(tmp_path):
    folder, lines = trained(tmp_path / "run"), []
    run = open_run(folder.path, lines.append)
    report_test(run, {"metrics": {("a", "b"): 1.0}}, lines.append)
    (folder.tests / "x").mkdir(parents=True)
    report_test(run, {"metrics": {"a": 1.0}}, lines.append)
    assert len(lines) == 2 and all("does not show this test" in line for line in lines)


def test_each_renewal_reads_only_what_is_new(long_run):
    metrics = MetricSeries(long_run.metrics)
    metrics.read()
    with long_run.metrics.open("r+b") as file:
        file.write(b"x" * 1000)  # what was read is not read again
        file.seek(0, 2)
        file.write(b'{"kind":"train","step":100001,"loss":1.5}\n{"kind":"tra')
    metrics.read()
    assert metrics.train["loss"].points[-1][:2] == (100_001, 1.5)
