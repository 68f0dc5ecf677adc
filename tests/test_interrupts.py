"""A run that is interrupted in any way saves, ends, and leaves no process behind."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
import uuid

import pytest
from kernels import kernel
from runs import (
    MARK,
    SUPPORT,
    TINY,
    environment,
    latest,
    marked_processes,
    metrics,
    popen,
    wait_for_end,
    wait_until,
)

from tpukit.io import interrupts

STUCK, SLOW_SAVING = (TINY.replace(":Tiny", f":{name}") for name in ("Stuck", "SlowSaving"))
BASE = [
    "train", "--task", TINY, "--hw", "cpu", "--max-steps", "400", "--log-every", "5",
    "--ckpt-every", "1000", "--num-workers", "0", "--set", "pause=0.1",
]  # fmt: skip


def has_logged(run):
    """Whether a step of the run was logged."""
    return lambda: (
        (run / "metrics.jsonl").exists() and '"train"' in (run / "metrics.jsonl").read_text()
    )


def saved_step(run):
    """The step of the newest checkpoint, whose state is the one that was reached."""
    step = int(latest(run).name.removeprefix("step-"))
    assert json.loads((latest(run) / "state.json").read_text())["step"] == step
    return step


@pytest.mark.slow
def test_an_interrupted_cell_saves_and_the_same_cell_goes_on(tmp_path):
    """Interrupted while it saves: the same cell waits for the end of that."""
    run, mark = tmp_path / "run", uuid.uuid4().hex
    cell = f"!{sys.executable} -m tpukit {' '.join(BASE)} --results-dir run"
    cell = cell.replace(TINY, SLOW_SAVING).replace("ckpt-every 1000", "ckpt-every 10")
    with kernel(tmp_path) as cells:
        cells.run(f"import os; os.environ[{MARK!r}] = {mark!r}")
        shown = cells.run(cell, interrupt_when=(tmp_path / "saving").exists)
        assert "Interrupted: the run (process" in shown
        shown = cells.run(cell.replace("steps 400", "steps 20"))
        assert "Done: 20 steps" in shown
        assert "the checkpoint is written" in (run / "log.txt").read_text()
        assert metrics(run)[-1]["step"] == saved_step(run) == 20
        assert not list(run.rglob("*.partial"))
        wait_for_end(mark, 60)


@pytest.mark.slow
def test_other_commands_end_with_their_cell(tmp_path):
    """They leave no process and no half-written file."""
    mark = uuid.uuid4().hex
    probe = ["--task", TINY, "--hw", "cpu", "--memory-limit", "8GB", "--set", "pause=0.2"]

    def running(word):
        return lambda: any(word in p.cmdline() for p in marked_processes(mark))

    with kernel(tmp_path) as cells:
        cells.run(f"import os; os.environ[{MARK!r}] = {mark!r}")
        for command, is_time in (
            ("data dialogues --out texts --n 2000000", lambda: any(tmp_path.glob("texts/.*"))),
            (f"probe-batch {' '.join(probe)}", running("tpukit.probe.trials.worker")),
        ):
            shown = cells.run(f"!{sys.executable} -m tpukit {command}", interrupt_when=is_time)
            assert "Traceback" not in shown
            wait_for_end(mark, 20)
    assert not list(tmp_path.glob("texts/*.csv"))


def test_a_generator_that_is_stopped_says_how_far_it_was(tmp_path):
    words = ("data", "dialogues", "--n", "2000000")
    process = popen(*words, cwd=tmp_path, stderr=subprocess.PIPE)
    wait_until(lambda: any(tmp_path.glob("data/.*")))
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "of 2,000,000 samples of dialogues in data" in told
    assert not list(tmp_path.glob("data/*"))


def started(run, mark, *options, **streams):
    process = popen(*BASE, "--results-dir", run, *options, env={MARK: mark}, **streams)
    wait_until(lambda: has_logged(run)() or process.poll() is not None)
    return process


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_closed_terminal_is_a_request_to_stop(tmp_path, devices):
    run, mark = tmp_path / "run", uuid.uuid4().hex
    ours, theirs = pty.openpty()
    process = started(
        run, mark, "--devices", devices, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    os.close(ours)  # writing fails from now on
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 128 + signal.SIGHUP
    assert 0 < saved_step(run) < 400
    wait_for_end(mark, 10)


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_output_that_nobody_reads_is_a_request_to_stop(tmp_path, devices):
    """As `tpukit train ... | head` leaves it."""
    run, mark = tmp_path / "run", uuid.uuid4().hex
    process = started(
        run, mark, "--devices", devices, "--ckpt-every", "30", "--log-every", "1",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert "the checkpoint is written" in process.stderr.read()
    assert 0 < saved_step(run) < 400
    wait_for_end(mark, 10)


def test_further_signals_do_not_break_the_saving(tmp_path):
    """As a notebook without its variables sends them; and an impatient user's, seconds later."""
    run, mark = tmp_path / "run", uuid.uuid4().hex
    process = started(run, mark, stderr=subprocess.PIPE)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    # Of signals that arrive together, Python handles the lowest number first.
    assert process.wait(60) in (128 + signal.SIGINT, 128 + signal.SIGHUP)
    assert 0 < saved_step(run) < 400


def test_a_signal_to_every_process_of_a_run_saves(tmp_path):
    """As `timeout` and schedulers send it: the workers go on until the main process has saved."""
    run, mark = tmp_path / "run", uuid.uuid4().hex
    process = started(run, mark, "--num-workers", "2", stderr=subprocess.PIPE)
    all_of_it = marked_processes(mark)
    for each in all_of_it:
        each.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM, process.stderr.read()
    assert len(all_of_it) > 2 and 0 < saved_step(run) < 400
    wait_for_end(mark, 10)


@pytest.mark.slow
def test_nohup_keeps_a_run_alive(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "tpukit", *BASE, "--results-dir", run, "--max-steps", "30"],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(has_logged(run))
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0


def test_a_signal_before_the_first_step_ends_at_once(tmp_path):
    """Nothing would be lost, and no run folder is left that holds nothing."""
    task = tmp_path / "waiting.py"
    task.write_text(
        f"import sys, time; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from pathlib import Path\nfrom tiny_task import Tiny\n"
        "class Waiting(Tiny):\n    def datasets(self):\n"
        f"        Path({str(tmp_path / 'opening')!r}).touch(); time.sleep(600)\n"
    )
    run = tmp_path / "run"
    arguments = ["train", "--task", f"{task}:Waiting", "--hw", "cpu", "--results-dir", str(run)]
    process = popen(*arguments, stderr=subprocess.PIPE)
    wait_until((tmp_path / "opening").exists)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 143 and "Stopped before the first step" in told, told
    assert not run.exists()


@pytest.mark.parametrize("line", ["train --help", "train --lr abc", "doctor --quick"])
def test_output_that_nobody_reads_ends_as_the_shell_expects(line):
    """As `tpukit ... 2>&1 | head` leaves it: no words, no error of its own."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tpukit", *line.split()]
    with os.fdopen(writer, "wb") as lost:
        assert subprocess.run(command, stdout=lost, stderr=lost, check=False).returncode == 141


@pytest.mark.parametrize(("terminal", "between"), [(True, b"\r\n"), (False, b"")])
def test_the_stop_is_said_on_a_line_of_its_own(terminal, between):
    """A progress bar ends without a newline; a plain line does not."""
    ours, theirs = os.openpty() if terminal else os.pipe()
    script = (
        "import os, signal; from tpukit.io.interrupts import StopRequest\n"
        "os.write(2, b'bar'); StopRequest().handle(signal.SIGINT)"
    )
    subprocess.run([sys.executable, "-c", script], stderr=theirs, check=True)
    assert os.read(ours, 1000).startswith(b"bar" + between + b"Stopping after this step")
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_second_interrupt_ends_a_run_whose_main_thread_sees_none(tmp_path, devices, monkeypatch):
    """Of two ranks one waits outside of Python, and the other for it."""
    run, stuck, mark = tmp_path / "run", tmp_path / "stuck", uuid.uuid4().hex
    monkeypatch.setenv("STUCK_FILE", str(stuck))
    told = tmp_path / "told"
    with told.open("w") as stderr:
        process = started(run, mark, "--task", STUCK, "--devices", devices, "--log-every", "1",
                          stderr=stderr)  # fmt: skip
    wait_until(stuck.exists)
    # A signal that comes between the file and the lock is handled before the thread is stuck.
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    if devices == "1":
        wait_until(lambda: interrupts.STUCK in told.read_text())
    else:
        time.sleep(interrupts.IMPATIENT_SECONDS + 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    wait_for_end(mark, 20)
