"""Packed training beside transformers' Trainer and TRL's SFTTrainer, one sample to a row."""

import importlib.util
import json

import pytest
from runs import joint_difference, last_json, metrics, parameters, result, script, tpukit
from tiny_qwen import write_tokenizer

transformers = pytest.importorskip("transformers")

STEPS, RATE = 20, 2e-3  # trainers.py has the same
ROWS = [
    [f"{one} and {other} came alone. Who?\n" * repeated, f"{one}, {other}"]
    for one, other, repeated in (
        ("Ann", "Bob", 1), ("Bob", "Ann", 3), ("Ann", "Tom", 2), ("Tom", "Bob", 1),
        ("Eve", "Ann", 4), ("Bob", "Eve", 1),
    )
]  # fmt: skip
SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Llama": SIZE,
    "Qwen3": {**SIZE, "head_dim": 16},
    "Gemma3": {**SIZE, "head_dim": 16, "sliding_window": 9,
               "layer_types": ["sliding_attention", "full_attention"]},
    "Mixtral": {**SIZE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "OPT": {**SIZE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_losses_and_weights_of_twenty_steps(family, write_csv, tmp_path):
    for needed in ("trl", "datasets"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    start = tmp_path / "start"
    words = write_tokenizer(start)
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(vocab_size=words, **MODELS[family])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(start)
    data = write_csv(tmp_path / "train.csv", ["prompt", "completion"], ROWS)
    words = [
        "summarize-train", "--data-path", data, "--init", start, "--results-dir", tmp_path / "run",
        "--block-size", 256, "--packing", "--set", "prompt_column=prompt",
        "--set", "completion_column=completion", "--set", "template={prompt}", "--id-column", "",
        "--set", "valid_fraction=0", "--global-batch-size", len(ROWS), "--max-steps", STEPS,
        "--lr", RATE, "--set", "schedule=constant", "--set", "warmup_steps=0",
        "--set", "weight_decay=0", "--log-every", 1, "--hw", "cpu", "--num-workers", 0,
    ]  # fmt: skip
    result(tpukit(*map(str, words), "--json", env={"TPUKIT_CACHE_DIR": str(tmp_path / "cache")}))
    own = [row["loss"] for row in metrics(tmp_path / "run") if row["kind"] == "train"]
    rows = json.dumps([dict(zip(("prompt", "completion"), row, strict=True)) for row in ROWS])
    env = {"USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1"}
    for trainer in ("trainer", "sft"):
        out = tmp_path / trainer
        theirs = last_json(script("trainers.py", trainer, start, rows, out, env=env))
        assert own == pytest.approx(theirs, abs=1e-5) and own[-1] < own[0] - 0.5
        trained = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
        weights = {n.removeprefix("lm."): w for n, w in parameters(tmp_path / "run").items()}
        trained = {
            n: w for n, w in trained.items() if n in weights or n != "lm_head.weight"
        }  # tied
        assert joint_difference(weights, trained) < 1e-4
