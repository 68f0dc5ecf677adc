"""Predictions for a GPU that is not here, against sums by hand and torch's own figures."""

import functools
import inspect
import re
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import runs
import tiny_task
import torch
from tiny_task import Tiny
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tpukit.errors import ConfigError, JobError
from tpukit.hardware.optimizers import MasterAdamW
from tpukit.probe.batch.model_task import ModelTask
from tpukit.probe.batch.recommend import Recommender
from tpukit.probe.batch.search import SearchSettings
from tpukit.probe.gpu_memory.recorder import embedding_workspace
from tpukit.probe.gpu_memory.traced_trial import TracedTrials
from tpukit.probe.targets import find_any, find_gpu
from tpukit.probe.trial import TaskSource, TrialRequest, TrialSetup
from tpukit.probe.trials.worker import TrialRunner
from tpukit.train.config import TrainConfig
from tpukit.train.task import Task

WIDTH, LAYERS = 1024, 6


class Deep(nn.Module):
    """Linear layers and ReLUs, whose memory can be added up by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
        )

    def forward(self, x):
        return self.layers(x)


class Decaying(Deep):
    """Its constructor reads a value, as timm's models read the rates of dropped paths."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0.0, 0.1, LAYERS)[-1].item()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 64)).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Linear(nn.Module):
    """A layer, and then something that has no form without values."""

    def __init__(self, then) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(8, 8), then

    def forward(self, x):
        return self.then(self.layer(x), x)


def trial(model, inputs, target="t4", rows=8, **settings):
    task = ModelTask(model, [inputs], {})
    config = TrainConfig(ema_decay=0.0, **settings)
    return TracedTrials(task, config, find_gpu(target)).run(TrialRequest(rows))


def test_the_parts_of_a_step_are_those_by_hand():
    rows = 4096
    found = trial(Deep(), f"x={WIDTH}", rows=rows, precision="fp32")
    weights = 4 * LAYERS * WIDTH**2
    # Two moments and a step's number for each weight matrix; each ReLU keeps its result, which is
    # the next layer's input. At the peak the backward pass has begun.
    assert found.memory["parameters"] == weights
    assert found.memory["optimizer"] == pytest.approx(2 * weights, abs=1024)
    one = 4 * rows * WIDTH
    assert found.memory["batch"] == pytest.approx(3 * one, rel=0.01)
    activations = found.memory["activations"] + found.memory["temporaries"]
    # The gradients of one layer, and no copy of the host's batch.
    assert LAYERS * one <= activations <= (LAYERS + 1.5) * one
    assert found.flops == pytest.approx(2 * rows * WIDTH**2 * (3 * LAYERS - 1), rel=1e-3)
    assert found.used_bytes == sum(found.memory.values())


def test_a_constructor_may_read_values():
    plain, reads = (trial(model, f"x={WIDTH}") for model in (Deep, Decaying))
    assert reads.memory == plain.memory
    assert reads.used_range == plain.used_range


@pytest.mark.parametrize(("optimizer", "steps_by_lists"), [("adafactor", 0), ("rmsprop", 1)])
def test_adafactor_updates_one_weight_at_a_time(optimizer, steps_by_lists):
    found = trial(Deep(), f"x={WIDTH}", rows=8, precision="fp32", optimizer=optimizer)
    one = 4 * WIDTH**2
    assert found.memory["gradients"] == LAYERS * one
    # What an update takes: of all weights, or of one.
    updates = found.memory["temporaries"]
    assert one <= updates
    assert (updates >= LAYERS * one) == steps_by_lists


def test_half_precision_keeps_half_and_a_copy_of_each_weight():
    found = trial(Deep(), f"x={WIDTH}", rows=4096)
    # That of the last layer has done its work when memory is fullest.
    assert found.memory["casts"] >= 2 * (LAYERS - 1) * WIDTH**2
    one = 2 * 4096 * WIDTH
    assert found.memory["activations"] + found.memory["temporaries"] <= (LAYERS + 6) * one


class Halved(ModelTask):
    """Weights in bf16 with master copies."""

    def build_model(self, ops):
        return super().build_model(ops).bfloat16()

    def build_optimizer(self, groups, settings):
        return MasterAdamW(groups, settings.lr)


def test_master_copies_take_16_bytes_a_weight_and_a_gradient_of_fp32_at_a_time():
    task = Halved(Deep(), [f"x={WIDTH}"], {})
    trials = TracedTrials(task, TrainConfig(), find_gpu("l4"))
    memory, one = trials.run(TrialRequest(1)).memory, WIDTH**2
    held = sum(memory[k] for k in ("parameters", "optimizer", "gradients", "temporaries"))
    assert held == pytest.approx((16 * LAYERS + 4) * one, rel=0.01)


@pytest.mark.parametrize(
    ("target", "precision", "length", "quadratic"),
    [("t4", "fp16", 2048, False), ("l4", "bf16", 2048, False), ("t4", "bf16", 2048, True)],
)
def test_attention_keeps_what_the_kernel_of_the_gpu_keeps(target, precision, length, quadratic):
    rows = 16
    found = trial(Attends(), f"x={length}x64", target, rows, precision=precision)
    # A bf16 kernel starts at compute capability 8.0; without one the probabilities are kept.
    scores = 2 * rows * length**2
    held = found.memory["activations"] + found.memory["temporaries"]
    assert (held > scores) == quadratic


class Biased(nn.Module):
    """Attention with a learned bias, whose keys lie side by side or not."""

    def __init__(self, *, spread=False, learned=True) -> None:
        super().__init__()
        self.qkv, self.spread = nn.Linear(64, 192), spread
        self.bias = nn.Parameter(torch.zeros(512, 512), requires_grad=learned)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 64)).transpose(1, 3).unbind(2)
        bias = self.bias.T if self.spread else self.bias
        return nn.functional.scaled_dot_product_attention(q, k, v, bias.to(q.dtype))


def held_by(rows, **form):
    """Bytes of activations and temporaries on an L4, whose kernels take bf16."""
    found = trial(functools.partial(Biased, **form), "x=512x64", "l4", rows, precision="bf16")
    return found.memory["activations"] + found.memory["temporaries"]


def test_the_gradient_of_a_bias_is_made_for_each_row():
    """The kernel writes it before it is summed; without, the peak may lie elsewhere."""
    one = 2 * 64 * 512**2
    more = held_by(64) - held_by(64, learned=False)
    assert 0.5 * one < more < 1.5 * one


@pytest.mark.parametrize(("spread", "scores"), [(True, 7), (False, 1)])
def test_a_bias_whose_keys_are_apart_costs_the_probabilities(spread, scores):
    """Plain attention in fp32 holds them, a copy and a mask; a kernel one bias' gradients."""
    rows = 64
    one = 2 * rows * 512**2
    inputs = 2 * rows * 512 * 192
    assert scores * one <= held_by(rows, spread=spread) <= (scores + 2) * one + 4 * inputs


def test_sizes_between_traced_batches_are_those_of_a_trace():
    task, config = Tiny(), TrainConfig()
    trials = TracedTrials(task, config, find_gpu("t4"))
    for rows in (64, 4096):
        trials.run(TrialRequest(rows))
    between = trials.run(TrialRequest(1000))
    assert len(trials._steps) == 2
    alone = TracedTrials(task, config, find_gpu("t4")).run(TrialRequest(1000))
    assert between.allocated_bytes == alone.allocated_bytes
    assert between.memory == alone.memory


class InParts(nn.Module):
    """Makes the losses of its places (eight a row) in parts, whose number grows with the batch, and
    computes them again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4096)

    def forward(self, x):
        count = min(-(-len(x) // 64), 4)
        parts = x.flatten(0, 1).chunk(2 * count if count > 1 else 1)
        return torch.stack([checkpoint(self.losses, p, use_reentrant=False).sum() for p in parts])

    def losses(self, x):
        return self.head(x).relu().logsumexp(-1)


@dataclass
class InThisProcess:
    """Evaluates trials here."""

    trials: TracedTrials
    devices = 1
    versions: ClassVar = {}
    on_cpu = by_speed = False

    @property
    def target(self):
        return self.trials.target

    def evaluate(self, request):
        return self.trials.run(request)


def test_a_search_agrees_with_traces_where_operators_differ_by_batch():
    task = ModelTask(InParts(), ["x=8x64"], {})
    config = TrainConfig(ema_decay=0.0, precision="fp32")
    small = replace(find_gpu("t4"), memory_bytes=90 * 2**20, context_bytes=(0, 0))
    trials = TracedTrials(task, config, small)
    found = Recommender(InThisProcess(trials), SearchSettings(), lambda line: None).recommend()
    assert found.exact
    assert len(trials._steps) <= 7
    for batch in (found.largest // 3, found.largest, found.smallest_failed):
        alone = TracedTrials(task, config, small).run(TrialRequest(batch))
        assert alone.fits == (batch <= found.largest)
        assert alone.used_bytes == trials.run(TrialRequest(batch)).used_bytes


class Given(ModelTask):
    """With an optimizer of the user's."""

    def build_optimizer(self, groups, settings):
        return torch.optim.NAdam(groups)


def test_an_optimizer_may_read_its_state():
    task = Given(Deep(), [f"x={WIDTH}"], {})
    found = TracedTrials(task, TrainConfig(), find_gpu("t4")).run(TrialRequest(8))
    assert found.memory["optimizer"] == pytest.approx(8 * LAYERS * WIDTH**2, rel=0.01)


def test_several_gpus_hold_buckets_of_gradients_and_nccl():
    one, two = (trial(Deep(), f"x={WIDTH}", target) for target in ("t4", "2xt4"))
    assert two.memory["buckets"] == 4 * LAYERS * WIDTH**2 == two.collective_bytes
    assert (one.memory["buckets"], one.memory["nccl"]) == (0, 0)
    assert two.memory["nccl"] > 0


def test_what_was_there_before_the_first_step_is_no_part_of_one():
    task = ModelTask(Deep(), [f"x={WIDTH}"], {})
    found = TracedTrials(task, TrainConfig(), find_gpu("2xt4")).run(TrialRequest(8))
    assert found.used_bytes == sum(found.memory.values())
    assert found.memory["ema"] == 0


def test_sharded_weights_are_gathered_a_block_at_a_time():
    whole, shard = (
        trial(Deep(), f"x={WIDTH}", "4xt4", 64, precision="fp32", shard=shard)
        for shard in (False, True)
    )
    weights = 4 * LAYERS * WIDTH**2
    for kind in ("parameters", "optimizer"):
        assert shard.memory[kind] == pytest.approx(whole.memory[kind] / 4, rel=0.01)
    # Gathered in one piece, and copied from it into the weights' own storages.
    assert shard.memory["gathered"] == 2 * weights
    assert shard.memory["buckets"] == 0
    assert shard.parameters == whole.parameters
    # Gathered twice and scattered once, where an all-reduce does both once.
    assert shard.collective_bytes == 1.5 * weights


def test_sharded_weights_are_gathered_in_half_precision_and_not_copied():
    exact, half = (
        trial(Deep(), f"x={WIDTH}", "4xl4", 64, precision=precision, shard=True)
        for precision in ("fp32", "bf16")
    )
    weights = 4 * LAYERS * WIDTH**2
    # Two pieces in half precision, and gradients in fp32 that are scattered.
    assert half.memory["gathered"] == 1.5 * weights
    assert half.memory["casts"] == 0
    assert half.memory["activations"] < 0.1 * weights
    assert half.memory["optimizer"] == exact.memory["optimizer"]
    assert half.collective_bytes == weights


@torch.library.custom_op("tpukit_tests::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("tpukit_tests::known", mutates_args=())
def known(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


known.register_fake(torch.empty_like)
known.register_autograd(lambda _, gradient: unknown(gradient))
DEFINED = torch.library.Library("tpukit_tests", "FRAGMENT")
DEFINED.define("defined(Tensor x) -> Tensor")
DEFINED.impl("defined", torch.clone, "CPU")


class InNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.tanh(x.numpy()))


def without_a_driver(y, _):
    # The text of Triton where there is no GPU.
    raise RuntimeError("0 active drivers ([]). There should only be one.")


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (lambda y, _: unknown(y), "tpukit_tests::unknown"),
        (lambda y, _: known(y), "tpukit_tests::unknown"),
        (lambda y, _: torch.ops.tpukit_tests.defined(y), "tpukit_tests.defined.default"),
        (lambda y, _: torch.ops.tpukit_tests.missing(y), "no attribute 'missing'"),
        (lambda y, x: y[x[:, 0].nonzero()[:, 0]], "aten.nonzero.default"),
        (lambda y, x: y[x > 0], "aten.nonzero.default"),
        (lambda y, x: y * x.unique().sum(), "aten._unique2.default"),
        (lambda y, x: y * x.mean().item(), "aten._local_scalar_dense.default"),
        (lambda y, _: y if y.sum() > 0 else -y, "aten._local_scalar_dense.default"),
        (lambda y, _: print(f"{y.mean():.3f}") or y, "Tensor.__format__()"),
        (lambda y, _: InNumpy.apply(y), "Tensor.numpy()"),
        (lambda y, _: y.to_sparse().sum(), "aten._to_sparse.default"),
        (without_a_driver, "a Triton kernel"),
        (lambda y, _: nn.BCELoss()(y.sigmoid(), y.sigmoid()), "unsafe to autocast"),
        (lambda y, _: flex_attention(*[y[None, None]] * 3), "flex_attention"),
        (lambda y, _: y + torch.zeros(8, device="cuda"), "device=x.device"),
    ],
)
def test_what_needs_values_ends_with_the_operator_and_the_line(then, said):
    setup = TrialSetup(TaskSource("", {}), TrainConfig(), "t4")
    runner = TrialRunner(setup)
    runner._forms = [ModelTask(Linear(then), ["x=8"], {})]
    error = runner.result(TrialRequest(8))["error"]
    assert said in error["message"] + error["hint"]
    assert re.search(r"test_traced_trial.py:\d+", error["message"])
    assert len(error["message"].splitlines()) == 1


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return self.values[x]


def test_a_gradient_that_adds_up_at_indices_is_sorted():
    rows = 2**18
    assert trial(Picks(), "x=scalar:int64<16", rows=rows).memory["workspaces"] == 48 * rows


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, x):
        return self.table(x)


@pytest.mark.parametrize(("rows", "taken"), [(3072, 0), (2**18, 48 * 2**18 + 16 * (26214 + 16))])
def test_an_embeddings_gradient_is_added_up_in_parts(rows, taken):
    found = trial(Embeds(), "x=scalar:int64<16", rows=rows).memory
    assert found["workspaces"] == taken


def test_what_a_larger_table_adds_is_what_was_measured():
    """Liger-Kernel's measurements of torch's embedding on an A100 (all_benchmark_data.csv, 0.2.1):
    16,384 indices, width 768, in MiB by rows. Four tables lie there: torch's, Liger's, and two
    gradients of torch's; what the process held before is in each figure."""
    measured = {1024: 12356.537, 4096: 12401.406, 16384: 12581.688, 131072: 13925.688}
    mib = {
        rows: (4 * 4 * 768 * rows + embedding_workspace(16384, rows, 768)) / 2**20
        for rows in measured
    }
    for rows, found in measured.items():
        assert mib[rows] - mib[1024] == pytest.approx(found - measured[1024], rel=0.005)


class Table(nn.Module):
    """Rows of a table whose gradient is sparse, looked up by a function of torch."""

    def __init__(self, look_up) -> None:
        super().__init__()
        self.rows, self.look_up = nn.Parameter(torch.zeros(8, 8)), look_up

    def forward(self, x):
        return self.look_up((x > 0).long(), self.rows, sparse=True)


@pytest.mark.parametrize("look_up", [nn.functional.embedding, nn.functional.embedding_bag])
def test_a_sparse_gradient_names_its_operator_module_and_line(look_up):
    with pytest.raises(JobError) as caught:
        trial(functools.partial(nn.Sequential, OrderedDict(table=Table(look_up))), "x=8")
    line = inspect.getsourcelines(Table.forward)[1] + 1
    assert f"{look_up.__name__}.default" in caught.value.message
    assert "of `table`" in caught.value.message
    assert f"{__file__}:{line} " in caught.value.message


def test_segments_grow_where_tpukit_trains_and_where_the_user_says_so(monkeypatch):
    """`train` sets expandable_segments; a bare model is trained by a script of its user's."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def reserved(task):
        runner = TrialRunner(TrialSetup(TaskSource("", {}), TrainConfig(), "t4"))
        runner._forms = [task]
        trial = runner.result(TrialRequest(4000))["trial"]
        return trial["used_bytes"], trial["allocated_bytes"]

    model = ModelTask(Deep(), [f"x={WIDTH}"], {})

    class Trained(Task):
        name = "trained"
        build_model, datasets = model.build_model, model.datasets
        probe_batches, loss = model.probe_batches, model.loss

    trained = Trained()
    fixed, grows = reserved(model), reserved(trained)
    assert grows != fixed
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert reserved(model) == grows
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    assert reserved(trained) == fixed


UNKNOWN_FILE = """
import torch
from torch import nn
from tiny_task import Tiny

@torch.library.custom_op("mine::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

class Model(nn.Linear):
    def forward(self, x):
        return scale(super().forward(x))

def build():
    return Model(8, 8)

class Masked(Tiny):
    def loss(self, model, batch):
        losses = super().loss(model, batch)
        return {name: loss[loss > 0].sum() for name, loss in losses.items()}
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "mine.py:build", "--input", "x=8"], "mine::scale at {}:12 has no fake form"),
        (["--task", "mine.py:Masked"], "aten.nonzero.default at {}:20 has a shape that depends"),
    ],
)
def test_the_command_line_names_what_it_cannot_predict(tmp_path, words, said):
    (tmp_path / "mine.py").write_text(UNKNOWN_FILE)
    (tmp_path / "tiny_task.py").write_text(Path(tiny_task.__file__).read_text("utf-8"))
    done = runs.tpukit("probe-batch", "--target", "t4", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert said.format(tmp_path / "mine.py") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "devices", "gib"),
    [("t4", 1, 14.74), ("2xT4", 2, 14.74), ("A100-80", 1, 79.15), ("24GB", 1, 22.35)],
)
def test_names_of_gpus(name, devices, gib):
    target = find_any(name)
    assert (target.devices, round(target.memory_bytes / 2**30, 2)) == (devices, gib)


def test_an_unknown_gpu_names_near_ones():
    with pytest.raises(ConfigError) as caught:
        find_any("rtx4091")
    assert "rtx4090" in (caught.value.hint or "")


def test_less_than_a_gibibyte_is_refused():
    with pytest.raises(ConfigError, match="less than 1 GiB") as caught:
        find_any("0GB")
    assert "24GB" in (caught.value.hint or "")
