"""Steps of torch_xla traced and recorded, compared bit for bit: python recorded_steps.py CASE ...
Prints JSON."""

import gc
import json
import sys
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from momentum_task import MoCo
from python_in_steps import TASKS, Imports, Plain, batch_of, trained
from torch import nn

from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend
from tpukit.hardware.xla import backend as of_xla
from tpukit.train.config import TrainConfig
from tpukit.train.learner import BatchSums, build_learner


def opened(**options):
    """A backend that records its steps, and what it says of them."""
    said = []
    of_xla._note = said.append
    options = {"precision": "fp32", "step_mode": "traced", "kernels": "off", **options}
    backend = open_backend(HardwareOptions(hw="tpu", **options))
    backend.record_steps()
    return backend, said


@contextmanager
def traced(backend):
    recorded, backend.recorded = backend.recorded, None
    yield
    backend.recorded = recorded


def both(backend, run, *arguments):
    """What `run` returns (tensors by name) with traced and with recorded steps: the names of those
    that differ in a bit, the number of steps that ran without their Python, and that of programs
    that recorded steps compiled beside the traced ones."""
    with traced(backend):
        expected = run(backend, *arguments)
    before, compiled = backend.recorded.executed, backend.compilations()
    found = run(backend, *arguments)
    differing = [n for n, t in expected.items() if not same_bits(t, found[n])]
    return {"differing": differing, "executed": backend.recorded.executed - before,
            "tensors": len(expected), "compiled": backend.compilations() - compiled}  # fmt: skip


def same_bits(one, other):
    as_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return one.shape == other.shape and torch.equal(*as_bytes)


class Noisy(Plain):
    """Dropout within blocks that are computed again, BatchNorm, draws of the loss."""

    def build_model(self, ops):
        return Blocks(ops)

    def loss(self, model, batch):
        each = (model(batch["x"]) - batch["y"]).square().mean(1)
        return {"loss": each * (1 + 0.1 * torch.rand_like(each)), "drawn": torch.rand_like(each)}


class Blocks(nn.Module):
    def __init__(self, ops):
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2))
        self.ops, self.block, self.norm = ops, block, nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        x = self.scale * x + self.ops.recompute(self.block, x)
        return self.head(self.norm(F.dropout(x, 0.1, self.training)))


def learner_of(task, backend, **config):
    torch.manual_seed(0)
    config = {"ema_decay": 0.9, "ema_every": 3, "ema_warmup": 4, "clip_norm": 0.5, **config}
    return build_learner(task, backend, task.build_model(backend), TrainConfig(**config))


def state_of(learner):
    """All that steps change, on the host."""
    tensors = {
        **learner.model_tensors(), "window": learner.window, "norms": learner._norms,
        **{f"optimizer {n}": t for n, t in learner.optimizer_state.tensors().items()},
        **{f"ema {n}": t for n, t in (learner.ema.weights if learner.ema else {}).items()},
    }  # fmt: skip
    return learner.backend.to_host(tensors)


def step(learner, number, accumulate=1, of=batch_of, rows=8):
    host = [of(number * accumulate + part, rows) for part in range(accumulate)]
    learner.train_step(list(learner.backend.batches(host)), 0.01 / (1 + number))


def steps_of(backend, accumulate, optimizer, count):
    """Steps of changing rates, with metrics read now and then."""
    learner, kept = learner_of(Noisy(), backend, optimizer=optimizer), {}
    for number in range(count):
        step(learner, number, accumulate)
        if number % 5 == 4:
            kept[f"loss {number}"] = torch.tensor(learner.read_metrics().means["loss"])
    return {**state_of(learner), **kept}


def equal(count="12", shard=""):
    """By accumulation and optimizer."""
    backend, said = opened(shard=bool(shard))
    ways = [(1, "adamw"), (2, "adamw")]
    if int(count) > 12:
        ways += [(1, "sgd"), *((2, name) for name in ("adam", "rmsprop", "adafactor", "lion"))]
    found = {f"{a} {o}": both(backend, steps_of, a, o, int(count)) for a, o in ways}
    return {"ways": found, "said": said}


def python(*names):
    """Tasks whose steps depend on Python, and how many of eight steps ran without theirs."""
    backend, said = opened()
    kinds = {cls.__name__: cls for cls in (*TASKS, Reads)}
    found = {n: both(backend, lambda b, n=n: trained(kinds[n], b)) for n in names}
    return {"tasks": found, "said": said}


def zoo(name, count="10"):
    """A model that others ship, as it is."""
    from zoo_models import Zoo, entries

    backend, said = opened()
    task = Zoo(entries()[name])

    def run(backend):
        learner = learner_of(task, backend)
        for number in range(int(count)):
            [host] = task.seeded_batches(2 * backend.devices, seed=number)
            step(learner, number, of=lambda *_, host=host: host)
        return state_of(learner)

    return {**both(backend, run), "said": said}


class Reads(Plain):
    """Reads a value of the device."""

    def loss(self, model, batch):
        outputs = super().loss(model, batch)
        scale = 0.5 if outputs["loss"].mean().item() < 0.1 else 1.0
        return {"loss": scale * outputs["loss"]}


def surroundings(accumulate="1"):
    """What happens between steps: layers frozen, other shapes, validation, loaded weights, buffers
    that are shared or of another type, results that nothing has computed yet."""
    backend, said = opened()
    return {**both(backend, changed_between, int(accumulate)), "said": said}


def changed_between(backend, accumulate):
    learner = learner_of(Noisy(), backend)
    model, kept = learner.model, {}
    sums = BatchSums(learner.task, backend, model)
    first = backend.to_host(learner.model_tensors())
    target = backend.to_host({"weight": model.head.weight})["weight"]
    send = backend.mesh.send
    for number in range(35):
        if number in (5, 14):
            model.head.requires_grad_(number == 14)
        if number in (8, 17):
            with learner.evaluation_weights():
                model.eval()
                for host in map(batch_of, range(4)):
                    sums.add(next(backend.batches([host])))
                kept[f"valid {number}"] = torch.tensor(list(sums.read().values()))
                model.train()
        if number == 11:
            held = {name: tensor.detach() for name, tensor in learner.model_tensors().items()}
        if number == 19:
            kept |= {f"held {n}": t for n, t in backend.to_host(held).items()}
            backend.load(learner.model_tensors(), first)
        if number == 21:
            pending = learner.window * 2 + model.head.bias.detach().sum()
        if number == 23:
            model.norm.running_var.data = model.norm.running_mean.data = send(torch.ones(6))
        if number in (26, 29):
            of_type = {"dtype": torch.bfloat16} if number == 29 else {}
            model.scale.data = send(torch.ones(6 if number == 26 else 1, **of_type))
            model.head.weight.data = send(target)
        if number == 32:
            learner.ema.weights["norm.running_mean"] = send(torch.full((6,), 0.5))
        step(learner, number, accumulate, rows=4 if number == 15 else 8)
        if number == 22:
            kept["pending"] = backend.to_host({"p": pending})["p"]
        now = {"bias": model.head.bias, "tracked": model.norm.num_batches_tracked}
        kept |= {f"{n} {number}": t for n, t in backend.to_host(now).items()}
    return {**state_of(learner), **kept}


class DrawsOnce(Noisy):
    """Draws on the host in its first step: that one cannot be recorded."""

    has_drawn = False

    def loss(self, model, batch):
        if not self.has_drawn:
            self.has_drawn = bool(torch.rand(()) < 2)
        return super().loss(model, batch)


def refused_first():
    """A step that is recorded once before a validation, and once after it; `later`: programs
    compiled after these."""
    backend, said = opened()
    counts = []

    def run(backend):
        learner = learner_of(DrawsOnce(), backend)
        sums = BatchSums(learner.task, backend, learner.model)
        for number in range(8):
            step(learner, number)
            if number == 1:
                learner.model.eval()
                sums.add(next(backend.batches([batch_of(0)])))
                learner.model.train()
                counts.append(backend.compilations())
        counts.append(backend.compilations())
        return state_of(learner)

    return {**both(backend, run), "later": counts[-1] - counts[-2], "said": said}


def imports():
    """`later`: programs compiled after the first step."""
    backend, said = opened()
    counts = []

    def run(backend):
        learner = learner_of(Imports(), backend)
        for number in range(8):
            step(learner, number)
            counts.append(backend.compilations())
        return state_of(learner)

    return {**both(backend, run), "later": counts[-1] - counts[-8], "said": said}


def queue():
    """Results of a micro-batch that the next ones take."""
    backend, said = opened()

    def run(backend):
        learner = learner_of(MoCo(), backend, optimizer="sgd")
        for number in range(10):
            step(learner, number, 2, of=pairs_of)
        return state_of(learner)

    return {**both(backend, run), "said": said}


def pairs_of(number, rows):
    drawn = torch.randn((2, rows, 8), generator=torch.Generator().manual_seed(number))
    return {"image": drawn[0], "text": drawn[1], "mask": torch.ones(rows)}


def splits():
    """Steps that are given tensors which are split over the devices, or not."""
    backend, said = opened()

    def run(backend):
        sums = Sums(backend)
        for number in range(12):
            rows = torch.randn((8, 4), generator=torch.Generator().manual_seed(number))
            [batch] = backend.batches([{"x": rows}])
            batch = {"x": backend.mesh.send(rows)} if number % 3 == 2 else batch
            backend.run(sums.step, [batch], 0.0)
            backend.finish()
        return backend.to_host({"total": sums.total})

    return {**both(backend, run), "said": said}


class Sums:
    def __init__(self, backend):
        self.total = backend.mesh.send(torch.zeros(4))

    def step(self, batches, _):
        self.total += batches[0]["x"].sum(0)


def one_batch_twice():
    """Two micro-batches that are one batch while the step is recorded, and two later."""
    backend, said = opened()

    def run(backend):
        learner = learner_of(Noisy(), backend)
        for number in range(10):
            [one], [other] = (list(backend.batches([batch_of(n)])) for n in (number, number + 50))
            learner.train_step([one, one if number < 5 else other], 0.01)
        return state_of(learner)

    return {**both(backend, run), "said": said}


def evicted():
    """The cache of programs is small: a step's is lost to other graphs."""
    backend, said = opened()

    def run(backend):
        learner = learner_of(Noisy(), backend)
        for number in range(14):
            if number % 4 == 3:
                for size in range(1, 6):
                    backend.to_host({"x": torch.ones(size, device=backend.device) + number})
            step(learner, number)
        return state_of(learner)

    return {**both(backend, run), "said": said}


def memory():
    """Programs compiled after the third step, and bytes of buffers that Python holds at the end."""
    backend, _ = opened()

    def run(backend):
        learner, counts = learner_of(Noisy(), backend), []
        for number in range(20):
            step(learner, number)
            counts.append(backend.compilations())
        gc.collect()
        wait()  # until then a result has no buffer
        tensors = [t for t in living_tensors() if id(t) not in CONSTANTS]
        by_buffer = dict(zip(handles(tensors), tensors, strict=True))
        size = sum(t.numel() * t.element_size() for t in by_buffer.values())
        return counts[-1] - counts[2], size, len(learner.trained)

    from tpukit.hardware.xla.cached_graphs import handles, wait
    from tpukit.hardware.xla.recorder import CONSTANTS, living_tensors

    with traced(backend):
        expected = run(backend)
    return {"traced": expected, "recorded": run(backend)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
