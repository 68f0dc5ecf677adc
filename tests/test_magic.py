"""`%load_ext tpukit` in a real kernel: a command's lines and pictures; its interruption."""

import base64
import uuid

import pytest
from kernels import error_of, execute, notebook_of, printed, shown
from nbclient.exceptions import DeadKernelError
from runs import MARK, latest, wait_for_end

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


def test_a_command_prints_its_lines_and_shows_its_pictures(cells):
    assert "Done: 6 steps" in printed(cells["train"]) and not error_of(cells["train"])
    assert [is_png(picture) for picture in shown(cells["train"], "image/png")] == [True]
    assert len(printed(cells["train"])) < 4000 and "\x1b" not in printed(cells["train"])
    assert "evaluated" in printed(cells["test"]) and "0.2500 [0.2000, 0.3000]" in printed(
        cells["test"]
    )
    assert [is_png(picture) for picture in shown(cells["test"], "image/png")] == [True]


def test_the_stop_button_saves_and_the_same_cell_goes_on(cells, place):
    text = printed(cells["interrupted"])
    assert "waiting for the command to end" in text and "Stopped after step 4 of 6" in text
    assert error_of(cells["interrupted"]) == ["Interrupted. The same cell goes on where it can."]
    assert "step 4" in printed(cells["train"])
    assert latest(place / "run").name == "step-00000006"


def test_an_interrupted_fit_shows_two_lines(cells):
    assert error_of(cells["stopped"]) == ["Stopped after step 4 of 6.", "Go on."]


@pytest.mark.parametrize(
    ("cell", "said"),
    [("failing", "Error: Run folder nowhere does not exist"),
     ("usage", "Error: No such option: --taks")],
)  # fmt: skip
def test_an_error_has_no_traceback(cells, cell, said):
    assert said in printed(cells[cell])
    assert error_of(cells[cell]) == ["The command ended with exit code 2."]
    [line] = error_of(cells["quotes"])
    assert line.startswith("Error: %tpukit train --task 'eit: No closing quotation")


def test_the_exception_of_the_last_cell_is_explained_with_its_values(cells):
    assert "`row`" in (said := printed(cells["explained"])), said
    assert "has `img`, and no `image`" in said


def test_the_kernel_imports_nothing_heavy(cells):
    assert printed(cells["imported"]) == "set()\n"


def test_show_prints_the_run_and_displays_every_picture(cells):
    pictures = shown(cells["show"], "image/png")
    assert list(map(is_png, pictures)) == [True, True]
    text = printed(cells["show"])
    assert "6 of 6" in text and "valid_loss" in text and "test/line.png" in text


def test_a_killed_kernel_ends_its_training_which_saves(place):
    """The run has far to go; it ends because its kernel does."""
    mark = uuid.uuid4().hex
    train = TRAIN.replace("{2 * STEPS}", "1000000").replace("results-dir run", "results-dir orphan")
    with pytest.raises(DeadKernelError):
        execute(notebook_of(CELLS["load"], train), place, {"KERNEL_DIES_AT": "4", MARK: mark})
    wait_for_end(mark)
    assert latest(place / "orphan").name > "step-00000003"
