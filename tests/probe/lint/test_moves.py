# ruff: noqa: E501 - a case is one line
"""Moving torch_xla code to torch_tpu: every row found, fixed where one replacement is right, and run."""

import ast
import subprocess
import sys

import pytest
from moved_scripts import SCRIPTS
from runs import SUPPORT, environment, tpukit

from tpukit.knowledge.calls import moves_to_torch_tpu
from tpukit.probe.lint.fix import plan_fix
from tpukit.probe.lint.prefilter import may_concern
from tpukit.probe.lint.scan import module_findings
from tpukit.probe.lint.source import python_module

XM = "import torch_xla.core.xla_model as xm\n"

USES = {
    "move-device": ["import torch_xla\ntorch_xla.device()", XM + "xm.xla_device()"],
    "move-sync": ["import torch_xla\ntorch_xla.sync()", XM + "xm.mark_step()"],
    "move-wait": [XM + "xm.wait_device_ops()"],
    "move-optimizer-step": [XM + "xm.optimizer_step(opt)"],
    "move-launch": [
        "import torch_xla\ntorch_xla.launch(f)",
        "import torch_xla.distributed.xla_multiprocessing as xmp\nxmp.spawn(f, args=(1,))",
    ],
    "move-ordinal": ["import torch_xla.runtime as xr\nxr.global_ordinal()"],
    "move-local-ordinal": ["import torch_xla.runtime as xr\nxr.local_ordinal()"],
    "move-world-size": ["import torch_xla.runtime as xr\nxr.world_size()"],
    "move-master": [XM + "xm.is_master_ordinal()"],
    "move-master-print": [XM + "xm.master_print(1)"],
    "move-seed": ["import torch_xla\ntorch_xla.manual_seed(3)"],
    "move-compile": ["import torch_xla\nf = torch_xla.compile(f)"],
    "move-checkpoint": ["from torch_xla.utils.checkpoint import checkpoint\ncheckpoint(f, x)"],
    "move-autocast": ["from torch_xla.amp import autocast\nautocast(d)"],
    "move-device-text": [
        "x.to('xla')",
        "device = 'xla'",
        "device: str = 'xla'",
        "device = 'xla' if tpu else 'cpu'",
        "def f(device='xla'): pass",
        "if x.device.type == 'xla': pass",
        "names = ['cpu', 'xla']",
        "d = torch.device('xla:1')",
        "init_process_group('xla', init_method='xla://')",
    ],
    "move-device-loader": [
        "import torch_xla.distributed.parallel_loader as pl\npl.MpDeviceLoader(x, d)"
    ],
    "move-save": [XM + "xm.save(s, 'x')"],
    "move-rendezvous": [XM + "xm.rendezvous('x')"],
    "move-collective": [XM + "xm.all_reduce('sum', x)", XM + "xm.mesh_reduce('x', y, sum)"],
    "move-step-closure": [XM + "xm.add_step_closure(f)"],
    "move-memory": [XM + "xm.get_memory_info(d)"],
    "move-spmd": ["import torch_xla.distributed.spmd as xs\nxs.mark_sharding(x, m, (0,))"],
    "move-use-spmd": ["import torch_xla.runtime as xr\nxr.use_spmd()"],
    "move-fsdp": ["from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel"],
    "move-debug": ["import torch_xla.debug.metrics as met\nmet.metrics_report()"],
    "move-custom-kernel": ["from torch_xla.experimental.custom_kernel import flash_attention"],
    "move-variable": ["import os\nos.environ['PJRT_DEVICE'] = 'TPU'"],
    "move-import": ["import torch_xla"],
}

STAYS = [
    "import torch\nx.to('cuda')\nprint('xla is fast')\nd = {'xla': 1}\nd['xla']\ngetattr(torch, 'xla')",
    "import mine.torch_xla_model as xm\nxm.mark_step()",
    "from .torch_xla import device\ndevice()",
    "import os\nos.environ['OMP_NUM_THREADS'] = '1'",
]

FIXED = [
    (XM + "d = xm.xla_device()", 'import torch\nd = torch.device("tpu")'),
    (XM + "for b in x:\n    xm.mark_step()", "for b in x:\n    pass"),
    (XM + "for b in x:\n    b()\n    xm.mark_step()\nxm.mark_step()", "for b in x:\n    b()"),
    (XM + "xm.optimizer_step(self.opts[0], barrier=True)", "self.opts[0].step()"),
    (XM + "xm.optimizer_step(a or b)", "(a or b).step()"),
    (
        "import torch_xla\ntorch_xla.launch(main, args=(3, 'x'))",
        'import os\nmain(int(os.environ.get("RANK", "0")), 3, \'x\')',
    ),
    (
        "import os\nimport torch_xla\ntorch_xla.launch(main, args=flags)",
        'import os\nmain(int(os.environ.get("RANK", "0")), *flags)',
    ),
    (
        "from torch_xla.runtime import world_size as n\nprint(n())",
        'import os\nprint(int(os.environ.get("WORLD_SIZE", "1")))',
    ),
    ("x.to('xla:0')", "x.to('tpu:0')"),
    ("device: str = 'xla' if tpu else 'cpu'", "device: str = 'tpu' if tpu else 'cpu'"),
    (
        "init_process_group('xla', init_method='xla://')",
        "init_process_group('tpu', init_method='env://')",
    ),
    ("import torch\nimport torch_xla\nx = 1", None),
    (XM + "xm.optimizer_step(opt, groups=g)", None),
    (XM + "f = lambda: xm.mark_step()", None),
    ("import torch_xla\nd = torch_xla.device(1)", None),
    (XM + "xm.save(s, 'x')", None),
]


def moves(code: str) -> list[str]:
    module = python_module("x.py", code + "\n")
    found = [f.id for f in module_findings(module, moves="torch_tpu") if f.id.startswith("move-")]
    # What is found must also get past the look that saves parsing most files.
    assert not found or may_concern(code.encode(), moves="torch_tpu")
    return found


def test_every_row_has_its_case():
    assert set(USES) == {row.id for row in moves_to_torch_tpu()}


@pytest.mark.parametrize("id", USES)
def test_a_use_is_found(id):
    for code in USES[id]:
        assert id in moves(code)


@pytest.mark.parametrize("code", STAYS)
def test_what_is_not_of_torch_xla_is_left_alone(code):
    assert moves(code) == []


@pytest.mark.parametrize(("code", "expected"), FIXED)
def test_one_right_replacement(code, expected, tmp_path):
    path = tmp_path / "x.py"
    path.write_text(code + "\n")
    planned = plan_fix(path, moves="torch_tpu")
    new = planned.data.decode() if planned else None
    assert new == (expected and expected + "\n")


def test_without_the_option_nothing_moves(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("import torch_xla\nd = torch_xla.device()\ntorch_xla.sync()\n")
    assert tpukit("doctor", path).stdout == "1 file: nothing found.\n"
    shown = tpukit("doctor", path, "--to", "torch_tpu")
    assert shown.returncode == 1
    assert "not in torch_tpu: torch_xla.device" in shown.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_moved_script_names_torch_xla_no_more(name, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(SCRIPTS[name])
    done = tpukit("doctor", path, "--to", "torch_tpu", "--fix")
    assert done.returncode == 0, done.stdout
    moved = path.read_text()
    assert "torch_xla" not in moved
    ast.parse(moved)


@pytest.mark.torch_tpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_moved_script_runs(name, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(SCRIPTS[name])
    moved = tpukit("doctor", path, "--to", "torch_tpu", "--fix")
    assert moved.returncode == 0, moved.stdout
    done = subprocess.run(
        [sys.executable, path],
        env=environment({"PYTHONPATH": str(SUPPORT / "torch_tpu_on_cpu"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}),
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "done tpu", done.stderr[-2000:]
