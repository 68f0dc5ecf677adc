"""The rows of the page of TPU estimates."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROW = {
    "largest_batch_per_device": 12, "smallest_failed_batch_per_device": 13,
    "recommended_batch_per_device": 10, "limit_bytes": 16 * 2**30,
    "memory": {"parameters": 2**30, "temporaries": 7 * 2**30}, "collectives": {"all-reduce": 3},
    "step": {"flops": 2e12, "bytes": 2**34, "estimate_seconds": 0.05}, "versions": {"libtpu": "1"},
    "code": "old",
}  # fmt: skip


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tpu_predictions

    yield tpu_predictions
    for name in ("tpu_predictions", "tpu_batches", "deciding_code"):
        del sys.modules[name]


def test_a_row_gives_batches_memory_and_times(script):
    name = script.PROGRAMS[0].name
    page = script.page({f"{name} | v5e-8": ROW, f"{script.PROGRAMS[1].name} | v5e-8":
                        {"error": "no answer within 3 minutes", "code": "old"}})  # fmt: skip
    [row] = [line for line in page.splitlines() if line.startswith(f"| {name} † | 12")]
    # 10,000 samples in steps of 80.
    assert row.endswith(
        "| 10 (80) | 8.00 of 16.00 GiB | 2 | 16 | 3 all-reduce | at least 50 ms | 6.2 s |"
    )
    assert f"| {name} | quick | 32 | 4 |" in page
    assert f"{script.PROGRAMS[1].name} †: no answer within 3 minutes." in page
    assert "Compiled by libtpu 1." in page


def test_a_large_global_batch_takes_the_fewest_accumulation_steps(script):
    one = script.Program("a task", (), {"fast": 256, "safe": 8})
    split = [cells[-1] for cells in script._presets(one, ROW)]
    assert split == ["8 x 4 accumulation steps", "1"]
