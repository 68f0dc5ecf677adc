"""The share of time that a run waits for data, and the report of a step that hangs."""

import time
from dataclasses import replace

import pytest
from tiny_task import Rows, Tiny

import tpukit
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import CpuDevice
from tpukit.train import clocks
from tpukit.train.run_folder import RunFolder
from tpukit.train.run_log import read_metrics
from tpukit.train.task import Datasets


class Clock:
    """Time that passes where a test says so."""

    now = slept = 0.0

    def monotonic(self):
        return self.now

    def thread_time(self):
        return self.now - self.slept


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(clocks, "time", Clock())
    return clocks.time


class SlowRows(Rows):
    """A sample takes `seconds` by the clock; one of them 10 s, and really a second."""

    def __init__(self, clock, hangs, seconds=0.01):
        super().__init__(64)
        self.clock = clock
        self.hangs = hangs
        self.seconds = seconds

    def __getitem__(self, index):
        self.clock.now += self.seconds
        if self.hangs and index == 40:
            self.clock.now += 10
            time.sleep(1.0)
        return super().__getitem__(index)


class Slow(Tiny):
    """A step of 4 samples reads for 4 `read` and computes for `compute` seconds."""

    name = "slow"

    def __init__(self, clock, compute=0.0, hangs=False, read=0.01):
        super().__init__()
        self.clock = clock
        self.compute_seconds = compute
        self.rows = SlowRows(clock, hangs, read)

    def datasets(self):
        return Datasets(self.rows, None)

    def loss(self, model, batch):
        self.clock.now += self.compute_seconds
        return super().loss(model, batch)


def fit(task, folder, **settings):
    lines = []
    options = {"global_batch_size": 4, "max_steps": 12, "log_every": 4, "num_workers": 0}
    result = tpukit.fit(
        task, results_dir=str(folder), hw="cpu", log=lines.append, **{**options, **settings}
    )
    return result, lines


def test_the_share_of_waiting_is_that_of_a_slow_data_set(tmp_path, clock, capfd):
    half, _ = fit(Slow(clock, compute=0.04), tmp_path / "half")
    little, _ = fit(Slow(clock, compute=3.96), tmp_path / "little")
    assert half.data_waiting == pytest.approx(0.5)
    assert little.data_waiting == pytest.approx(0.01)
    rows = [r for r in read_metrics(RunFolder(tmp_path / "half")) if r["kind"] == "train"]
    assert [row["data_waiting"] for row in rows] == pytest.approx([0.5] * 3)
    shown = capfd.readouterr().err
    assert "waits for data 50%" in shown and "waits for data 1%" not in shown


class Sleeping(Slow):
    """Half of a step waits for the device."""

    def loss(self, model, batch):
        self.clock.slept += self.compute_seconds / 2
        return super().loss(model, batch)


@pytest.mark.parametrize(("kind", "busy"), [(Slow, 0.96), (Sleeping, 0.48)])
def test_a_step_is_host_bound_where_its_thread_hardly_sleeps(
    tmp_path, clock, capfd, monkeypatch, kind, busy
):
    """Making data counts as waiting for it."""
    task = kind(clock, compute=0.96)
    fit(task, tmp_path / "cpu")
    rows = [r for r in read_metrics(RunFolder(tmp_path / "cpu")) if r["kind"] == "train"]
    assert {row["host_busy"] for row in rows} == {
        None
    } and "host-bound" not in capfd.readouterr().err
    usage = CpuDevice.usage
    monkeypatch.setattr(CpuDevice, "usage", lambda self: replace(usage(self), host_sleeps=True))
    fit(task, tmp_path / "tpu")
    rows = [r for r in read_metrics(RunFolder(tmp_path / "tpu")) if r["kind"] == "train"]
    assert [row["host_busy"] for row in rows] == pytest.approx([busy] * 3)
    assert ("host-bound 96%" in capfd.readouterr().err) == (busy > 0.8)


def test_a_high_rate_is_shown_without_an_exponent(tmp_path, clock, capfd):
    fit(Slow(clock, read=1 / 12_800), tmp_path)
    assert "12,800 samples/s" in capfd.readouterr().err


def test_mfu_is_the_rate_of_operations_over_the_peak(tmp_path, clock, capfd, monkeypatch):
    monkeypatch.setattr(EagerBackend, "_peak_flops", lambda self: 1e6)
    task = Slow(clock, compute=0.04)
    result, _ = fit(task, tmp_path / "run")
    # The first linear layer's two products, the last one's three, 50 samples a second.
    by_hand = 50 * (2 * 2 * 8 * task.width + 3 * 2 * task.width * 2) / 1e6
    assert result.mfu == pytest.approx(by_hand)
    rows = [r for r in read_metrics(RunFolder(tmp_path / "run")) if r["kind"] == "train"]
    assert [row["mfu"] for row in rows] == pytest.approx([by_hand] * 3)
    assert f"MFU {by_hand:.1%}" in capfd.readouterr().err
    assert '"MFU"' in (tmp_path / "run" / "report.html").read_text()
    monkeypatch.undo()
    assert tpukit.fit(Tiny(), results_dir=str(tmp_path / "cpu"), hw="cpu", max_steps=1).mfu is None


def test_a_step_that_hangs_is_reported_once_and_waited_for(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(clocks, "SHORTEST_STALL_SECONDS", 0.3)
    result, lines = fit(Slow(clock, hangs=True), tmp_path, max_steps=16)
    assert result.finished
    [line] = [line for line in lines if "no step for" in line]
    assert "rank 0 is in __getitem__ (" in line and "test_step_clock.py" in line
    assert "next_batches" in (tmp_path / "log.txt").read_text()


def test_a_slow_validation_is_no_stall(tmp_path, monkeypatch, clock):
    class Validating(Slow):
        def score(self, model, backend, data):
            clock.now += 10
            time.sleep(0.5)
            return {}

        def datasets(self):
            return Datasets(SlowRows(clock, False), Rows(4))

    monkeypatch.setattr(clocks, "SHORTEST_STALL_SECONDS", 0.3)
    _, lines = fit(Validating(clock), tmp_path, ckpt_every=6)
    assert not [line for line in lines if "no step for" in line]
