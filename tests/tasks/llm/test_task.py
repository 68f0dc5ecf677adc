"""The task: what opening the data yields is passed on, never written onto the task."""

from dataclasses import replace
from pathlib import Path

import pytest

from tpukit.errors import UsageError
from tpukit.tasks.llm.generate import write_dialogues
from tpukit.tasks.llm.model.lean import LanguageModel
from tpukit.tasks.llm.model.load import Shape
from tpukit.tasks.llm.model.rows import Rows
from tpukit.tasks.llm.task import SummarizeTask
from tpukit.train.task import PlanSettings

SETTINGS = {"model": "1x2x16", "tokenizer": "train", "vocabulary_size": 300, "block_size": 256}


@pytest.fixture
def task(tmp_path: Path) -> SummarizeTask:
    write_dialogues(tmp_path / "data", 200, 0)
    return SummarizeTask(data_path=str(tmp_path / "data"), **SETTINGS)


def test_plans_of_several_runs_do_not_disturb_each_other(task) -> None:  # type: ignore[no-untyped-def]
    """Micro-batches carry their shape: another plan in between changes nothing."""
    data = task.datasets()
    settings = PlanSettings(32, 16, 2, 0)
    micro = task.plan(data.train, settings).step(0)[0]
    task.plan(data.train, PlanSettings(32, 4, 1, 0))
    batch = task.collate([data.train[key.sample] for key in micro.keys], micro)
    assert batch["tokens"].shape == (micro.rows, micro.shape.length)
    assert batch["labels"].shape == (2, micro.shape.targets)


def test_a_restored_task_needs_neither_data_nor_tokenizer(task, ops) -> None:  # type: ignore[no-untyped-def]
    data = task.datasets()
    elsewhere = SummarizeTask(**{**vars(task.settings), "data_path": "nowhere"})
    restored = elsewhere.restore(data.artifacts)
    assert restored.tokenizer.to_bytes() == task.tokenizer.to_bytes()
    assert restored.shape == task.shape
    assert restored.build_model(ops).lm.config.n_embd == 16
    assert elsewhere.train_file == Path("nowhere/train.csv")
    with pytest.raises(Exception, match="nowhere"):
        _ = elsewhere.tokenizer


def test_probing_leaves_the_task_as_it_was(tmp_path: Path, ops) -> None:  # type: ignore[no-untyped-def]
    """GPT-2 in a place without data or network: its shape is known, its weights are not read."""
    task = SummarizeTask(data_path=str(tmp_path / "none"), block_size=64, packing=False)
    probed = task.for_probing()
    assert probed.shape.vocabulary_size == 50257 and probed.pretrained is None
    assert [batch["tokens"].shape for batch in probed.probe_batches(PlanSettings(4, 4, 2, 0))] == [
        (4, 64)
    ]
    assert "pretrained" not in vars(task) and "shape" not in vars(task)


def test_the_loss_of_experts_is_added_where_rows_are_packed(task, capsys) -> None:  # type: ignore[no-untyped-def]
    shape = Shape({"model_type": "mixtral", "vocab_size": 300, "output_router_logits": True}, 256)
    packed = task._with(shape=shape)
    assert packed.balances and not task.balances
    packed.datasets()
    assert "output_router_logits" not in capsys.readouterr().err
    single = packed._with(settings=replace(task.settings, packing=False))
    assert not single.balances
    single.datasets()
    assert "output_router_logits of config.json: the aux" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_number_is_a_choice_of_recomputation(task, ops) -> None:  # type: ignore[no-untyped-def]
    """`--set recompute=1`."""
    artifacts = task.datasets().artifacts
    for given, computed in ((1, True), (0, False), (True, True), ("auto", False)):
        chosen = SummarizeTask(**{**vars(task.settings), "recompute": given})
        lm = chosen.restore(artifacts).build_model(ops).lm
        assert lm.is_gradient_checkpointing is computed


def test_the_identity_covers_the_data_not_its_place(task, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    data = task.datasets()
    assert "data" not in task.identity()
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = SummarizeTask(**{**vars(task.settings), "data_path": str(tmp_path / "moved")})
    assert moved.datasets().identity == data.identity
    with (tmp_path / "moved" / "train.csv").open("a") as file:
        file.write("new,Ann: hi,They greet.\n")
    assert moved.datasets().identity != data.identity


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_the_inference_model_has_its_adapters(task, ops, kind) -> None:  # type: ignore[no-untyped-def]
    """Merged, or beside weights in bf16, which would round most of an update away."""
    import torch

    settings = {**vars(task.settings), "lora_rank": 2, "weights": kind}
    adapted = SummarizeTask(**settings).restore(task.datasets().artifacts)
    model = adapted.build_model(ops).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    used = adapted.inference_model(ops, weights).eval()
    assert isinstance(used, LanguageModel)
    adapters = [name for name, _ in used.named_parameters() if "lora_" in name]
    assert bool(adapters) == (kind == "bf16")
    tokens, atol = torch.arange(20)[None], 1e-5 if kind == "fp32" else 0.0
    assert torch.allclose(used(tokens), model(tokens), atol=atol, rtol=atol)


def test_a_probed_model_is_built_without_storage(tmp_path, ops, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Its rows are found out before: what has no storage cannot be compared."""
    from tpukit.probe.unfilled_model import without_storage
    from tpukit.tasks.llm.model import rows

    monkeypatch.setattr(rows, "_KNOWN", {})

    task = SummarizeTask(data_path=str(tmp_path / "none"), block_size=64).for_probing()
    with without_storage():
        model = task.build_model(ops)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_why_a_model_writes_no_answers(task) -> None:  # type: ignore[no-untyped-def]
    """What keeps its rows from being packed, whatever that is."""
    known = task._with(rows=Rows(packed=False, reason="its layers are its own"))
    with pytest.raises(UsageError, match=r"gpt2 writes no answers .*: its layers are its own\."):
        known._evaluated()
