"""`doctor --to tpu`: what a CUDA script needs for torch_xla, and that the rewritten one trains."""

import ast
from pathlib import Path

import pytest
from cases import read_cases
from runs import script
from scanned import ids

from tpukit.knowledge.calls import move_table
from tpukit.probe.lint.fix import apply_fix, plan_fix

CASES = read_cases(__file__)
SCRIPT = """
import torch
import torch.nn as nn
from torch.cuda.amp import autocast, GradScaler
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.cuda.manual_seed_all(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
if torch.cuda.is_available():
    model.cuda()
    torch.cuda.empty_cache()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = GradScaler(enabled=True)
data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
loader = DataLoader(data, batch_size=16, shuffle=True, pin_memory=True)
for epoch in range(2):
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.to(device)
        optimizer.zero_grad()
        with autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
assert (Tensor(2, 8).fill_(1.0) + torch.ones(2, 8).type(Tensor)).device == x.device
assert torch.accelerator.current_accelerator().type == x.device.type
torch.cuda.synchronize()
torch.save(model.state_dict(), "model.pt")
model.load_state_dict(torch.load("model.pt", map_location="cuda:0"))
print(next(model.parameters()).device.type, loss.item() < 1)
"""


def moved(tmp_path: Path, source: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(source)
    fix = plan_fix(path, moves="tpu")
    if fix is not None:
        apply_fix(fix)
    ast.parse(path.read_text())
    return path.read_text()


def found(source: str) -> set[str]:
    return {*ids(source, moves="tpu")}


@pytest.mark.xla
def test_a_rewritten_script_trains_on_a_virtual_device(tmp_path):
    text = moved(tmp_path, SCRIPT)
    assert "cuda" not in text
    run = script(tmp_path / "train.py", env={"PJRT_DEVICE": "CPU"}, cwd=tmp_path)
    assert run.stdout.split() == ["xla", "True"], run.stderr


def test_a_second_fix_changes_nothing(tmp_path):
    once = moved(tmp_path, SCRIPT)
    assert moved(tmp_path, once) == once


def test_one_right_form_is_written(tmp_path):
    head = "import torch\n\n"
    for code, expected in CASES["rewritten"].items():
        text = moved(tmp_path, f"{head}{code}\n").replace("import torch_xla\n", "")
        assert text == f"{head}{expected}\n"


def test_the_rest_is_reported():
    cases = [(id, code) for id, codes in CASES["reported"].items() for code in codes]
    assert [(id, code) for id, code in cases if id not in found(f"import torch\n{code}")] == []


def test_code_without_cuda_is_left_alone(tmp_path):
    source = "import torch\n\n\ndef f(x):\n    return torch.relu(x)\n"
    assert moved(tmp_path, source) == source
    assert found(source) == set()


def test_what_ends_the_step_itself_needs_no_sync():
    for package in ("torch_xla.core.xla_model", "accelerate", "lightning.pytorch"):
        source = f"import torch\nimport {package} as p\noptimizer.step()\n"
        assert "cuda-sync" not in found(source)
    inside = (
        "import torch\ndef f():\n    from accelerate import Accelerator\n    optimizer.step()\n"
    )
    assert "cuda-sync" not in found(inside)
    assert "cuda-sync" in found("import torch, numpy\noptimizer.step()\n")


def test_what_needs_no_change():
    codes = CASES["unchanged"]["codes"]
    wrong = [code for code in codes if found(f"import torch\n{code}") - {"set-default-tensor-type"}]
    assert wrong == []


def test_names_of_the_table_are_pytorch_s():
    import torch

    for name in move_table("tpu").by_name:
        if name.startswith("torch.cuda.") and "profiler" not in name:
            part = torch
            for attribute in name.split(".")[1:]:
                assert hasattr(part, attribute) or attribute in ("memory_cached",), name
                part = getattr(part, attribute, None)


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("", {"cuda-method", "cuda-half"}),
        ("  # tpukit: ignore", set()),
        ("  # tpukit: ignore[cuda-half]", {"cuda-method"}),
        ("  # tpukit: ignore[cuda-half, cuda-method]", set()),
    ],
)
def test_a_comment_suppresses_all_findings_of_a_line_or_those_that_it_names(comment, expected):
    assert found(f"import torch\nx = y.cuda().half(){comment}") == expected
