"""What a GPU's device does, on a GPU that is the CPU; `test_gpu.py` runs the same on a real one."""

import weakref
from datetime import timedelta

import pytest
import torch
from cuda_on_cpu import GIB, TOTAL
from torch import nn

from tpukit.errors import HardwareError
from tpukit.hardware.eager import backend
from tpukit.hardware.eager.devices import _keep_convolutions_in_fp32
from tpukit.hardware.memory import Memory
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend


def test_a_memory_limit_needs_the_device_s_index(gpu, cuda):
    cuda.limit_memory(3 * GIB)
    assert gpu.fraction == 3 / 15
    with pytest.raises(HardwareError, match="this GPU has"):
        cuda.limit_memory(TOTAL + 1)


def test_memory_is_what_the_allocator_reserves_of_what_others_leave(gpu, cuda):
    gpu.allocate(GIB)
    with cuda.memory_meter() as read:
        gpu.allocate(10 * GIB)
        gpu.free(10 * GIB)
        memory = read()
    assert memory == Memory(used=0, peak=11 * GIB * 11 // 10 - GIB, limit=TOTAL - gpu.others)
    with cuda.memory_meter() as read:
        assert read().peak == 0, "the former trial's cache is no part of this one"


def test_under_a_limit_that_is_the_limit(gpu, cuda):
    cuda.limit_memory(3 * GIB)
    assert cuda.usage().memory.limit == 3 * GIB


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch has one setting")
@pytest.mark.filterwarnings("ignore:Please use the new API")
def test_fp32_leaves_the_getters_of_tf32_usable(monkeypatch):
    settings = torch.backends.cudnn
    before = settings.conv.fp32_precision, settings.rnn.fp32_precision
    try:
        _keep_convolutions_in_fp32()
        assert settings.allow_tf32 is False
        assert settings.conv.fp32_precision == settings.rnn.fp32_precision == "ieee"
        with settings.flags(enabled=True):
            pass
    finally:
        settings.allow_tf32 = True
        settings.conv.fp32_precision, settings.rnn.fp32_precision = before


def test_no_model_outlives_its_last_use():
    """Else trials that share a process would leave each one's weights."""
    backend = open_backend(HardwareOptions(hw="cpu"))
    model = backend.prepare(nn.Linear(2, 2))
    kept = weakref.ref(model)
    del model
    assert kept() is None
    backend.close()


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"), [(4, "3", 3), (1, "3", 0), (2, "1", 1), (2, "0", 0)]
)
def test_a_rank_takes_its_gpu_of_those_that_it_sees(monkeypatch, visible, local_rank, index):
    """All of a host's, or, as SLURM binds them, its own alone."""
    chosen, joined = [], []
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **how: joined.append(backend)
    )
    device = backend._join("gpu", timedelta(seconds=1))
    assert [device] == chosen == [torch.device("cuda", index)] and joined == ["nccl"]
