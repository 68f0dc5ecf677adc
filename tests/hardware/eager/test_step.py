"""The eager step against torch's own loop, fp16 and its scaler, generators, memory."""

from copy import deepcopy

import pytest
import torch
from cuda_on_cpu import GPU_TEXTS, GPU_TEXTS_AFTER_A_FIT
from fake_backend import FakeBackend
from hardware_run import Net, batches
from torch.amp.grad_scaler import GradScaler

from tpukit.hardware.backend import OptimizerSettings, ParameterGroup
from tpukit.hardware.collectives import Collectives
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import CpuDevice
from tpukit.hardware.eager.distributed import SingleProcess
from tpukit.hardware.eager.grad_scaling import ScaledUpdate
from tpukit.hardware.memory import is_out_of_memory, is_out_of_memory_text


def half_precision(scaler=None):
    scaler = scaler or GradScaler("cpu", growth_interval=4)
    device = CpuDevice()
    update = ScaledUpdate(scaler, device.device)
    alone = SingleProcess(lambda model: model)
    return EagerBackend("cpu", device, "fp16", Collectives(), alone, update, compiles=False)


def test_an_outer_autocast_does_not_reach_fp32():
    with torch.autocast("cpu", torch.bfloat16), FakeBackend().autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


class Half:
    """A training in fp16 that can be stopped and continued."""

    def __init__(self):
        torch.manual_seed(0)
        self.backend = half_precision()
        self.model = self.backend.prepare(Net())
        group = ParameterGroup(list(self.model.parameters()))
        self.optimizer = self.backend.optimizer([group], OptimizerSettings())
        self.norms = []

    def steps(self, start, stop):
        for batch in list(batches(self.backend, 1))[start:stop]:
            with self.backend.micro_batch(self.model, first=True, last=True):
                with self.backend.autocast():
                    loss = (self.model(batch["x"]) - batch["y"]).float().square().sum() / 16
                self.backend.backward(loss)
            norm = self.backend.step(self.optimizer, lr=1e-3, weight=torch.ones(()), clip_norm=1.0)
            self.backend.finish()
            self.norms.append(norm)

    def tensors(self):
        names = dict(self.backend.unwrap(self.model).named_parameters())
        state = self.optimizer.state
        moments = {f"{k}/{n}": v for n, p in names.items() for k, v in state[p].items()}
        return {**names, **moments}


@pytest.mark.parametrize("with_scaler", [True, False])
def test_fp16_goes_on_bit_for_bit_with_its_scaler_and_without_it_elsewhere(with_scaler):
    whole, first, second = Half(), Half(), Half()
    whole.steps(0, 20)
    first.steps(0, 11)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    if with_scaler:
        second.backend.load_state({"scaler": first.backend.state()["scaler"]})
        assert second.backend.state()["scaler"] == first.backend.state()["scaler"]
        assert first.backend.state()["scaler"]["growth_tracker"] > 0
    second.steps(11, 20)
    left, right = (run.backend.to_host(run.tensors()) for run in (second, whole))
    equal = all(torch.equal(left[name], right[name]) for name in right)
    same_scaler = second.backend.state()["scaler"] == whole.backend.state()["scaler"]
    assert (equal, same_scaler) == (with_scaler, with_scaler)


def test_a_step_that_overflows_changes_nothing_but_the_scale():
    run = Half()
    before = run.backend.to_host(run.tensors())
    run.backend.load_state({"scaler": {"scale_of_mean": 2.0**40, "growth_tracker": 0.0}})
    run.steps(0, 1)
    after = run.backend.to_host(run.tensors())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.isfinite(run.norms[0])
    assert run.backend.state()["scaler"]["scale_of_mean"] == 2.0**39


def test_fp16_goes_on_at_torchs_first_scale_where_an_old_checkpoint_has_one_of_sums():
    backend = half_precision()
    backend.load_state({"scaler": {"scale": 16.0, "growth_tracker": 3.0}})
    assert backend.state()["scaler"] == {"scale_of_mean": 65536.0, "growth_tracker": 0.0}


def test_attention_with_bias_and_causal():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 6, 4) for _ in range(3))
    bias = torch.randn(1, 3, 6, 6)
    future = torch.full((6, 6), float("-inf")).triu(1)
    expected = ((query @ key.mT) / 2 + bias + future).softmax(-1) @ value
    found = FakeBackend().attention(query, key, value, bias, causal=True)
    torch.testing.assert_close(found, expected)


def test_memory_is_the_process_own():
    memory = FakeBackend().usage().memory
    assert 2**26 < memory.used <= memory.peak <= memory.limit


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 21.84G of 15.75G hbm. Exceeded hbm capacity by 6.10G.",
        "Used 21.84G of 15.75G hbm. Exceeded hbm capacity by 6.10G.",
        "Allocation (size=25769803776) would exceed memory (size=17179869184) :: #allocation7",
        "Attempting to reserve 6.48G at the bottom of memory. That was not possible. There are",
        "Attempting to allocate 180.59M. That was not possible. There are 142.58M free.",
        "CompileTimeHbmOom: program memory (1.00T) exceeds available HBM (15.75G)",
        "Error preparing computation: Out of memory allocating 6000163152 bytes.",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        *GPU_TEXTS,
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you",
    ],
)
def test_out_of_memory_in_every_tongue(text):
    assert is_out_of_memory_text(text)
    assert is_out_of_memory(ValueError(text))


@pytest.mark.parametrize("text", ["Resource temporarily unavailable", "can't start new thread"])
def test_no_room_for_a_thread_is_lack_of_memory_only_under_a_limit(text):
    assert is_out_of_memory(RuntimeError(text), limited=True)
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", GPU_TEXTS_AFTER_A_FIT)
def test_a_library_without_memory_says_so_only_beside_a_smaller_batch_that_fitted(text):
    assert is_out_of_memory(RuntimeError(text), after_a_fit=True)
    assert not is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory_text(text)


def test_an_error_that_was_raised_while_memory_ran_out_is_one():
    def fail(hidden):
        try:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        except RuntimeError:
            if hidden:
                raise ValueError("no kernel was found") from None
            raise ValueError("no kernel was found")  # noqa: B904 - that is tested

    for hidden in (False, True):
        with pytest.raises(ValueError) as failure:
            fail(hidden)
        assert is_out_of_memory(failure.value) == (not hidden)


def test_other_failures_are_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory_text("The memory format option is only supported by 4-d tensors")
