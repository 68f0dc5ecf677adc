"""Runs with weights in 4 bits and of preferences: resumed, split, exported."""

import importlib.util
import shutil

import pytest
import torch
from runs import latest, metrics, parameters, result, tpukit
from safetensors.torch import load_file
from tiny_qwen import write_qwen

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PAIRS = [
    [f"{one} and {other} came. Who?\n", f"{one}, {other}", f"{word}, be brief"]
    for one, other, word in (("Ann", "Bob", "x"), ("Bob", "Ann", "came"), ("Ann", "Tom", "who"),
                             ("Tom", "Bob", "and"), ("Eve", "Ann", "alone"), ("Bob", "Eve", "Be"))
]  # fmt: skip


@pytest.fixture
def train(write_csv, tmp_path):
    write_qwen(tmp_path / "start")
    data = write_csv(tmp_path / "train.csv", ["prompt", "chosen", "rejected"], PAIRS)
    env = {"TPUKIT_CACHE_DIR": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def run(name, *options):
        words = [
            "summarize-train", "--data-path", data, "--init", tmp_path / "start", "--hw", "cpu",
            "--results-dir", tmp_path / name, "--block-size", 64, "--prompt-column", "prompt",
            "--completion-column", "chosen", "--id-column", "", "--template", "{prompt}",
            "--set", "valid_fraction=0", "--global-batch-size", 6, "--max-steps", 6,
            "--ckpt-every", 3, "--lr", 1e-2, "--set", "warmup_steps=0", "--log-every", 1,
            "--num-workers", 0, "--precision", "fp32", *options,
        ]  # fmt: skip
        result(tpukit(*map(str, words), "--json", env=env))
        return [row["loss"] for row in metrics(tmp_path / name) if row["kind"] == "train"]

    return run


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_a_run_in_4_bits_goes_on_bit_for_bit_and_is_exported(train, tmp_path):
    packed = ["--set", "weights=nf4", "--lora-rank", 4, "--lora-targets", "qkv,mlp_out"]
    losses = train("whole", *packed)
    assert losses[-1] < losses[0]
    train("stopped", *packed)
    shutil.rmtree(latest(tmp_path / "stopped"))
    train("stopped", *packed, "--export", tmp_path / "exported")
    whole, resumed = parameters(tmp_path / "whole"), parameters(tmp_path / "stopped")
    assert all(".lora_" in name for name in whole)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole | resumed)
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "start", dtype=torch.bfloat16, quantization_config=how, device_map="cpu"
    )
    for layer in base.modules():  # bitsandbytes' form for evaluation has no narrow matrices
        layer.support_avx512bf16_for_cpu = False
    beside = peft.PeftModel.from_pretrained(base, tmp_path / "exported" / "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.bfloat16
    )
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        found, wanted = merged(tokens).logits, beside(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == load_file(
        tmp_path / "start" / "model.safetensors"
    ).keys()  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["--lora-rank", 4, "--adapter", "use_dora=true"]])
def test_preferences_over_sharded_ranks_are_those_of_one_process(train, lora):
    pairs = ["--rejected-column", "rejected", *lora]
    one = train("one", *pairs)
    assert train("sharded", *pairs, "--devices", 2, "--shard") == pytest.approx(one, abs=1e-5)
    assert one[0] == pytest.approx(0.6931, abs=1e-4) and one[-1] < one[0]
