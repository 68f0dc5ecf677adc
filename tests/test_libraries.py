"""What a run keeps out of its process: TensorFlow, compile workers, libraries' notices."""

import os

import pytest
from runs import ROOT, VIRTUAL_TPU, python

NOTICED = """
import os, sys
sys.path.insert(0, {support!r})
from tiny_task import Tiny as Small
import psutil, torch, warnings

class Tiny(Small):
    def loss(self, model, batch):
        warnings.warn("old call", DeprecationWarning)
        children = [c.cmdline() for c in psutil.Process().children(recursive=True)]
        assert not [c for c in children if "compile_worker" in " ".join(c)], children
        return super().loss(model, batch)
"""


@pytest.mark.parametrize(
    ("hw", "variables"),
    [
        ("cpu", {}),
        pytest.param("tpu", VIRTUAL_TPU, marks=[pytest.mark.xla, pytest.mark.slow]),
    ],
)
def test_training_imports_no_tensorflow_and_starts_no_compile_workers(tmp_path, hw, variables):
    fake = tmp_path / "libraries" / "tensorflow"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise RuntimeError('tensorflow was imported')")
    task = tmp_path / "noticed.py"
    task.write_text(NOTICED.format(support=str(ROOT / "tests" / "support")))
    paths = [str(fake.parent), *os.environ.get("PYTHONPATH", str(ROOT)).split(os.pathsep)]
    words = ["train", "--task", f"{task}:Tiny", "--hw", hw, "--max-steps", 6, "--log-every", 2]
    env = {**variables, "PYTHONPATH": os.pathsep.join(paths)}
    done = python("-m", "tpukit", *words, "--results-dir", tmp_path / "run", env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "arning" not in done.stderr and len(done.stderr.splitlines()) < 10, done.stderr
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
