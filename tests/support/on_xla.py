"""Cases on torch_xla's virtual devices, one a process: python on_xla.py CASE. Prints JSON."""

import json
import sys

import torch
import torch.nn.functional as F
from torch import nn

from tpukit.hardware.memory import is_out_of_memory
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend


def opened(**options):
    return open_backend(HardwareOptions(hw="tpu", precision="fp32", **options))


def blocked_attention():
    """Largest relative error of output and gradients against torch's attention, by case."""
    from tpukit.hardware.xla import ops as xla_ops

    backend = opened()
    errors = {}
    cases = [(1, True, None), (5, True, (1, 2, 24, 24)), (5, False, (4, 1, 1, 24)), (5, True, None)]
    for blocks, causal, biased in cases:
        xla_ops.LARGEST_SCORES_BYTES = 4 * 4 * 2 * 24 * 24 // backend.devices // blocks
        name = f"blocks {blocks}, causal {causal}, bias {biased}"
        errors[name] = attention_error(backend, causal, biased)
    return errors


def attention_error(backend, causal, biased):
    torch.manual_seed(0)
    host = [torch.randn(4, 2, 24, 8) for _ in range(3)]
    if biased:
        host.append(torch.randn(biased))
    weights = torch.randn(4, 2, 24, 8)
    sent = [backend.mesh.send(t).requires_grad_() for t in host]
    kept = [t.clone().requires_grad_() for t in host]
    found = backend.attention(*sent, causal=causal)
    (found * backend.mesh.send(weights)).sum().backward()
    mask = kept[3] if biased else torch.zeros(1)
    if causal:
        mask = mask + torch.full((24, 24), float("-inf")).triu(1)
    expected = F.scaled_dot_product_attention(*kept[:3], attn_mask=mask.expand(4, 2, 24, 24))
    (expected * weights).sum().backward()
    pairs = [(found, expected), *((s.grad, k.grad) for s, k in zip(sent, kept, strict=True))]
    return max(
        float((one.detach().cpu() - other.detach()).norm() / other.detach().norm())
        for one, other in pairs
    )


def recompute(how):
    """Runs a block whose input needs no gradient; XLA_FLAGS names the folder for the graph."""
    backend = opened(devices=1)
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.0), nn.Linear(32, 16))
    rows = torch.randn(8, 16)
    block(rows).square().sum()
    model = backend.prepare(block)
    sent = backend.mesh.send(rows)
    with backend.micro_batch(model, first=True, last=True):
        out = backend.recompute(model, sent) if how == "ours" else model(sent)
        loss = out.square().sum()
        backend.backward(loss)
    backend.finish()
    gradients = {n: p.grad for n, p in backend.unwrap(model).named_parameters()}
    return {n: g.sum().item() for n, g in backend.to_host(gradients).items()}


def out_of_memory(kind):
    """Whether a real failure of a limited device is recognised, and its text."""
    if kind == "xla":
        backend = opened(devices=1, memory_limit=2**29)
    else:
        backend = open_backend(HardwareOptions(hw="cpu", memory_limit=2**29))
    small = torch.zeros(2**20, device=backend.device)
    backend.to_host({"small": small + 1})
    try:
        backend.to_host({"large": torch.ones(2**15, 2**15, device=backend.device).cumsum(0)})
    except Exception as error:
        return {"recognised": is_out_of_memory(error), "text": str(error)[:200]}
    return {"recognised": False, "text": "it fitted"}


def generators():
    """Dropout with a seed, with another, and with the first one again."""
    backend, drawn = opened(), []
    for seed in (2**32 - 1, 5, 2**32 - 1):
        backend.load_state({"seed": seed})
        drawn.append(dropout(backend))
    return dict(zip(("first", "second", "again"), drawn, strict=True))


def dropout(backend):
    ones = backend.mesh.send(torch.ones(64))
    kept = F.dropout(ones, 0.5)
    host = backend.to_host({"kept": kept})["kept"]
    backend.finish()
    return host.tolist()


def extremes():
    """Compilations over steps whose rate is 0, then 1, then between."""
    from hardware_run import Net

    from tpukit.hardware.backend import OptimizerSettings, ParameterGroup

    backend = opened(devices=1)
    model = backend.prepare(Net())
    group = ParameterGroup(list(model.parameters()))
    optimizer = backend.optimizer([group], OptimizerSettings())
    counts = []
    for lr in (0.0, 0.0, 1.0, 0.5, 1e-3):
        batch = backend.mesh.send_batch({"x": torch.randn(16, 8)})
        with backend.micro_batch(model, first=True, last=True):
            backend.backward(model(batch["x"]).square().sum())
        weight = torch.ones_like(batch["x"][:, 0]).sum()
        backend.step(optimizer, lr=lr, weight=weight, clip_norm=None)
        backend.finish()
        counts.append(backend.compilations())
    return counts


def optimizers(*names):
    """For each: the largest relative difference from the CPU's weights, compilations a step."""
    backend = opened()
    return {name: compared(backend, MAKERS[name]) for name in names}


def lion(parameters, lr):
    from timm.optim.lion import Lion

    return Lion(parameters, lr, weight_decay=0.01)


def counted_steps():
    """What the default AdamW counts of three weights: in three steps, the last of which does not
    use the third, and of an optimizer that goes on from there. Then whether one tensor has the
    counts of both."""
    from tpukit.hardware.backend import AdamSettings, ParameterGroup
    from tpukit.hardware.xla.optimizer import XlaAdamW

    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    first, second = (
        XlaAdamW([ParameterGroup(weights)], AdamSettings(), torch.zeros_like) for _ in range(2)
    )
    first.count(weights)
    first.count(weights)
    first.count(weights[:2])
    told = [_counts(first, weights)]
    second.load_state_dict(first.state_dict())
    second.count(weights)
    wholes = [{id(o.state[w]["step"]._base) for w in weights} for o in (first, second)]
    return [*told, _counts(second, weights), _counts(first, weights)], [len(w) for w in wholes]


def removed_tensor():
    """What has changed for a recorded step of which a tensor is gone since it ran."""
    from torch.utils.weak import TensorWeakRef

    from tpukit.hardware.xla.programs import RecordedStep

    opened(devices=1)
    return RecordedStep(None, kept=[TensorWeakRef(torch.ones(1))]).change()


def _counts(optimizer, weights):
    return [int(optimizer.state[weight]["step"]) for weight in weights]


def complex_weights():
    """The largest relative difference from the CPU's weights after steps of the default AdamW."""
    from fake_backend import FakeBackend

    found, expected = (_with_complex_weights(b) for b in (opened(devices=2), FakeBackend()))
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


def _with_complex_weights(backend):
    from tpukit.hardware.backend import OptimizerSettings, ParameterGroup

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.complex(torch.eye(4), torch.ones(4, 4)))
    model.bias = nn.Parameter(torch.ones(4))
    model = backend.prepare(model)
    groups = [ParameterGroup([model.weight], 0.1), ParameterGroup([model.bias])]
    optimizer = backend.optimizer(groups, OptimizerSettings(lr=1e-2))
    for step in range(4):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        [batch] = backend.batches([{"x": rows}])
        with backend.micro_batch(model, first=True, last=True):
            product = torch.complex(batch["x"], batch["x"].flip(0)) @ model.weight
            backend.backward((product.real + model.bias - batch["x"].sin()).square().sum())
        weight = torch.ones_like(batch["x"][:, 0]).sum()
        backend.step(optimizer, lr=1e-2, weight=weight, clip_norm=0.5)
        backend.finish()
    return backend.to_host(dict(model.named_parameters()))


def late_weights():
    """The same of weights the second of which is frozen, or not used, in the first steps."""
    from fake_backend import FakeBackend

    errors = {}
    for name in ("adamw", "adafactor"):
        for frozen in (True, False):
            backends = opened(devices=2), FakeBackend()
            found, expected = (_with_a_late_bias(b, name, frozen) for b in backends)
            differences = [(found[n] - expected[n]).norm() / expected[n].norm() for n in expected]
            errors[f"{name}, frozen {frozen}"] = float(max(differences))
    return errors


def _with_a_late_bias(backend, name, frozen):
    from tpukit.hardware.backend import OptimizerSettings, ParameterGroup

    torch.manual_seed(0)
    model = backend.prepare(nn.Linear(4, 4))
    groups = [ParameterGroup([model.weight, model.bias], 0.1)]
    optimizer = backend.optimizer(groups, OptimizerSettings(name=name, lr=1e-2))
    for step in range(6):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        [batch] = backend.batches([{"x": rows}])
        model.bias.requires_grad_(step >= 3 or not frozen)
        bias = model.bias if frozen or step >= 3 else None
        with backend.micro_batch(model, first=True, last=True):
            found = F.linear(batch["x"], model.weight, bias)
            backend.backward((found - batch["x"].sin() - 1).square().sum())
        weight = torch.ones_like(batch["x"][:, 0]).sum()
        backend.step(optimizer, lr=1e-2, weight=weight, clip_norm=0.5)
        backend.finish()
    return backend.to_host(dict(model.named_parameters()))


class Reading(torch.optim.SGD):
    """Reads a value of the device in its step."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and float(parameter.grad.norm()) < 0:
                raise ArithmeticError
        return super().step()


MAKERS = {
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.01),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
    "SGD": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda p, lr: torch.optim.Adafactor(p, lr, weight_decay=0.01),
    "Lion": lion,
    "reading": Reading,
}


def compared(backend, make):
    from fake_backend import FakeBackend

    from tpukit.errors import UsageError

    expected, _ = optimized(FakeBackend(), make)
    try:
        found, counts = optimized(backend, make)
    except UsageError as error:
        return {"refused": error.message}
    difference = max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)
    return {"difference": difference, "compiled": [c - counts[0] for c in counts]}


def optimized(backend, make):
    """Weights after eight steps of changing rates, and compilations up to each."""
    from hardware_run import Net

    from tpukit.hardware.backend import OptimizerSettings

    torch.manual_seed(0)
    model, counts = backend.prepare(Net()), []
    trained = list(backend.unwrap(model).parameters())
    optimizer = backend.optimizer([], OptimizerSettings(lr=1e-3), make(trained, 1e-3))
    for step, lr in enumerate((5e-4, 1e-3, 1.0e-3, 7e-4, 5e-4, 3e-4, 2e-4, 1e-4)):
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        [batch] = backend.batches([{"x": rows, "y": rows.sin()}])
        with backend.micro_batch(model, first=True, last=True):
            backend.backward((model(batch["x"]) - batch["y"]).square().sum())
        weight = torch.ones_like(batch["x"][:, 0]).sum()
        backend.step(optimizer, lr=lr, weight=weight, clip_norm=0.5)
        backend.finish()
        counts.append(backend.compilations())
    return backend.to_host(dict(backend.unwrap(model).named_parameters())), counts


def split_reads():
    """Reads of split tensors, lazy and computed, beside the CPU's numbers; what they compiled."""
    backend = opened()
    # Whole numbers below 2**24, so that every order of a sum gives the same result.
    rows, weight = torch.arange(16 * 24.0).reshape(16, 24), torch.arange(24.0 * 40)
    weight = weight.mul(367).remainder(961).reshape(24, 40)
    sent = backend.mesh.send(weight, (None, "data"))
    differences, counts = [], []
    for step in range(4):
        [batch] = backend.batches([{"x": rows + step}])
        found = {"split": batch["x"] @ sent, "halves": batch["x"].view(8, 2, 24)[:, 1:, 5:]}
        found["best"] = found["split"].argmax(-1)
        if step % 2:
            backend.finish()
        host = backend.to_host({**found, "weight": sent})
        product = (rows + step) @ weight
        expected = {"split": product, "halves": (rows + step).view(8, 2, 24)[:, 1:, 5:],
                    "best": product.argmax(-1), "weight": weight}  # fmt: skip
        differences.append(max(float((host[n] - t).abs().max()) for n, t in expected.items()))
        counts.append(backend.compilations())
    return {"differences": differences, "counts": counts, **gathers()}


def gathers():
    """Programs that torch_xla compiled, without its cache, to read a split tensor."""
    import torch_xla.debug.metrics as met

    compiled = met.metric_data("CompileTime") or [0]
    return {"gathers": compiled[0] - (met.counter_value("UncachedCompile") or 0)}


def metered():
    """Used and limit of a device whose memory torch_xla does not report, as under SPMD on a TPU."""
    from tpukit.hardware.memory import Memory, SampledMemory
    from tpukit.hardware.xla import backend as of_xla

    backend = opened()
    of_xla.is_emulated = lambda environment: False
    # Without a TPU libtpu's own metrics may wait for one.
    of_xla.duty_cycle_percent = lambda: None
    backend._sampled = SampledMemory(lambda: Memory(5, 5, 9), 0.01)
    memory = backend.usage().memory
    return memory and [memory.used, memory.limit]


def command(*arguments):
    """One command line in this process."""
    from tpukit import cli

    return {"code": cli.run(list(arguments)), **gathers()}


def second_derivatives():
    """Compilations up to each step of a loss with second derivatives of its input."""
    from tiny_task import Tiny

    from tpukit.train.config import TrainConfig
    from tpukit.train.loader import example_batches
    from tpukit.train.run_state import load_learner
    from tpukit.train.task import PlanSettings

    class Curved(Tiny):
        """u'' = -sin(x) by derivatives of the network, as a physics-informed task has them."""

        def loss(self, model, batch):
            with torch.enable_grad():
                x = batch["x"].detach().requires_grad_()
                [du] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                [ddu] = torch.autograd.grad(du.sum(), x, create_graph=True)
            return {"loss": (ddu + x.sin()).square().mean(1)}

    backend, task = opened(devices=1), Curved()
    learner, counts = load_learner(task, TrainConfig(), backend), []
    before = backend.compilations()
    settings = PlanSettings(16, 16, 1, seed=0, compiles=True)
    for batch in backend.batches(example_batches(task, settings) * 5):
        learner.train_step([batch], 0.1)
        counts.append(backend.compilations() - before)
    return counts


def dropout_beside_reads():
    """A weight after four steps with dropout: undisturbed, and with metrics read between two."""
    return [_dropped_out(disturbed) for disturbed in (False, True)]


def _dropped_out(disturbed):
    from tiny_task import Tiny

    from tpukit.train.config import TrainConfig
    from tpukit.train.run_state import load_learner
    from tpukit.train.task import PlanSettings

    backend, task = opened(devices=1), Tiny(dropout=0.3)
    learner = load_learner(task, TrainConfig(), backend)
    [host] = task.probe_batches(PlanSettings(16, 16, 1, 0))
    host["x"] += 1
    for step, batch in enumerate(backend.batches([host] * 4)):
        learner.train_step([batch], 0.1)
        if disturbed and step == 1:
            learner.read_metrics()
            backend.load_state(backend.state())
    return backend.to_host(learner.model_tensors())["0.weight"].flatten().tolist()


def repeated_passes():
    """Compilations over five passes with the same weights."""
    backend = open_backend(HardwareOptions(hw="tpu", precision="bf16", devices=1))
    model, counts = backend.prepare(nn.Linear(8, 8)), []
    x = backend.mesh.send(torch.randn(4, 8))
    with torch.no_grad(), backend.autocast():
        for _ in range(5):
            with backend.autocast():
                y = model(x)
            x = x + 0.5 * y.float()
            backend.finish()
            counts.append(backend.compilations())
    return counts


def under_an_autocast():
    """The type of a product in fp32 where bf16 is on around it."""
    backend = opened(devices=1)
    x = backend.mesh.send(torch.ones(2, 2))
    with torch.autocast("xla", torch.bfloat16), backend.autocast():
        return str((x @ x).dtype)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
