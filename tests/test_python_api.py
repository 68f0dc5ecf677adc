"""`import tpukit`: what the commands do, from a script and from a notebook's cells."""

import inspect
import json
import pkgutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from runs import (
    SUPPORT,
    TINY,
    VIRTUAL_TPU,
    environment,
    latest,
    notebook,
    parameters,
    printed,
    relative_difference,
    result,
    tpukit,
)
from tiny_task import Tiny

import tpukit as package
from tpukit.errors import ConfigError, HardwareError, TaskFailedError, TpukitError
from tpukit.train.config import TrainConfig

PUBLIC = {
    "Datasets", "MicroBatch", "ParameterGroup", "Preset", "SampleKey", "ShuffledPlan", "Task",
    "TpukitError", "TrainingDefaults", "evaluate", "find_batch", "fit", "infer", "load", "named",
    "predict", "read_table", "show", "stack_samples", "Predictions", "Target", "split_rows",
}  # fmt: skip
HEAVY = {"torch", "numpy", "IPython", "matplotlib", "safetensors"}
SHORT = {"hw": "cpu", "max_steps": 6, "ckpt_every": 3, "log_every": 2}
"""Options of a run of milliseconds."""


# -- the names ------------------------------------------------------------------------------------
def test_public_names_are_these_and_each_is_there():
    assert set(package.__all__) == PUBLIC == set(dir(package)) - {"__version__"}
    for name in PUBLIC:
        assert inspect.getdoc(getattr(package, name))
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        package.trane  # noqa: B018


def test_no_public_name_is_a_subpackage():
    assert not PUBLIC & {module.name for module in pkgutil.iter_modules(package.__path__)}


def test_importing_is_cheap():
    """The magic of notebooks as well."""
    names = "print(*{m.partition('.')[0] for m in sys.modules}); "
    script = f"import tpukit, sys; {names}tpukit.load_ipython_extension; {names}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    alone, magic = (set(line.split()) for line in done.stdout.splitlines())
    assert not (HEAVY | {"typer"}) & alone and not HEAVY & magic


# -- a notebook -----------------------------------------------------------------------------------
DEFINITIONS = """
import json, os, signal, threading
from pathlib import Path
import numpy as np
import torch
from torch import nn
import tpukit
from tpukit.train.evaluation import infer

OFFSET = 0.5

class Points:
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        x = np.random.default_rng(index).standard_normal(4, dtype=np.float32)
        return {"x": x, "y": x[:1] + np.float32(OFFSET)}

class Line(tpukit.Task):
    interrupt_at = None
    def __init__(self, width=8):
        self.hidden = width
        self.calls = 0
    def build_model(self, ops):
        return nn.Sequential(nn.Linear(4, self.hidden), nn.Dropout(0.1), nn.Linear(self.hidden, 1))
    def datasets(self):
        return tpukit.Datasets(Points(40), Points(6))
    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        return {"loss": (model(batch["x"]) - batch["y"]).square().mean(1)}
    def probe_batches(self, settings):
        rows = settings.micro_rows
        return [tpukit.stack_samples([Points(1)[0]] * rows, rows)]
    def evaluate(self, model, backend, request, log):
        out = infer(self, Points(6), lambda batch: model(batch["x"]), backend)
        return {"task": self.name, "samples": len(out), "outputs": out[:, 0].tolist()}
    def predict(self, model, backend, request, log):
        out = infer(self, Points(6), lambda batch: model(batch["x"]), backend)
        np.save(request.out, out)
        return {"rows": len(out), "path": str(request.out)}

answer = {}
handler = signal.getsignal(signal.SIGINT)
short = dict(hw="cpu", max_steps=6, ckpt_every=6, log_every=2, global_batch_size=8)
"""
TRAINS = """
from accelerate import Accelerator
own = Accelerator(cpu=True, mixed_precision="bf16")
done = tpukit.fit(Line(width=12), num_workers=2, **short)
answer["fit"] = vars(done)
try:
    stopping = Line(width=12)
    stopping.interrupt_at = 4
    tpukit.fit(stopping, results_dir="stopped", **short)
except tpukit.TpukitError as error:
    answer["interrupted"] = [type(error).__name__, str(error)]
resumed = tpukit.fit(Line(width=12), results_dir="stopped", **short)
answer["resumed_from"] = resumed.resumed_from
assert signal.getsignal(signal.SIGINT) is handler
assert own.mixed_precision == "bf16", "an Accelerator of the notebook's own is left as it was"
"""
IS_USED = """
answer["test"] = tpukit.evaluate("results/line", hw="cpu")
answer["again"] = tpukit.evaluate(Line, hw="cpu")["outputs"]
answer["predict"] = tpukit.predict(done, out="out.npy", hw="cpu")
trained = tpukit.load("results/line")
with torch.no_grad():
    inputs = torch.tensor(np.stack([Points(6)[i]["x"] for i in range(6)]))
    answer["plain"] = trained.model(inputs)[:, 0].tolist()
assert type(trained.task) is Line and trained.task.hidden == 12
answer["config"] = trained.config["task"]
try:
    tpukit.evaluate("results/line", limt=1, hw="cpu")
except tpukit.TpukitError as error:
    answer["unknown"] = str(error)
tpukit.show("results/line")
"""
IN_A_THREAD = """
import multiprocessing
multiprocessing.set_start_method("spawn", force=True)
short["num_workers"] = 2
thread = threading.Thread(target=lambda: answer.update(
    thread=vars(tpukit.fit(Line, width=12, results_dir="threaded", **short))))
thread.start()
thread.join()
"""
FITS = """
answer["batch"] = tpukit.find_batch(Line(width=12), hw="cpu", start=2, max=2)
"""
ANSWERS = "Path('answer.json').write_text(json.dumps(answer))"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of a notebook that ran."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [DEFINITIONS, TRAINS, IS_USED, IN_A_THREAD, ANSWERS]
    (folder / "printed.txt").write_text(printed(notebook(*cells, cwd=folder)))
    return folder


@pytest.fixture
def answer(place):
    return json.loads((place / "answer.json").read_text())


def test_a_task_of_a_cell_is_trained_with_workers(answer, place):
    assert answer["fit"]["steps"] == 6 and answer["fit"]["finished"]
    assert "unknown option 'limt'" in answer["unknown"] and "limit?" in answer["unknown"]
    assert answer["config"] == {"name": "line", "source": "__main__:Line", "width": 12}
    assert (place / "results/line/loss.png").is_file()


def test_the_stop_button_writes_a_checkpoint_and_the_same_call_goes_on(answer, place):
    name, text = answer["interrupted"]
    assert name == "InterruptedRunError"
    assert "Stopped after step 4 of 6" in text and "Go on with: the same call" in text
    assert answer["resumed_from"] == 4
    one, other = (parameters(place / run) for run in ("results/line", "stopped"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_its_run_is_used_without_its_file(answer, place):
    assert (answer["test"]["task"], answer["test"]["samples"]) == ("line", 6)
    assert answer["predict"] == {"rows": 6, "path": "out.npy"} and (place / "out.npy").is_file()
    assert answer["again"] == answer["test"]["outputs"]
    assert answer["plain"] == pytest.approx(answer["test"]["outputs"], rel=1e-5)


def test_a_call_in_a_thread_trains_as_well(answer, place):
    assert answer["thread"]["finished"]
    # Its workers would have been spawned.
    assert "num_workers=0: spawned processes" in (place / "printed.txt").read_text()
    assert latest(place / "threaded").name == "step-00000006"


def test_show_prints_the_summary_where_no_picture_can_be_shown(place):
    shown = (place / "printed.txt").read_text()
    assert "results/line: task line" in shown
    assert "steps       6 of 6" in shown and "valid_loss" in shown


def test_the_command_says_where_the_class_of_a_cell_is_not(place):
    done = tpukit("test", "--run", place / "results/line", "--hw", "cpu")
    assert done.returncode == 2
    assert "Line was defined in a notebook" in done.stderr and "--task FILE:CLASS" in done.stderr


def test_a_batch_is_found_for_a_task_of_a_cell(tmp_path):
    printed(notebook(DEFINITIONS, FITS, ANSWERS, cwd=tmp_path))
    found = json.loads((tmp_path / "answer.json").read_text())["batch"]
    assert found["largest_batch_per_device"] == 2 and found["trials"][0]["fits"]
    assert found["command"].startswith("tpukit.fit(task, global_batch_size=2")


# -- devices and ranks ----------------------------------------------------------------------------
@pytest.mark.xla
@pytest.mark.slow
def test_a_notebook_trains_on_xla_before_the_cpu_and_not_after(tmp_path):
    start = f"import sys; sys.path.append({str(SUPPORT)!r})\nimport tpukit, tiny_task"
    fits = [
        f"tpukit.fit(tiny_task.Tiny(), results_dir='{n}', **{ {**SHORT, 'hw': hw} })"
        for n, hw in enumerate(("tpu", "cpu", "tpu"))
    ]
    env = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}
    printed(notebook(start, *fits, cwd=tmp_path, env=env))
    assert relative_difference(parameters(tmp_path / "0"), parameters(tmp_path / "1")) < 1e-2
    again = tmp_path / "again"
    again.mkdir()
    done = notebook(start, *fits[1:], cwd=again, env=env)
    assert done.returncode == 1
    assert "HardwareError: hw='tpu': this process computed gradients before" in done.stderr
    assert "Restart the kernel" in done.stderr


SCRIPT = f"""
import sys
sys.path.append({str(SUPPORT)!r})
import tpukit
from tiny_task import Tiny

class Counting(Tiny):
    def evaluate(self, model, backend, request, log):
        return {{"ranks": sum(backend.all_gather_objects(1))}}

if __name__ == "__main__":
    run = tpukit.fit(Counting(width=16), results_dir="run", **{SHORT})
    fields = tpukit.evaluate(run, hw="cpu")
    if fields:
        print(fields["ranks"], tpukit.load(run).config["decided"]["devices"])
"""


@pytest.mark.slow
def test_a_script_of_ones_own_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "script.py"],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert printed(done).splitlines()[-1] == "2 2"
    # The file of its class is recorded, and its last part does not run when it is imported.
    told = tpukit("test", "--run", tmp_path / "run", "--hw", "cpu", "--json")
    assert result(told) == {"ranks": 1}


# -- the same as the commands ---------------------------------------------------------------------
def test_fit_and_train_leave_the_same_run(tmp_path):
    options = [word for n, v in SHORT.items() for word in (f"--{n.replace('_', '-')}", v)]
    summary = result(
        tpukit("train", "--task", TINY, "--set", "width=16", *options, "--json",
               "--results-dir", tmp_path / "command")
    )  # fmt: skip
    call = f"made = tpukit.fit(Tiny(width=16), results_dir='call', **{SHORT})"
    answer = "import json; open('call.json', 'w').write(json.dumps(vars(made)))"
    imports = (
        f"import sys; sys.path.append({str(SUPPORT)!r}); import tpukit; from tiny_task import *"
    )
    looks = "import torch; torch.set_grad_enabled(False)"  # a cell above that infers
    printed(notebook(imports, looks, call, answer, cwd=tmp_path))
    made = json.loads((tmp_path / "call.json").read_text())
    assert {n: made[n] for n in ("steps", "loss", "best")} == {
        n: summary[n] for n in ("steps", "loss", "best")
    }
    for name in ("model", "ema", "optimizer"):
        left, right = (
            latest(tmp_path / run) / f"{name}.safetensors" for run in ("call", "command")
        )
        assert left.read_bytes() == right.read_bytes()
    # What one began the other goes on with.
    further = [*options, "--max-steps", 8, "--results-dir", tmp_path / "call", "--json"]
    assert result(tpukit("train", "--task", TINY, "--set", "width=16", *further))["steps"] == 8


def test_a_run_of_a_class_in_a_file_records_the_file(tmp_path):
    package.fit(Tiny, width=16, results_dir=tmp_path, **SHORT)
    trained = package.load(tmp_path)
    assert trained.config["task"]["source"] == TINY
    assert type(trained.task) is Tiny and trained.task.width == 16
    assert trained.model.training is False
    assert torch.equal(trained.model[0].weight, parameters(tmp_path, "ema")["0.weight"])


class Odd(Tiny):
    """Takes settings of many kinds."""

    name = "odd"

    def __init__(self, scale=1.0, text="", shape=(), table=None, function=None):
        super().__init__()
        self.settings = scale, text, list(shape), table


def test_settings_are_recorded_and_what_cannot_be_is_told(tmp_path):
    """NumPy's numbers, as a sweep gives them, and characters beyond the first 65,536."""
    given = {"scale": np.float64(0.5), "text": "\U0001f4c1 é", "shape": (np.int64(3), 2)}
    given["table"] = {"a b": [1.5, "x"]}
    for task, more in ((Odd(**given, function=len), {}), (Odd, {**given, "function": len})):
        lines, folder = [], tmp_path / str(len(more))
        package.fit(
            task, results_dir=folder, log=lines.append, lr=np.float32(0.25),
            global_batch_size=np.int64(8), **more, **SHORT,
        )  # fmt: skip
        assert any("cannot hold function of Odd" in line for line in lines)
        trained = package.load(folder, task=Odd)
        assert trained.task.settings == (0.5, given["text"], [3, 2], given["table"])
        assert trained.config["train"]["lr"] == 0.25


def test_keywords_are_the_commands_options(tmp_path):
    """Every option of `tpukit train` is a field of its config: fit takes each by name."""
    from tpukit.train.config import OPTIONS

    options = {name for names in OPTIONS.values() for name in names}
    assert options <= set(TrainConfig.__dataclass_fields__)
    made = package.fit(
        TINY, width=16, results_dir=tmp_path, preset="quick", max_time="1h", memory_limit=None,
        **{**SHORT, "max_steps": 1},
    )  # fmt: skip
    assert made.steps == 1


# -- errors ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "options", "says", "hint"),
    [
        ("fit", {"task": Tiny(), "epoch": 3}, "epoch=3 is not an option", "Did you mean epochs?"),
        ("fit", {"task": Tiny(), "data_path": "d"}, "data_path='d'", "constructor"),
        ("fit", {"task": Tiny, "widht": 3}, "no setting 'widht'", "Did you mean width?"),
        ("fit", {"task": Tiny, "lr": "fast"}, "'fast' is not a number", ""),
        ("fit", {"task": Tiny, "max_time": "soon"}, "invalid duration 'soon'", "8h30m"),
        ("fit", {"task": "iet"}, "no such task", "Did you mean eit?"),
        ("fit", {"task": Tiny, "samples": 0}, "There is no sample.", "Ask for some."),
        ("evaluate", {"run": "nowhere"}, "nowhere does not exist", "Train first"),
        ("evaluate", {"run": "nowhere", "limit": 0}, "--limit 0", ""),
        ("evaluate", {"run": "nowhere", "limit": "3"}, "--limit '3' is not a whole number", ""),
        ("evaluate", {}, "takes a run or checkpoint=", "Give one"),
        ("evaluate", {"checkpoint": "no.pt"}, "no.pt does not exist", "Check the path"),
        ("predict", {"run": "nowhere", "out": 3}, "--out 3 is not a path", ""),
        ("load", {"run": "nowhere"}, "nowhere does not exist", "Train first"),
        ("show", {"run": "nowhere"}, "nowhere is not a run folder", "training command"),
        ("find_batch", {}, "takes a task, or model=", "Give one"),
        ("find_batch", {"task": Tiny, "start": 0}, "--start 0", ""),
        ("find_batch", {"task": Tiny, "target": "v5e-7"}, "v5e-7", "v5e-8"),
        ("find_batch", {"model": Tiny}, "has no input", "NAME=SHAPE"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_errors_are_tpukits_own(call, options, says, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hardware = {} if call in ("load", "show") else {"hw": "cpu"}
    with pytest.raises(TpukitError) as caught:
        getattr(package, call)(**options, **hardware)
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")
    assert str(caught.value) == "\n".join(filter(None, (caught.value.message, caught.value.hint)))


def test_several_ranks_need_a_launcher():
    with pytest.raises(HardwareError, match=r"2 CPU devices take 2 processes.*\n.*torchrun"):
        package.fit(Tiny, hw="cpu", devices=2)


def test_a_script_that_trains_when_it_is_imported_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import tpukit\nfrom tiny_task import Tiny\ntpukit.fit(Tiny, hw='cpu')\n")
    with pytest.raises(ConfigError, match=f"{script} runs tpukit while it is imported.\nPut "):
        package.fit(f"{script}:Tiny", hw="cpu")
    assert [p for p in tmp_path.iterdir() if p.name != "__pycache__"] == [script]


def test_what_the_task_raises_is_named_and_kept(tmp_path):
    from tiny_task import Broken

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(TaskFailedError, match=r"Broken.loss raised RuntimeError.*tiny_task") as one:
        package.fit(Broken, results_dir=tmp_path, **SHORT)
    assert isinstance(one.value.__cause__, RuntimeError)
    assert signal.getsignal(signal.SIGINT) is before
