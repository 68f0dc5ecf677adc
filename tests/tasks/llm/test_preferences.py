"""Pairs of completions: their tokens, their packed rows, and the loss beside a plain one."""

import copy
import importlib.util
import json

import pytest
import torch
from runs import last_json, metrics, result, script, tpukit
from tiny_qwen import write_qwen
from torch.nn import functional as F

from tpukit.errors import ConfigError, DataError
from tpukit.hardware.backend import TorchOps
from tpukit.tasks.llm.data.dataset import TokenSamples, collate_tokens
from tpukit.tasks.llm.data.packing import RowShape, SetSizes
from tpukit.tasks.llm.data.prompt import PromptStyle
from tpukit.tasks.llm.data.rows import Columns, read_rows
from tpukit.tasks.llm.data.token_cache import open_token_cache
from tpukit.tasks.llm.evaluate import validation_rows
from tpukit.tasks.llm.model.lean import LanguageModel
from tpukit.tasks.llm.model.load import load_lm, shape_of
from tpukit.tasks.llm.preferences import preference_loss
from tpukit.tasks.llm.task import SummarizeTask
from tpukit.train.task import MicroBatch, SampleKey

transformers = pytest.importorskip("transformers")

COLUMNS = Columns("prompt", "chosen", None, rejected="rejected")
STYLE = PromptStyle(COLUMNS, "{prompt}")
ROWS = [
    ["Who came? ", "Ann and Bob.", "Nobody."],
    ["When? ", "At six.", "I do not know when they came, if they came at all."],
    ["Why did they come? " * 9, "To see Tom.", "Because."],
]
BETA = 0.3


@pytest.fixture
def task_of(write_csv, tmp_path):
    """A small task on pairs."""

    def make(rows=ROWS, **more):
        path = write_csv(tmp_path / "train.csv", ["prompt", "chosen", "rejected"], rows)
        return SummarizeTask(**{
            "data_path": str(path), "model": "1x1x16", "tokenizer": "train", "vocabulary_size": 300,
            "id_column": "", "prompt_column": "prompt", "completion_column": "chosen",
            "rejected_column": "rejected", "template": "{prompt}", "block_size": 128, **more,
        })  # fmt: skip

    return make


@pytest.fixture
def samples(write_csv, tmp_path, tokenizer):
    path = write_csv(tmp_path / "train.csv", ["prompt", "chosen", "rejected"], ROWS)
    cache = open_token_cache(path, tokenizer, 40, style=STYLE)
    sizes = SetSizes.of(cache)
    return TokenSamples(cache, range(len(cache)), sizes, pairs=True)


def halves(sample):
    cut = sample["rejected_at"]
    return sample["tokens"][:cut], sample["tokens"][cut:]


def test_both_completions_follow_the_same_prompt(samples, tokenizer):
    for index, (prompt, *completions) in enumerate(ROWS):
        sample, asked = samples[index], None
        for tokens, completion in zip(halves(sample), completions, strict=True):
            answer = [*tokenizer.encode(completion), tokenizer.end]
            assert tokens[-len(answer) :].tolist() == answer and len(tokens) <= 40
            cut = tokens[: -len(answer)].tolist()
            asked = asked or cut
            assert cut == asked and prompt.startswith(tokenizer.decode(cut))
        assert sample["targets"] == sum(map(len, halves(sample))) - 2 * len(asked)
        shown, answer = samples.prompt_and_targets(index)
        assert shown.tolist() == asked and tokenizer.decode(answer[:-1]) == completions[0]


@torch.no_grad()
def plain_loss(lm, start, samples):
    """One document after the other, as transformers computes it."""
    losses = []
    for index in range(len(samples)):
        learned = samples.cache.example(index)[2]
        rewards = []
        for tokens, wanted in zip(halves(samples[index]), halves(
            {"tokens": learned, "rejected_at": samples[index]["rejected_at"]}
        ), strict=True):  # fmt: skip
            ids = torch.tensor(tokens.astype(int))[None]
            labels = torch.tensor(wanted)[1:]
            held = [m(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                    for m in (lm, start)]  # fmt: skip
            rewards.append(float(((held[0] - held[1]) * labels).sum()))
        losses.append(-F.logsigmoid(torch.tensor(BETA * (rewards[0] - rewards[1]))))
    return torch.stack(losses).mean().item(), rewards


@pytest.mark.parametrize("counts", [(2, 1), (1, 1, 1), (3, 0)])
def test_packed_pairs_have_the_loss_of_single_documents(samples, counts):
    config = transformers.AutoConfig.for_model(
        "qwen3", hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=512, max_position_embeddings=64,
        initializer_range=0.1,
    )  # fmt: skip
    lm = load_lm(shape_of(config, 64), torch.float32)
    start = copy.deepcopy(lm)
    for parameter in lm.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    eager = [copy.deepcopy(each) for each in (lm, start)]
    for each in eager:
        each.set_attn_implementation("eager")
    wanted, _ = plain_loss(*eager, samples)
    assert abs(wanted - 0.693) > 0.05
    shape = RowShape(max(counts) * 80, len(counts), 96)
    keys = tuple(SampleKey(0, index) for index in range(3))
    batch = collate_tokens(
        [samples[key.sample] for key in keys], MicroBatch(keys, len(counts), shape, counts=counts)
    )
    model, reference = (LanguageModel(each, TorchOps()) for each in (lm, start))
    with torch.no_grad():
        losses, before = (
            m(batch["tokens"], batch["wanted"], labels=batch["labels"], starts=batch["starts"])
            for m in (model, reference)
        )
    found = preference_loss(losses, before, batch["pairs"], BETA)
    assert found["loss"].item() == pytest.approx(wanted, abs=1e-5)
    assert found["weight"] == 3
    none = preference_loss(losses, before, torch.zeros_like(batch["pairs"]), BETA)
    assert none["loss"] == 0 and none["weight"] == 0


def test_chosen_completions_alone_are_evaluated(task_of):
    task = task_of()
    row = next(iter(read_rows(task.train_file, summaries=True, columns=COLUMNS)))
    assert task.prompt_format.example(row).learned is not None
    tokens, targets, learned = task._evaluated().prompt_format.example(row)
    assert task.tokenizer.decode(tokens) == "".join(ROWS[0][:2]) and learned is None
    assert task.tokenizer.decode(tokens[-targets:]) == ROWS[0][1]


def test_pairs_held_out_of_training_are_the_tested_ones(task_of):
    """Pairs whose rejected completion alone is too long were in no part."""
    rows = [[f"Who {n}? ", f"Ann {n}.", "No " * (90 if n % 3 == 0 else 1)] for n in range(20)]
    task = task_of(rows, block_size=64, valid_fraction=0.5)
    valid = task.datasets().valid
    held_out = [valid.prompt_and_targets(index)[1][:-1] for index in range(len(valid))]
    tested, _ = validation_rows(task._evaluated(), task.train_file, None, print)
    assert [row.summary for row in tested] == [task.tokenizer.decode(said) for said in held_out]
    assert len(tested) == 6


def test_biases_that_the_model_at_the_start_would_share_are_refused(task_of):
    task = task_of(lora_rank=2, adapter="bias=all")
    with pytest.raises(ConfigError, match="bias 'all': preferences need the model at the start"):
        task.build_model(TorchOps())


def test_an_empty_rejected_completion_is_named(write_csv, tmp_path, tokenizer):
    rows = [*ROWS, ["Where? ", "Here.", " "]]
    path = write_csv(tmp_path / "train.csv", ["prompt", "chosen", "rejected"], rows)
    with pytest.raises(DataError, match=r"row 4 .*column 'rejected' is empty"):
        open_token_cache(path, tokenizer, 40, style=STYLE)
    path = write_csv(tmp_path / "other.csv", ["prompt", "chosen"], [row[:2] for row in ROWS])
    with pytest.raises(DataError, match=r"column.*rejected"):
        open_token_cache(path, tokenizer, 40, style=STYLE)


# -- beside TRL -----------------------------------------------------------------------------------
STEPS, RATE = 20, 2e-3  # trl_preferences.py has the same
PAIRS = [
    [f"{one} and {other} came alone. Who?\n", f"{one}, {other}", f"{word}, be brief"]
    for one, other, word in (
        ("Ann", "Bob", "x"), ("Bob", "Ann", "came"), ("Ann", "Tom", "who"), ("Tom", "Bob", "and"),
        ("Eve", "Ann", "alone"), ("Bob", "Eve", "Be"),
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_twenty_steps_have_the_losses_of_trl(adapted, write_csv, tmp_path):
    if importlib.util.find_spec("trl") is None:
        pytest.skip("needs trl")
    peft = pytest.importorskip("peft")
    start, adapter = tmp_path / "start", tmp_path / "adapter"
    write_qwen(start)
    data = write_csv(tmp_path / "train.csv", ["prompt", "chosen", "rejected"], PAIRS)
    if adapted:
        lm = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        lm = peft.get_peft_model(lm, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        lm.save_pretrained(adapter)
    options = ["--set", f"lora_init={adapter}"] if adapted else []
    words = [
        "summarize-train", "--data-path", data, "--init", start, "--results-dir", tmp_path / "run",
        "--block-size", 64, "--set", "prompt_column=prompt", "--set", "completion_column=chosen",
        "--set", "rejected_column=rejected", "--set", "template={prompt}", "--id-column", "",
        "--set", "valid_fraction=0", "--global-batch-size", len(PAIRS), "--max-steps", STEPS,
        "--lr", RATE, "--set", "schedule=constant", "--set", "warmup_steps=0",
        "--set", "weight_decay=0", "--log-every", 1, "--hw", "cpu", "--num-workers", 0, *options,
    ]  # fmt: skip
    result(tpukit(*map(str, words), "--json", env={"TPUKIT_CACHE_DIR": str(tmp_path / "cache")}))
    # In a process of its own: the Trainer takes torch_xla's device where there is one.
    env = {"USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1"}
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in PAIRS]
    theirs = last_json(script("trl_preferences.py", start, adapter, json.dumps(rows), env=env))
    own = [row["loss"] for row in metrics(tmp_path / "run") if row["kind"] == "train"]
    assert own == pytest.approx(theirs, abs=1e-5) and own[-1] < own[0] - 0.02
