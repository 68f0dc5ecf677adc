"""What must be quick imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import environment

HEAVY = {"torch", "torch_xla", "accelerate", "timm", "jax", "matplotlib", "transformers", "scipy"}
SCRIPT = """
import json, sys
sys.argv = ["tpukit", *{arguments!r}]
from tpukit.cli import run
code = run({arguments!r})
open({answer!r}, "w").write(json.dumps([code, sorted(sys.modules)]))
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["train", "--help"], ["doctor", "--help"], ["data", "--help"],
     ["train", "--task", "images", "--help"],
     ["test", "--help"], ["predict", "--help"], ["probe-batch", "--help"],
     ["summarize-train", "--help"], ["doctor", "--quick", "--json"], ["train", "--lr", "fast"],
     ["doctor", "--fix"]],
    ids=" ".join,
)  # fmt: skip
def test_nothing_heavy_is_imported(tmp_path, arguments):
    answer = tmp_path / "modules.json"
    script = SCRIPT.format(arguments=arguments, answer=str(answer))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    code, modules = json.loads(answer.read_text())
    assert code in (0, 1, 2)
    assert not HEAVY & set(modules)


def test_completion_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tpukit"],
        env=environment({"_TPUKIT_COMPLETE": "complete_bash", "COMP_WORDS": "tpukit tr",
                         "COMP_CWORD": "1"}),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "train" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not HEAVY & imported
