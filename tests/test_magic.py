"""`%load_ext tpukit` in a real kernel: a command's lines, tables and pictures; its interruption."""

import base64
import re
import uuid
from types import SimpleNamespace

import pytest
from kernels import error_of, execute, notebook_of, printed, shown
from nbclient.exceptions import DeadKernelError
from runs import MARK, latest, wait_for_end

from tpukit.commands.reports.inline import (
    result_pictures,
    result_tables,
    show_result,
    trials_table,
)
from tpukit.magic import _print_lines

TASK = '''
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
from torch import nn

import tpukit


class Line(tpukit.Task):
    """Interrupts the kernel as its stop button does, when step INTERRUPT_AT is computed."""

    calls = 0

    def build_model(self, ops):
        return nn.Linear(4, 1)

    def datasets(self):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((40, 4), dtype=np.float32)
        samples = [{"x": row, "y": row[:1] * 2} for row in x]
        return tpukit.Datasets(samples, samples[:8])

    def loss(self, model, batch):
        self.calls += 1
        if str(self.calls) == os.environ.get("INTERRUPT_AT"):
            self.interrupt()
        if str(self.calls) == os.environ.get("KERNEL_DIES_AT"):
            os.kill(int(os.environ["KERNEL"]), signal.SIGKILL)
            time.sleep(2)  # until it has come back here
        return {"loss": (model(batch["x"]) - batch["y"]).square().mean(1)}

    def interrupt(self):
        """Waits for the signal to come back here: later steps must not overtake it."""
        came, handler = [], signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *given: came.append(handler(*given)))
        os.killpg(int(os.environ["KERNEL"]), signal.SIGINT)
        while not came:
            time.sleep(0.02)
        signal.signal(signal.SIGINT, handler)

    def evaluate(self, model, backend, request, log):
        log("evaluated")
        picture = Path(request.run.path) / "test" / "line.png"
        picture.parent.mkdir()
        shutil.copy(Path(request.run.path) / "loss.png", picture)
        return {"task": "line", "samples": 8, "metrics": {"error": 0.25, "error_baseline": 1.0},
                "intervals": {"error": [0.2, 0.3]}, "picture": str(picture)}
'''
TRAIN = (
    "%tpukit train --task {TASK} --hw cpu --max-steps {2 * STEPS} --log-every 2 --ckpt-every 6 "
    "--set global_batch_size=8 --results-dir run"
)
CELLS = {
    "load": "import os\n%load_ext tpukit\nos.environ['KERNEL'] = str(os.getpid())\n"
    "TASK, STEPS = 'line.py:Line', 3",
    "interrupted": "os.environ['INTERRUPT_AT'] = '4'\n" + TRAIN,
    "train": "del os.environ['INTERRUPT_AT']\n" + TRAIN,
    "test": "%tpukit test --run run --hw cpu",
    "failing": "%tpukit test --run nowhere",
    "usage": "%tpukit train --taks eit",
    "quotes": "%tpukit train --task 'eit",
    "own": "row = {'img': 1}\nrow['image']",
    "explained": "%tpukit doctor --explain -",
    "imported": "import sys\nprint({'torch', 'torch_xla', 'matplotlib'} & set(sys.modules))",
    "show": "import tpukit\ntpukit.show('run')",
    "stopped": "from tpukit.errors import InterruptedRunError\n"
    "raise InterruptedRunError('Stopped after step 4 of 6.', 'Go on.', signal_number=2)",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "line.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def cells(place):
    """The cells, executed in one kernel, by name."""
    done = execute(notebook_of(*CELLS.values()), place)
    return dict(zip(CELLS, done["cells"], strict=True))


def is_png(picture):
    return base64.b64decode(picture).startswith(b"\x89PNG")


def rows_of(table):
    """Name -> value of a table of two columns."""
    return dict(re.findall(r"<tr><th[^>]*>([^<]+)</th><td[^>]*>([^<]*)</td></tr>", table))


def test_a_command_prints_its_lines_and_shows_its_result(cells, place):
    assert "Done: 6 steps" in printed(cells["train"]) and not error_of(cells["train"])
    (table,), (curve,) = shown(cells["train"], "text/html"), shown(cells["train"], "image/png")
    rows = rows_of(table)
    assert rows["steps"] == "6" and rows["run"] == "run" and "best loss" in rows and is_png(curve)
    assert len(printed(cells["train"])) < 4000 and "\x1b" not in printed(cells["train"])


def test_the_stop_button_saves_and_the_same_cell_goes_on(cells, place):
    text = printed(cells["interrupted"])
    assert "waiting for the command to end" in text and "Stopped after step 4 of 6" in text
    assert error_of(cells["interrupted"]) == ["Interrupted. The same cell goes on where it can."]
    assert (
        "resumed from</th><td style='text-align:left'>4<" in shown(cells["train"], "text/html")[0]
    )
    assert latest(place / "run").name == "step-00000006"


def test_metrics_stand_beside_those_of_other_methods(cells):
    (metrics,) = shown(cells["test"], "text/html")
    assert "0.2500 [0.2000, 0.3000]" in metrics and "baseline" in metrics and ">1.000<" in metrics
    # The table stands below the cell alone.
    assert "evaluated" in printed(cells["test"]) and "0.25" not in printed(cells["test"])
    assert [is_png(picture) for picture in shown(cells["test"], "image/png")] == [True]


def test_an_interrupted_fit_shows_two_lines(cells):
    assert error_of(cells["stopped"]) == ["Stopped after step 4 of 6.", "Go on."]


@pytest.mark.parametrize(
    ("done", "told"),
    [({"finished": True, "stopped_early": False}, "with its last step"),
     ({"finished": True, "stopped_early": True}, "early: validation no longer improved"),
     ({"finished": False, "stopped_early": False}, "at its time limit; the cell goes on")],
)  # fmt: skip
def test_a_training_says_how_it_ended(done, told):
    (table,) = result_tables({"steps": 3, "run": "r", **done})
    assert [row for row in table if row[0] == "ended"] == [["ended", told]]
    assert not {"finished", "stopped early"} & {name for name, _ in table}


@pytest.mark.parametrize(
    ("cell", "beginning"),
    [("failing", "Error: Run folder nowhere does not exist"),
     ("usage", "Error: No such option: --taks"),
     ("quotes", "Error: %tpukit train --task 'eit: No closing quotation")],
)  # fmt: skip
def test_an_error_is_two_lines_without_a_traceback(cells, cell, beginning):
    lines = error_of(cells[cell])
    assert 1 <= len(lines) <= 2 and lines[0].startswith(beginning), lines
    assert printed(cells[cell]) == ""


def test_the_exception_of_the_last_cell_is_explained_with_its_values(cells):
    assert "`row`" in (said := printed(cells["explained"])), said
    assert "has `img`, and no `image`" in said


def test_the_kernel_imports_nothing_heavy(cells):
    assert printed(cells["imported"]) == "set()\n"


def test_show_displays_a_table_and_every_picture(cells):
    (table,), pictures = shown(cells["show"], "text/html"), shown(cells["show"], "image/png")
    rows = rows_of(table)
    assert rows["steps"] == "6 of 6" and "valid_loss" in rows["validation"]
    assert rows["pictures"] == "test/line.png" and list(map(is_png, pictures)) == [True, True]
    assert printed(cells["show"]) == ""


def test_a_killed_kernel_ends_its_training_which_saves(place):
    """The run has far to go; it ends because its kernel does."""
    mark = uuid.uuid4().hex
    train = TRAIN.replace("{2 * STEPS}", "1000000").replace("results-dir run", "results-dir orphan")
    with pytest.raises(DeadKernelError):
        execute(notebook_of(CELLS["load"], train), place, {"KERNEL_DIES_AT": "4", MARK: mark})
    wait_for_end(mark)
    assert latest(place / "orphan").name > "step-00000003"


def test_the_memory_of_each_trial_is_drawn():
    trials = [{"batch": b, "used_bytes": b << 30} for b in (4, 8, 16)]
    (chart,) = result_pictures({"trials": trials, "limit_bytes": 12 << 30})
    assert chart.startswith(b"\x89PNG")
    failed = [{"batch": 4, "used_bytes": None}]
    assert list(result_pictures({"trials": failed, "limit_bytes": 1})) == []


def test_lines_after_an_error_of_the_users_own_are_not_held_back(capsys):
    lines = ["Error: 0.5\n", "  of 8\n", "step 2\n", "Error: no data\n", "  Add some.\n"]
    assert _print_lines(lines) == lines[3:]
    assert capsys.readouterr().out == "".join(lines[:3])


def test_the_speed_of_a_slow_trial_is_a_number():
    trial = {"batch": 4, "used_bytes": 1 << 30, "verdict": "fits", "seconds": 9.0}
    tables = [trials_table([{**trial, "samples_per_second": s}])[1][3] for s in (0.5, 12.3, None)]
    assert tables == ["0.5", "12.3", ""]


def test_the_best_value_of_a_row_is_bold():
    shown = []
    fields = {"metrics": {"rmse": 2.0, "rmse_baseline": 1.0}, "methods": {"baseline": "<b>"},
              "metric_names": {"rmse": "RMSE ↓"}}  # fmt: skip
    show_result(SimpleNamespace(display=lambda data, raw: shown.append(data)), fields)
    ((table),) = shown
    assert ">2.000<" in table["text/html"] and "<b>1.000</b>" in table["text/html"]
    assert "&lt;b&gt;" in table["text/html"] and "1.000" in table["text/plain"]
