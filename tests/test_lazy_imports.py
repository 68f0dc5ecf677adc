"""What must be quick imports nothing heavy."""

import json

import pytest
from runs import ROOT, printed, python

HEAVY = {"torch", "torch_xla", "accelerate", "timm", "jax", "matplotlib", "transformers", "scipy"}
SCRIPT = """
import json, os, sys
from tpukit.cli import run
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        sys.argv = ["tpukit", *arguments]
        code = run(arguments)
        open(str(number), "w").write(json.dumps([code, sorted(sys.modules)]))
        os._exit(0)
    os.wait()
"""
LINES = (
    "--help", "--version", "train --help", "doctor --help", "data --help",
    "train --task images --help", "test --help", "predict --help", "probe-batch --help",
    "summarize-train --help", "doctor --quick --json", "train --lr fast", "doctor --fix",
    "doctor old.py", "doctor old.py --diff", "doctor --explain log",
)  # fmt: skip


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Exit code and modules after each line, in a fork of a process that has only the app."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "old.py").write_text("import torch_xla.core.xla_model as xm\nxm.mark_step()\n")
    (folder / "log").write_text("CUDA out of memory. Tried to allocate 2.00 GiB\n")
    lines = json.dumps([line.split() for line in LINES])
    printed(python("-c", SCRIPT, lines, cwd=folder, env={"PYTHONPATH": str(ROOT)}))
    return {
        line: json.loads((folder / str(number)).read_text()) for number, line in enumerate(LINES)
    }


@pytest.mark.parametrize("line", LINES)
def test_nothing_heavy_is_imported(imported, line):
    code, modules = imported[line]
    assert code in (0, 1, 2)
    assert not HEAVY & set(modules)
    assert "numpy" not in modules or "doctor" not in line


def test_completion_imports_nothing_heavy():
    asked = {"_TPUKIT_COMPLETE": "complete_bash", "COMP_WORDS": "tpukit tr", "COMP_CWORD": "1"}
    done = python("-X", "importtime", "-m", "tpukit", env=asked)
    assert "train" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not HEAVY & imported


def test_workers_that_read_data_import_no_torch():
    """It takes seconds, in each of them."""
    functions = ("eit.data.samples", "eit.generate", "llm.data.token_cache")
    modules = ", ".join(f"tpukit.tasks.{name}" for name in functions)
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    printed(python("-c", code, cwd=ROOT))
