"""The same loop on a GPU; skipped where there is none."""

import pytest
import torch
import torch.distributed as dist
from fake_backend import FakeBackend
from hardware_run import Net, train
from runs import relative_difference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tpukit.hardware.eager.distributed import FSDP
from tpukit.hardware.memory import is_out_of_memory
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend
from tpukit.train.shards import INDEX_FILE, Shards, write_shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def parameters(backend, model):
    return backend.to_host(dict(backend.unwrap(model).named_parameters()))


@pytest.fixture(scope="module")
def on_cpu():
    backend = FakeBackend()
    return parameters(backend, train(backend)[0])


@pytest.mark.parametrize(
    ("precision", "compiled", "tolerance"),
    [("fp32", False, 1e-4), ("fp32", True, 1e-4), ("bf16", False, 0.1), ("bf16", True, 0.1)],
)
def test_weights_agree_with_the_cpu(on_cpu, precision, compiled, tolerance):
    options = HardwareOptions(hw="gpu", devices=1, precision=precision, compile=compiled)
    backend = open_backend(options)
    before = backend.compilations()
    found = parameters(backend, train(backend)[0])
    assert relative_difference(found, on_cpu) < tolerance
    assert (backend.compilations() > before) == compiled


def test_same_bits_each_time_when_deterministic():
    options = HardwareOptions(hw="gpu", devices=1, compile=False, deterministic=True)
    try:
        backend = open_backend(options)
        one, other = (parameters(backend, train(backend)[0]) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_fp16_keeps_its_scaler_on_the_device():
    backend = open_backend(HardwareOptions(hw="gpu", devices=1, precision="fp16", compile=False))
    train(backend)
    state = {"scaler": {"scale_of_mean": 2.0**7, "growth_tracker": 3.0}}
    assert backend.state()["scaler"] != state["scaler"]
    backend.load_state(state)
    assert backend.state()["scaler"] == state["scaler"]
    scale = backend.update.gradient_scale()
    assert scale.is_cuda and float(scale) == 2.0**7


def test_batches_arrive_on_the_device_in_order():
    backend = open_backend(HardwareOptions(hw="gpu", devices=1, compile=False))
    host = [{"x": torch.full((4, 2), float(i))} for i in range(20)]
    sent = list(backend.batches(host))
    assert all(batch["x"].is_cuda for batch in sent)
    assert [float(batch["x"][0, 0]) for batch in sent] == list(range(20))


def test_generators_memory_and_running_out_of_it():
    backend = open_backend(HardwareOptions(hw="gpu", devices=1, compile=False))
    backend.prepare(Net())
    backend.load_state({"seed": 5})
    first = torch.rand(8, device=backend.device)
    backend.load_state({"seed": 5})
    assert torch.equal(torch.rand(8, device=backend.device), first)
    memory = backend.usage().memory
    assert 0 < memory.used <= memory.peak < memory.limit
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2 * memory.limit, dtype=torch.uint8, device=backend.device)
    assert is_out_of_memory(failure.value)


def test_the_peak_is_what_was_reserved_and_the_limit_what_others_leave():
    backend = open_backend(HardwareOptions(hw="gpu", devices=1, compile=False))
    with backend.memory_meter() as read:
        torch.empty(2**28, dtype=torch.uint8, device=backend.device)
        memory = read()
    assert memory.peak >= 2**28 and memory.used < 2**20
    free, total = torch.cuda.mem_get_info(backend.device)
    assert free <= memory.limit < total
    with backend.memory_meter() as read:
        assert read().peak < 2**28


def test_a_memory_limit_is_kept():
    options = HardwareOptions(hw="gpu", devices=1, compile=False, memory_limit=2**30)
    backend = open_backend(options)
    try:
        with pytest.raises(RuntimeError) as failure:
            torch.empty(2**31, dtype=torch.uint8, device=backend.device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, backend.device)
    assert is_out_of_memory(failure.value)


def test_fp32_convolutions_are_not_rounded_to_tf32():
    backend = open_backend(HardwareOptions(hw="gpu", devices=1, precision="fp32", compile=False))
    x, weight = torch.randn(2, 64, 32, 32), torch.randn(64, 64, 3, 3)
    expected = torch.nn.functional.conv2d(x.double(), weight.double())
    found = torch.nn.functional.conv2d(x.to(backend.device), weight.to(backend.device))
    assert relative_difference({"y": found.cpu()}, {"y": expected.float()}) < 1e-5
    assert torch.backends.cudnn.allow_tf32 is False


def test_a_compiled_norms_weight_gets_its_gradient():
    """torch 2.10 to 2.13 give that of a weight of shape (1, 1, width) another shape, or raise."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1, 1, 512))
            self.after = torch.nn.Linear(512, 512)

        def forward(self, x):
            x = torch.nn.functional.normalize(x, dim=-1) * self.scale
            return self.after(x).square().mean()

    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(32, 1024, 512, requires_grad=True)
    model(x).backward()
    expected = model.scale.grad
    model.zero_grad()
    backend = open_backend(HardwareOptions(hw="gpu", devices=1, precision="fp32", compile=True))
    prepared = backend.prepare(model)
    on_gpu = x.detach().to(backend.device).requires_grad_()
    backend.call(prepared, lambda model: model(on_gpu)).backward()
    found = backend.unwrap(prepared).scale.grad.cpu()
    assert relative_difference({"scale": found}, {"scale": expected}) < 1e-4


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_no_half_copies_of_sharded_weights_are_kept(tmp_path, half):
    """In a group of one rank: against autocast on weights that are gathered in fp32."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 1024)) for _ in range(8)
            )

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    store = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    x, kept, gradients = torch.ones(4, 1024, device="cuda"), {}, {}
    try:
        mesh = init_device_mesh("cuda", (1,))
        for gathered in (None, half):
            torch.manual_seed(0)
            sharded = FSDP(mesh, half=gathered)
            model = sharded.prepare(Deep(), train=True)
            with sharded.micro_batch(model, last=True):
                before = torch.cuda.memory_allocated()
                with torch.autocast("cuda", half):
                    loss = sharded.call(model, nn.Module.__call__, x).float().square().mean()
                kept[gathered] = torch.cuda.memory_allocated() - before
                loss.backward()
            gradients[gathered] = {n: sharded.whole(p.grad) for n, p in model.named_parameters()}
            del model, loss
    finally:
        dist.destroy_process_group()
    print("bytes kept after the forward pass:", kept)
    copies = 2 * 8 * 1024**2
    assert kept[None] - kept[half] > 0.9 * copies
    assert kept[half] < 0.2 * copies
    assert relative_difference(gradients[half], gradients[None]) < 1e-3


def test_shards_of_a_gpu_are_made_saved_and_read(tmp_path):
    """In a group of one rank: a large weight is made in its place, and comes back by DCP."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    try:
        fsdp = FSDP(init_device_mesh("cuda", (1,)))

        def make():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 2))

        model = fsdp.prepare(fsdp.make(make), train=True)
        expected = {name: p.detach() for name, p in make().named_parameters()}
        parameters = dict(model.named_parameters())
        copies = {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}
        sums = write_shards(tmp_path, {"model": copies}, dist.new_group(backend="gloo"))
        assert INDEX_FILE in sums
        rooms = {name: torch.zeros_like(p) for name, p in parameters.items()}
        Shards(tmp_path).fill("model", rooms)
        for name, value in expected.items():
            assert torch.equal(fsdp.whole(parameters[name]).cpu(), value)
            assert torch.equal(fsdp.whole(rooms[name]).cpu(), value)
    finally:
        dist.destroy_process_group()
