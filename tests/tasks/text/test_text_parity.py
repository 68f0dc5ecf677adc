"""Losses of the text task beside a plain loop over transformers."""

import numpy as np
import pytest
import torch
from runs import VIRTUAL_TPU, metrics, ranks_of, result, tpukit
from tiny_readers import LABELS, write_reader, write_tables
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tpukit.io.tables import read_table
from tpukit.tasks.text.data.lengths import AlikePlan, LengthShapes
from tpukit.train.task import PlanSettings

ENCODERS = ("bert", "roberta", "deberta", "modernbert")
WAYS = {
    "cpu": (["--hw", "cpu"], {}),
    "ranks": (["--hw", "cpu", "--devices", "2"], {}),
    "xla": (["--hw", "tpu", "--precision", "fp32"], VIRTUAL_TPU),
}
STEPS, ROWS, LR = 20, 16, 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("texts") / "data", rows=60)


def plain_losses(model, data):
    """The loss of each step, with padding to the longest text of a batch."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    model = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    rows = read_table(data / "train.csv").records()
    tokens = [tokenizer(row["text"])["input_ids"] for row in rows]
    lengths = np.array([*map(len, tokens)])
    plan = AlikePlan(LengthShapes(lengths, [160], True), PlanSettings(ROWS, ROWS, 1, 0))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, LR)
    losses = []
    for step in range(STEPS):
        keys = [key.sample for micro in plan.step(step) for key in micro.keys]
        batch = tokenizer.pad({"input_ids": [tokens[k] for k in keys]}, return_tensors="pt")
        labels = torch.tensor([LABELS.index(rows[k]["label"]) for k in keys])
        # Dropout is 0, and eval mode switches off what transformers calls with a rate itself.
        scores = model.eval()(**batch).logits
        loss = torch.nn.functional.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


CASES = [
    pytest.param(encoder, way, marks=[*([pytest.mark.slow] if slow else []),
                                      *([pytest.mark.xla] if way == "xla" else [])])
    for encoder in ENCODERS
    for way in WAYS
    for slow in [(encoder, way) != ("modernbert", "cpu")]
]  # fmt: skip


@pytest.mark.parametrize(("encoder", "way"), CASES)
def test_losses_are_those_of_a_plain_loop(encoder, way, folder, tmp_path):
    model = write_reader(tmp_path / encoder, encoder)
    hardware, env = WAYS[way]
    done = result(tpukit(
        "train", "--task", "text", "--data-path", folder, "--model", model, *hardware,
        "--global-batch-size", ROWS, "--accumulate", 1, "--max-steps", STEPS, "--lr", LR,
        "--log-every", 1, "--max-length", 128, "--set", "valid_fraction=0", "--dropout", "0",
        "--set", "schedule=constant", "--set", "warmup_steps=0", "--set", "weight_decay=0.1",
        "--results-dir", tmp_path / "run", "--json", env=env, timeout=900,
        ranks=ranks_of(hardware),
    ))  # fmt: skip
    losses = [row["loss"] for row in metrics(tmp_path / "run") if row["kind"] == "train"]
    assert losses == pytest.approx(plain_losses(model, folder), abs=1e-5)
    assert losses[-1] < losses[0]
    assert done["compilations_after_warmup"] == 0
