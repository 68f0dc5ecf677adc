"""Packed rows: every sample once, one shape, little padding, the same loss as sample by sample."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TpukitError
from tpukit.hardware.backend import TorchOps
from tpukit.tasks.llm.data.dataset import collate_tokens
from tpukit.tasks.llm.data.packing import (
    PackedPlan,
    RowShape,
    SetSizes,
    evaluation_packs,
    packed_shape,
)
from tpukit.tasks.llm.data.token_cache import SampleSizes
from tpukit.tasks.llm.generate import write_dialogues
from tpukit.tasks.llm.task import SummarizeTask
from tpukit.train.checks import check_batch_plan
from tpukit.train.task import MicroBatch, PlanSettings, SampleKey


def sizes_of(lengths, targets):
    return SampleSizes(np.array(lengths), np.minimum(targets, np.array(lengths) - 1))


def sizes_like_samsum(count=4000):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.83, 0.6, count).astype(int), 25, 800)
    targets = np.clip((lengths * 0.12 + rng.normal(10, 5, count)).astype(int), 4, 80)
    return sizes_of(lengths, targets)


def plan_of(sizes, batch, micro_rows, devices, *, packed=True):
    settings = PlanSettings(batch, micro_rows, devices, 0, compiles=True)
    shape = packed_shape(SetSizes.of(sizes), settings, packed=packed)
    return PackedPlan(sizes, shape, settings)


def require_room(micro, sizes, devices):
    """Rows and devices hold what they were given, however the ranks share it."""
    shape = micro.shape
    assert micro.rows == shape.rows * devices == len(micro.counts)
    shares = [micro.share(rank, devices) for rank in range(devices)]
    assert tuple(key for share in shares for key in share.keys) == micro.keys
    for share in shares:
        assert sum(sizes.targets[key.sample] for key in share.keys) <= shape.targets
        keys = iter(share.keys)
        for count in share.counts:
            row = [next(keys) for _ in range(count)]
            assert sum(sizes.lengths[key.sample] for key in row) <= shape.length
            assert shape.packed or count <= 1


@settings(deadline=None, max_examples=60)
@given(
    samples=st.lists(st.tuples(st.integers(2, 300), st.integers(1, 90)), min_size=8, max_size=60),
    micro_rows=st.sampled_from([8, 16, 24]),
    devices=st.sampled_from([1, 2, 8]),
    packed=st.booleans(),
)
def test_every_sample_is_in_its_step_once_and_fits(samples, micro_rows, devices, packed):
    sizes = sizes_of(*zip(*samples, strict=True))
    plan = plan_of(sizes, 24, micro_rows, devices, packed=packed)
    keys = []
    for step in range(math.ceil(plan.steps_per_epoch())):
        for micro in plan.step(step):
            assert micro.shape == plan.shape
            require_room(micro, sizes, devices)
            keys += micro.keys
    first_pass = [key.sample for key in keys if key.epoch == 0]
    assert sorted(first_pass) == list(range(len(sizes)))
    packs = evaluation_packs(sizes, plan.shape, plan.settings)
    for micro in packs:
        require_room(micro, sizes, devices)
    assert sorted(k.sample for m in packs for k in m.keys) == list(range(len(sizes)))


@pytest.mark.parametrize(("micro_rows", "devices"), [(256, 8), (64, 8), (16, 1)])
def test_little_is_padding_and_steps_keep_their_samples(micro_rows, devices):
    sizes = sizes_like_samsum()
    packed, padded = (plan_of(sizes, 256, micro_rows, devices, packed=p) for p in (True, False))
    micro_batches = [micro for step in range(20) for micro in packed.step(step)]
    tokens = sum(int(sizes.lengths[k.sample]) for m in micro_batches for k in m.keys)
    assert tokens > 0.9 * sum(m.rows * m.shape.length for m in micro_batches)
    # One more micro-batch than planned, where one was planned, is another program.
    assert {len(packed.step(step)) for step in range(100)} == {256 // micro_rows}
    for step in range(5):
        one, other = ({k for m in p.step(step) for k in m.keys} for p in (packed, padded))
        assert one == other


def test_a_full_last_row_loses_no_sample():
    samples = [{"tokens": np.arange(n), "targets": 1} for n in (3, 4, 2)]
    keys = tuple(SampleKey(0, i) for i in range(3))
    micro = MicroBatch(keys, 2, RowShape(8, 2, 8), counts=(2, 1))
    batch = collate_tokens(samples, micro)
    assert batch["tokens"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch["starts"].tolist() == [[0, 0, 0, 3, 3, 3, 3, 7], [0, 0, 2, 3, 4, 5, 6, 7]]
    # The place before each sample's last token, and that token.
    assert batch["wanted"].tolist() == [[1, 5, 8, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 1, *[-100] * 5]]


def test_more_samples_than_rows_are_allowed_where_they_are_packed():
    keys = tuple(SampleKey(0, i) for i in range(3))

    class Plan:
        def __init__(self, counts):
            self.micro = MicroBatch(keys, 2, counts=counts)

        def steps_per_epoch(self):
            return 1

        def step(self, step):
            return [self.micro]

    method = SummarizeTask.plan
    check_batch_plan(Plan((2, 1)), method, 2)
    with pytest.raises(TpukitError, match="at least as many rows as keys"):
        check_batch_plan(Plan(None), method, 2)


def test_the_loss_and_its_gradient_are_those_of_single_samples(tmp_path):
    write_dialogues(tmp_path / "data", 120, 0)
    given = {"data_path": str(tmp_path / "data"), "model": "2x2x32", "tokenizer": "train",
             "vocabulary_size": 300, "block_size": 256}  # fmt: skip
    tasks = {packing: SummarizeTask(**given, packing=packing) for packing in (True, False)}
    torch.manual_seed(0)
    model = tasks[True].build_model(TorchOps())
    found = {}
    for packing, task in tasks.items():
        data = task.datasets()
        plan = task.plan(data.train, PlanSettings(48, 24, 2, 0))
        micro_batches = plan.step(0)
        batches = [task.collate([data.train[k.sample] for k in m.keys], m) for m in micro_batches]
        assert all(("starts" in batch) == packing for batch in batches)
        outputs = [task.loss(model, batch) for batch in batches]
        weight = sum(float(out["weight"]) for out in outputs)
        total = sum(out["loss"] * out["weight"] for out in outputs) / weight
        gradients = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
        found[packing] = weight, total, [g for g in gradients if g is not None]
    assert found[True][0] == found[False][0]
    torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-5, atol=0)
    for ours, theirs in zip(found[True][2], found[False][2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("packed", [True, False])
def test_one_shape_of_all_or_cut_to_their_samples_where_shapes_are_free(tmp_path, packed):
    """Of training, validation and probing, in whatever order they are asked for."""
    write_dialogues(tmp_path / "data", 200, 0)
    task = SummarizeTask(data_path=str(tmp_path / "data"), model="1x2x16", tokenizer="train",
                         vocabulary_size=300, block_size=256, packing=packed)  # fmt: skip
    data = task.datasets()
    for fixed in (True, False):
        planned = PlanSettings(32, 16, 2, 0, compiles=fixed)
        trained = [m for step in range(4) for m in task.plan(data.train, planned).step(step)]
        other, third = (SummarizeTask(**vars(task.settings)) for _ in range(2))
        validated = list(other.evaluation_batches(data.valid, planned))
        assert sorted(k.sample for m in validated for k in m.keys) == list(range(len(data.valid)))
        (probed,) = third.probe_batches(planned)
        rows, length = probed["tokens"].shape
        for micro in trained + validated:
            assert micro.counts is not None and micro.rows == rows
            sizes = (data.valid if micro in validated else data.train).sizes
            require_room(micro, sizes, 2)
            if fixed:
                assert (micro.shape.length, micro.shape.targets) == (
                    length,
                    probed["labels"].shape[1],
                )
        if not fixed:
            tokens = sum(int(data.train.sizes.lengths[k.sample]) for m in trained for k in m.keys)
            assert not packed or tokens > 0.9 * sum(m.rows * m.shape.length for m in trained)
            assert all(m.shape.length <= length for m in trained)


@pytest.mark.parametrize(("micro_rows", "devices"), [(1, 1), (6, 1), (8, 2), (40, 4)])
def test_without_data_a_batch_is_packed_as_in_training(tmp_path, micro_rows, devices):
    """A file whose samples fill the context, a tenth of it targets, gives the same batch."""
    words = 25  # 26 of 256 tokens, the last one ends the text
    rows = [f"{i},{'Ann: so so so. ' * 200},{' '.join(['so'] * words)}" for i in range(60)]
    (tmp_path / "train.csv").write_text("\n".join(["id,dialogue,summary", *rows]))
    given = {"model": "2x2x32", "tokenizer": "train", "vocabulary_size": 300, "block_size": 256}
    task = SummarizeTask(**given, data_path=str(tmp_path))
    data = task.datasets().train
    assert set(data.sizes.lengths) == {256} and set(data.sizes.targets) == {26}
    settings = PlanSettings(micro_rows, micro_rows, devices, 0, compiles=True)
    micro = task.plan(data, settings).step(0)[0]
    real = task.collate([data[key.sample] for key in micro.keys], micro)
    [made] = SummarizeTask(**given, data_path="nowhere").for_probing().probe_batches(settings)
    described = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()}
        for batch in (real, made)
    ]
    assert described[0] == described[1] and made["tokens"].shape == (micro_rows, 256)
    # Each row has documents from its start to its end, and targets that are predicted within them.
    assert made["mask"].all() and made["starts"].tolist() == [[0] * 128 + [128] * 128] * micro_rows
    model = task.build_model(TorchOps())
    losses = [task.loss(model, batch) for batch in (real, made)]
    assert abs(losses[1]["weight"] - losses[0]["weight"]) < 8 * devices  # places are rounded up
    assert torch.isfinite(losses[1]["loss"]).all()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("has_data", [True, False])
def test_no_sample_of_a_probed_batch_is_longer_than_the_context(tmp_path, has_data, pairs):
    """A packed row may be: learned positions end where the context does."""
    columns = {"prompt_column": "dialogue", "completion_column": "summary", "id_column": ""}
    digits = np.random.default_rng(0).integers(10, size=(60, 240)).astype(str)
    rows = [f"{''.join(r[:200])},{''.join(r[200:220])},{''.join(r[220:])}" for r in digits]
    (tmp_path / "train.csv").write_text("\n".join(["dialogue,summary,other", *rows]))
    task = SummarizeTask(
        data_path=str(tmp_path) if has_data else "nowhere", model="1x2x16", tokenizer="train",
        vocabulary_size=300, block_size=256, rejected_column="other" if pairs else "",
        template="{dialogue}", **columns,
    ).for_probing()  # fmt: skip
    for micro_rows in (1, 4, 6):
        [batch] = task.probe_batches(PlanSettings(micro_rows, micro_rows, 1, 0, compiles=True))
        positions = torch.arange(batch["starts"].shape[1]) - batch["starts"]
        assert positions.max() < 256
        out = task.loss(task.build_model(TorchOps()), batch)
        assert torch.isfinite(out["loss"]).all() and float(out["weight"]) > 0
        if pairs:
            counts = [int((batch["pairs"] * sign > 0).sum()) for sign in (1, -1)]
            assert min(counts) > 0 and abs(counts[0] - counts[1]) <= batch["pairs"].max()
