"""Cases on torch_tpu over the CPU plugin, one a process: python on_torch_tpu.py CASE."""

import copy
import json
import sys
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from no_dropout import without_dropout
from runs import joint_difference, relative_difference

from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend

STEPS = 20


def opened(precision="fp32", **options):
    return open_backend(HardwareOptions(hw="tpu", precision=precision, **options))


def generators():
    """Dropout after a seed, once more, and after that seed again."""
    backend = opened()
    backend.load_state({"seed": 2**62 + 5})
    first, second = dropout(backend), dropout(backend)
    backend.load_state({"seed": 2**62 + 5})
    return {"first": first, "second": second, "again": dropout(backend)}


def dropout(backend):
    return F.dropout(torch.ones(64, device=backend.device), 0.5).tolist()


def precision():
    """Largest relative error of a matrix product in fp32, and the type of one under autocast."""
    backend = opened()
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 64, 64, generator=generator)
    product = left.to(backend.device) @ right.to(backend.device)
    exact = left.double() @ right.double()
    with backend.autocast("bf16"):
        lower = left.to(backend.device) @ right.to(backend.device)
    return {
        "error": float((product.cpu() - exact).abs().max() / exact.abs().max()),
        "setting": torch.get_float32_matmul_precision(),
        "autocast": str(lower.dtype),
    }


def strided_batches():
    """A batch of views with other strides, through a compiled model and its backward pass."""
    backend = opened()
    model = backend.prepare(torch.nn.Linear(8, 4))
    host = torch.arange(64.0).view(8, 8)
    for batch in backend.batches([{"x": host.t()}, {"x": host.t()}]):
        loss = model(batch["x"]).square().sum()
        backend.backward(loss)
    return {"gradient": [p.grad.abs().sum().item() for p in model.parameters()]}


def batch_norm():
    """Running statistics after three steps in bf16, compiled, and those of the CPU in fp32."""
    backend = opened("bf16")
    torch.manual_seed(0)
    cpu = torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 3))
    tpu = backend.prepare(copy.deepcopy(cpu))
    for _ in range(3):
        images = torch.randn(8, 4, 9, 9) + 1
        cpu(images)
        with backend.autocast():
            outputs = tpu(images.to(backend.device))
        backend.backward(outputs.float().sum())
    return {
        place: [*norm.running_mean.tolist(), *norm.running_var.tolist()]
        for place, norm in (("cpu", cpu[0]), ("tpu", backend.unwrap(tpu)[0]))
    }


def cross_entropy():
    """Largest relative differences of losses and derivatives from the CPU's, by options."""
    device = opened().device
    torch.manual_seed(0)
    found = {}
    for shape in ((6, 5), (2, 5, 3), (5,)):
        scores, weight = torch.randn(shape), torch.rand(5)
        target = torch.randint(5, (*shape[:-1],) if len(shape) < 3 else (2, 3))
        if target.ndim:
            target[0] = -100
        for options in (
            {}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.2},
            {"weight": weight}, {"weight": weight, "label_smoothing": 0.1},
        ):  # fmt: skip
            results = []
            for place in (torch.device("cpu"), device):
                moved = {n: v.to(place) if isinstance(v, torch.Tensor) else v
                         for n, v in options.items()}  # fmt: skip
                given = scores.to(place).requires_grad_()
                loss = F.cross_entropy(given, target.to(place), **moved)
                [gradient] = torch.autograd.grad(loss.square().sum(), given, create_graph=True)
                [second] = torch.autograd.grad(gradient.square().sum(), given)
                results.append([t.detach().cpu() for t in (loss, gradient, second)])
            pairs = zip(*results, strict=True)
            key = f"{shape} {[*options]}"
            found[key] = [float((a - b).abs().max() / a.abs().max()) for a, b in pairs]
    return found


def zoo(name):
    """Differences from the CPU's state after 20 steps of a model of the zoo, by way to run them."""
    from zoo_models import Zoo, entries
    from zoo_stages import ROWS

    from tpukit.train.config import TrainConfig
    from tpukit.train.learner import build_learner

    task, config = Zoo(entries()[name]), TrainConfig(ema_decay=0.9)
    torch.manual_seed(0)
    model = task.build_model(opened())

    launched = {}

    def trained(backend, accumulate=1):
        learner = build_learner(task, backend, copy.deepcopy(model), config)
        with without_dropout(learner.model):
            for step in range(STEPS):
                seeds = range(step * accumulate, (step + 1) * accumulate)
                host = [batch for seed in seeds for batch in task.seeded_batches(ROWS, seed)]
                sent = list(backend.batches(host))
                with counted(backend) as launches:
                    learner.train_step(sent, 1e-3)
                launched[accumulate] = launches
        return state(learner)

    cpu = open_backend(HardwareOptions(hw="cpu", precision="fp32", compile=False))
    once, twice = trained(cpu), trained(cpu, accumulate=2)
    return {
        "differences": {
            "eager": differences(trained(opened(compile=False)), once),
            "compiled": differences(trained(opened(compile=True)), once),
            "accumulated": differences(trained(opened(compile=True), accumulate=2), twice),
        },
        "launched": list(launched.values()),
    }


def state(learner):
    """What a training changes, by kind and name, on the host."""
    metrics = learner.read_metrics()
    module = learner.backend.unwrap(learner.model)
    found = {
        "parameters": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
        "ema": learner.ema.weights,
    }
    host = {kind: learner.backend.to_host(tensors) for kind, tensors in found.items()}
    return {"loss": {"loss": torch.tensor(metrics.means["loss"])}, **host}


def differences(left, right):
    """By kind, the distance of all its tensors together, relative to `right`."""

    def distance(kind):
        pairs = [(left[kind][n].double(), t.double()) for n, t in right[kind].items()]
        size = sum(float(t.square().sum()) for _, t in pairs) ** 0.5
        return sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5 / size if size else 0.0

    return {kind: distance(kind) for kind in right}


@contextmanager
def counted(backend):
    """What a step runs: whole programs, and operations and compiled parts by themselves."""
    programs = getattr(backend.eager, "_programs", None)
    if programs is None:
        yield {}
        return
    launches = {}
    before = programs.executed, torch.tpu._get_cache_requests()
    yield launches
    now = programs.executed, torch.tpu._get_cache_requests()
    launches.update(programs=now[0] - before[0], others=now[1] - before[1])


class Dropping:
    """A step whose recomputed part drops entries: their gradients show which were dropped."""

    def __init__(self, backend):
        self.backend = backend
        self.weight = torch.nn.Parameter(torch.ones(64, 64).to(backend.device))
        self.outputs = torch.zeros(64, 64, device=backend.device)

    def step(self, batches, _):
        def part(x):
            return F.dropout(x * self.weight, 0.5) * F.dropout(x, 0.5)

        x = batches[0]["x"].clone().requires_grad_()
        outputs = self.backend.recompute(part, x)
        outputs.sum().backward()
        self.outputs.copy_(outputs.detach())
        gradient, self.weight.grad = self.weight.grad, None
        return gradient


def recomputed_dropout():
    """Entries kept by the pass and by the gradient, over three steps, and programs run."""
    backend = opened(compile=True)
    backend.load_state({"seed": 3})
    owner, found = Dropping(backend), []
    batch = next(iter(backend.batches([{"x": torch.ones(64, 64)}])))
    for _ in range(3):
        gradient = backend.run(owner.step, [batch], 0.0).cpu()
        found.append([torch.equal(gradient, owner.outputs.cpu()), int((gradient > 0).sum())])
    return {"steps": found, "programs": backend.eager._programs.executed}


def own_python():
    """By task of `python_in_steps`: the difference from the CPU's weights after eight steps, and
    how many of them were one program."""
    from python_in_steps import TASKS, trained

    cpu, tpu = opened_cpu(), opened(compile=True)
    found = {}
    for cls in TASKS:
        before = tpu.eager._programs.executed
        ours, expected = (trained(cls, backend) for backend in (tpu, cpu))
        difference = relative_difference(ours, expected)
        found[cls.__name__] = difference, tpu.eager._programs.executed - before
    return found


def tasks(name, ranks=""):
    """What the last of six steps of a task runs and the last of three validation batches, how far
    weights and means are from the CPU's, and sums over ranks in a step's program; ranks: `alone`,
    DDP in a process group of one, compared with a run without one."""
    from tpukit.tasks.eit.task import EITTask
    from tpukit.tasks.images.task import ImagesTask
    from tpukit.tasks.llm.task import SummarizeTask
    from tpukit.train.config import TrainConfig
    from tpukit.train.learner import BatchSums, build_learner
    from tpukit.train.task import PlanSettings, for_probing

    gpt = {"model": "2x2x32", "block_size": 64, "init": "scratch", "tokenizer": "gpt2"}
    task = {
        "eit": lambda: EITTask(size="tiny"),
        "llm": lambda: SummarizeTask(**gpt),
        "images": lambda: ImagesTask(model="test_convnext", image_size=32),
        "batch norm": lambda: ImagesTask(model="test_resnet", image_size=96),
    }[name]()
    task = for_probing(task)
    batch = task.probe_batches(PlanSettings(4, 4, 1, 0))[0]
    torch.set_num_threads(1)
    launches, validation, means, sums_over_ranks = {}, {}, [], []
    backend = opened(compile=True)
    if ranks:
        from hardware_run import join_alone

        join_alone(backend, shard=False)

    def trained(backend):
        config = TrainConfig(ema_decay=0.9, optimizer="sgd")
        torch.manual_seed(0)
        learner = build_learner(task, backend, task.build_model(backend), config)
        with without_dropout(learner.model):
            for step in range(6):
                sent = list(backend.batches([batch]))
                with counted(backend) as found:
                    learner.train_step(sent, 1e-3 * (step + 1))
            sums = BatchSums(task, backend, learner.model.eval())
            for _ in range(3):
                [sent] = backend.batches([batch])
                with counted(backend) as evaluated:
                    sums.add(sent)
        means.append(sums.read())
        if backend.device.type == "tpu":
            [program] = backend.eager._programs._known[learner].values()
            sums_over_ranks.append(program.recording.text.count("stablehlo.all_reduce"))
        launches.update(found)
        validation.update(evaluated)
        return backend.to_host(learner.model_tensors())

    left, right = trained(backend), trained(opened(compile=True) if ranks else opened_cpu())
    return {
        **launches, "difference": relative_difference(left, right),
        "joint_difference": joint_difference(left, right), "validation": validation, "means": means,
        "sums": sums_over_ranks[0],
        "gradients": sum(p.requires_grad for p in task.build_model(backend).parameters()),
    }  # fmt: skip


def generation(beams):
    """Of 64 prompts: how many have the CPU's tokens, what was recorded, compilations after an
    eighth of them and after all, and what these run."""
    import numpy as np

    from tpukit.hardware.eager.programs import RecordedPrograms
    from tpukit.tasks.llm.generation.beam import BeamGenerator
    from tpukit.tasks.llm.generation.continuous_batching import StreamingGenerator
    from tpukit.tasks.llm.generation.decoding import Decoding, Prompt, plan_generation
    from tpukit.tasks.llm.model.lean import LanguageModel
    from tpukit.tasks.llm.model.load import from_scratch, load_lm

    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.repeat([5, 9, 17, 30], 16))
    prompts = [Prompt(n, rng.integers(8, 60, length)) for n, length in enumerate(lengths)]
    decoding, recorded, own = Decoding(12, num_beams=int(beams)), [], RecordedPrograms.recorded
    RecordedPrograms.recorded = lambda *given: recorded.append(given[1].name) or own(*given)

    def generated(backend):
        torch.manual_seed(3)
        lm = load_lm(from_scratch("2x2x32", 60, 64), torch.float32)
        model = LanguageModel(lm, backend)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.5)
        model = backend.unwrap(backend.prepare(model.eval(), train=False))
        plan = plan_generation(prompts, 8, 1, 1, decoding.num_beams)
        kind = BeamGenerator if decoding.num_beams > 1 else StreamingGenerator
        generator = kind(model, backend, plan, decoding, 64, 60, {7})
        tokens, counts = {}, []
        for chunk in (plan.chunks[0][::8], *plan.chunks):
            with counted(backend) as launched:
                tokens |= generator.run(chunk)
            counts.append(backend.compilations())
        return tokens, counts, launched

    tokens, counts, launched = generated(opened(compile=True))
    expected, *_ = generated(opened_cpu())
    same = sum(tokens[n] == expected[n] for n in expected)
    return {"same": same, "recorded": recorded, "counts": counts, **launched}


class Attending:
    """A step whose attention has a bias with a gradient."""

    def __init__(self, attention):
        self.attention = attention

    def step(self, batches, _):
        *given, bias, way = [t.clone().requires_grad_() for t in batches[0].values()]
        output = self.attention(*given, bias)
        loss = (output * way.detach()).sum()
        return output.detach(), *torch.autograd.grad(loss, [*given, bias])


def kernels():
    """Relative differences from plain attention, output and gradients, of the kernels in a program:
    in fp32 with a bias, and of torch's own causal attention under autocast; and what ran."""
    from tpukit.hardware.kernels.flash_attention import plain_attention

    backend = opened(compile=True)
    own, calls = backend.attention, []
    backend.attention = lambda *tensors, **how: calls.append(how) or own(*tensors, **how)
    torch.manual_seed(0)
    batch = {name: torch.randn(2, 2, 128, 32) for name in ("query", "key", "value")}
    batch |= {"bias": torch.randn(1, 2, 128, 128), "way": torch.randn(2, 2, 128, 32)}
    # The tests' hook turns it off; a user turns it off where second derivatives are wanted.
    torch.backends.cuda.enable_flash_sdp(True)

    def torchs(*heads_and_bias):
        *heads, bias = heads_and_bias
        with backend.autocast("bf16"):
            return F.scaled_dot_product_attention(*heads, is_causal=True).float() + bias.mean()

    def plain(*heads_and_bias):
        *heads, bias = heads_and_bias
        return plain_attention(*heads, causal=True) + bias.mean()

    found = {"fused": backend.fused, "differences": []}
    sent = list(backend.batches([batch]))
    for attention, expected in ((backend.attention, plain_attention), (torchs, plain)):
        owner = Attending(attention)
        for _ in range(2):
            with counted(backend) as launches:
                ours = backend.run(owner.step, sent, 0.0)
        pairs = zip(ours, Attending(expected).step([batch], 0.0), strict=True)
        found["differences"].append(max(float((a.cpu() - b).norm() / b.norm()) for a, b in pairs))
    return {**found, **launches, "calls": calls}


def opened_cpu():
    return open_backend(HardwareOptions(hw="cpu", precision="fp32", compile=False))


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
