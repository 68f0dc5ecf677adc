"""Parity with transformers and nanoGPT's layout, both ways."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_qwen import CHAT, write_qwen, write_tokenizer

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.summarize.data.hub_tokenizer import HubTokenizer
from tpukit.tasks.summarize.data.tokenizer import Tokenizer
from tpukit.tasks.summarize.data.tokenizer_choice import load_tokenizer
from tpukit.tasks.summarize.export import export_hugging_face
from tpukit.tasks.summarize.model.decoder import DecoderConfig, LanguageModel
from tpukit.tasks.summarize.model.lora import LoraConfig, add_lora, merge_lora
from tpukit.tasks.summarize.model.weights import (
    Pretrained,
    cropped,
    parse_model_size,
    read_pretrained,
    require_vocabulary,
)
from tpukit.tasks.summarize.task import SummarizeTask

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SHAPES = [
    (2, 2, 32, 97, 64, "gelu_new"),
    (1, 4, 64, 130, 33, "gelu"),
    (3, 3, 48, 300, 128, "gelu_new"),
]


def written_by_transformers(folder: Path, shape: tuple[int, int, int, int, int, str]):  # type: ignore[no-untyped-def]
    layers, heads, width, vocabulary, positions, activation = shape
    config = transformers.GPT2Config(
        n_layer=layers, n_head=heads, n_embd=width, vocab_size=vocabulary, n_positions=positions,
        activation_function=activation, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def load(pretrained, ops) -> LanguageModel:  # type: ignore[no-untyped-def]
    model = LanguageModel(pretrained.config, ops).eval()
    model.load_state_dict(pretrained.tensors, strict=True)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_both_ways(tmp_path, ops, shape, tokenizer):  # type: ignore[no-untyped-def]
    theirs = written_by_transformers(tmp_path / "hf", shape)
    pretrained = read_pretrained(str(tmp_path / "hf"))
    ours = load(pretrained, ops)
    tokens = torch.randint(0, shape[3], (3, shape[4]))
    with torch.no_grad():
        expected, actual = theirs(tokens).logits, ours(tokens)
    assert (expected - actual).abs().max() < 1e-4

    export_hugging_face(tmp_path / "back", pretrained.config, ours.state_dict(), tokenizer)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert (expected - again(tokens).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    "changed",
    [
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
        {"n_inner": 128, "reorder_and_upcast_attn": True},
    ],
    ids=",".join,
)
def test_fields_that_change_the_arithmetic_are_honoured(tmp_path, ops, changed):  # type: ignore[no-untyped-def]
    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=32, vocab_size=50, n_positions=20, initializer_range=0.5,
        **changed,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, 50, (2, 20))
    with torch.no_grad():
        ours = load(read_pretrained(str(tmp_path)), ops)(tokens)
        assert (theirs(tokens).logits - ours).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_inner", 100),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("model_type", "gpt_neo"),
        ("activation_function", "relu"),
        ("quantization_config", {"bits": 4}),
        ("n_layer", "two"),
        ("n_head", 5),
        ("rotary_base", 10000),
    ],
)
def test_other_fields_are_refused_by_name(tmp_path, name, value):  # type: ignore[no-untyped-def]
    written_by_transformers(tmp_path, SHAPES[0])
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, name: value}))
    ours = {"n_layer": "layers", "n_head": "heads"}.get(name, name)
    with pytest.raises(DataError, match=ours):
        read_pretrained(str(tmp_path))


def test_gradients_equal_transformers(tmp_path, ops):  # type: ignore[no-untyped-def]
    """Of the loss on a few targets, the embedding's in both its uses; the keys' bias has none."""
    theirs = written_by_transformers(tmp_path / "hf", SHAPES[0])
    ours = load(read_pretrained(str(tmp_path / "hf")), ops)
    tokens = torch.randint(0, 97, (2, 20))
    labels = torch.full_like(tokens, -100)
    labels[:, 15:] = tokens[:, 15:]
    theirs(tokens, labels=labels).loss.backward()
    places = torch.tensor([[row * 20 + place for row in range(2) for place in range(14, 19)]])
    logits = ours(tokens, places)[0]
    torch.nn.functional.cross_entropy(logits, tokens[:, 15:].flatten()).backward()

    expected = theirs.transformer.wte.weight.grad
    assert (ours.token_embedding.weight.grad - expected).abs().max() < 1e-5 * expected.abs().max()
    expected = theirs.transformer.h[1].attn.c_attn
    assert torch.allclose(ours.blocks[1].qkv.weight.grad.T, expected.weight.grad, atol=1e-5)
    query, key, value = ours.blocks[1].qkv.bias.grad.chunk(3)
    assert torch.allclose(query, expected.bias.grad[:32], atol=1e-5)
    assert torch.allclose(value, expected.bias.grad[64:], atol=1e-5)
    assert not key.any()


def test_wanted_positions_are_those_of_the_full_form(ops):  # type: ignore[no-untyped-def]
    model = LanguageModel(DecoderConfig(3, 2, 32, 50, 40), ops).eval()
    tokens = torch.randint(0, 50, (4, 20))
    full = model(tokens)
    # Two groups of two rows each: indices count within a group.
    wanted = torch.tensor([[0, 19, 20, 39], [5, 6, 25, 38]])
    picked = model(tokens, wanted)
    expected = torch.stack(
        [full[:2].reshape(40, 50)[wanted[0]], full[2:].reshape(40, 50)[wanted[1]]]
    )
    assert torch.allclose(picked, expected, atol=1e-5)


def nanogpt_checkpoint(path: Path, *, bias: bool) -> None:
    width, tensors = 32, {}
    shapes = {
        "attn.c_attn": (96, 32),
        "attn.c_proj": (32, 32),
        "mlp.c_fc": (128, 32),
        "mlp.c_proj": (32, 128),
    }
    for name, shape in shapes.items():
        tensors[f"_orig_mod.transformer.h.0.{name}.weight"] = torch.randn(shape) * 0.1
        if bias:
            tensors[f"_orig_mod.transformer.h.0.{name}.bias"] = torch.randn(shape[0])
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        tensors[f"_orig_mod.transformer.{name}.weight"] = torch.ones(width)
        if bias:
            tensors[f"_orig_mod.transformer.{name}.bias"] = torch.zeros(width)
    tensors["_orig_mod.transformer.wte.weight"] = torch.randn(64, width)
    tensors["_orig_mod.transformer.wpe.weight"] = torch.randn(16, width)
    tensors["_orig_mod.lm_head.weight"] = tensors["_orig_mod.transformer.wte.weight"]
    shape = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": width,
        "vocab_size": 64,
        "block_size": 16,
        "bias": bias,
        "dropout": 0.0,
    }
    torch.save({"model": tensors, "model_args": shape, "iter_num": 3, "config": {}}, path)


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_checkpoint(tmp_path, ops, bias):  # type: ignore[no-untyped-def]
    nanogpt_checkpoint(tmp_path / "ckpt.pt", bias=bias)
    pretrained = read_pretrained(str(tmp_path / "ckpt.pt"))
    assert pretrained.config.activation == "gelu"
    assert load(pretrained, ops)(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 64)


def test_cropping_the_context(tmp_path):  # type: ignore[no-untyped-def]
    nanogpt_checkpoint(tmp_path / "ckpt.pt", bias=True)
    pretrained = read_pretrained(str(tmp_path / "ckpt.pt"))
    assert cropped(pretrained, 8).tensors["position_embedding.weight"].shape == (8, 32)
    with pytest.raises(ConfigError, match="16 positions"):
        cropped(pretrained, 32)


def test_vocabulary_must_fit(tmp_path, tokenizer: Tokenizer):  # type: ignore[no-untyped-def]
    nanogpt_checkpoint(tmp_path / "ckpt.pt", bias=True)
    with pytest.raises(ConfigError, match=r"512 tokens.*have 64"):
        require_vocabulary(read_pretrained(str(tmp_path / "ckpt.pt")), tokenizer)


def test_tokens_that_were_added_after_training_are_refused(tmp_path: Path) -> None:
    """Special ones that nothing writes may lie beyond the weights, as Gemma's of images do."""
    whole = transformers.AutoTokenizer.from_pretrained(folder_of_qwen(tmp_path))
    size = len(whole)
    weights = Pretrained(DecoderConfig(1, 1, 16, vocabulary_size=size), {}, "the weights")
    for token, special, chat, template in (
        ("<picture>", True, False, False), ("<sep>", False, False, False),
        ("<turn>", True, True, True), ("<turn>", True, True, False),
    ):  # fmt: skip
        ours = load_tokenizer(
            str(folder_of_qwen(tmp_path / f"{token}{template}", token, special, template))
        )
        assert isinstance(ours, HubTokenizer) and ours.vocabulary_size == size + 1
        ours = ours.for_chat() if chat else ours
        if special and not template:
            require_vocabulary(weights, ours)
            continue
        with pytest.raises(ConfigError, match=f"has {size + 1} tokens.*have {size}"):
            require_vocabulary(weights, ours)


def folder_of_qwen(
    folder: Path, token: str = "", special: bool = True, template: bool = False
) -> Path:
    """A tokenizer with a further token, which its chat template may write."""
    write_tokenizer(folder, chat=CHAT.replace("<|im_start|>", token) if template else CHAT)
    if token:
        whole = transformers.AutoTokenizer.from_pretrained(folder)
        whole.add_tokens([transformers.AddedToken(token, special=special)], special_tokens=special)
        whole.save_pretrained(folder)
    return folder


def test_what_is_no_model_is_said(tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "x.pt").write_bytes(b"nothing")
    for source, text in [
        (str(tmp_path / "x.pt"), "cannot be read as tensors"),
        (str(tmp_path), "config.json"),
        ("./nowhere", "nothing there"),
    ]:
        with pytest.raises(DataError, match=text):
            read_pretrained(source)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([1, 2], "a list"),
        ({}, "an empty dict"),
        (torch.zeros(2, 3), r"a tensor \(2, 3\)"),
        ({"model": {1: torch.zeros(1)}, "model_args": {}}, r"model \(dict\), model_args"),
        ({"model": "text", "model_args": 3}, r"model \(str\), model_args \(int\)"),
        ({"model": {"a": 1.5}}, r"model \(dict\)"),
    ],
    ids=["list", "empty", "tensor", "integer-keys", "text", "no-tensors"],
)
def test_what_a_foreign_checkpoint_holds_is_said(tmp_path, content, found):  # type: ignore[no-untyped-def]
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(DataError, match=f"not a nanoGPT checkpoint: it holds .*{found}"):
        read_pretrained(str(tmp_path / "x.pt"))


def test_the_hub_without_a_network_says_what_to_bring(monkeypatch):  # type: ignore[no-untyped-def]
    # The variable HF_HUB_OFFLINE is read once, when the hub's client is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="hub") as caught:
        read_pretrained("gpt2-that-is-not-there")
    assert "model.safetensors" in str(caught.value.hint)


@pytest.mark.parametrize(
    "named", [{"init": "Qwen/Qwen3-0.6B"}, {"init": "Qwen3-0.6B"}, {"model": "Qwen3-0.6B"}]
)
def test_a_model_of_the_hub_brings_weights_and_tokenizer(tmp_path, monkeypatch, named):  # type: ignore[no-untyped-def]
    kept = tmp_path / "models--Qwen--Qwen3-0.6B"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots").mkdir()
    write_qwen(kept / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    task = SummarizeTask(**named, block_size=64)
    assert isinstance(task.tokenizer, HubTokenizer)
    assert task.pretrained is not None and task.pretrained.config.width == 32


def test_weights_are_held_once_and_apart(tmp_path, ops):  # type: ignore[no-untyped-def]
    """In their file's type, and copied: what a model learns is not in the next one."""
    write_qwen(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    for weights, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        task = SummarizeTask(init=str(tmp_path), block_size=64, weights=weights)
        first = task.build_model(ops)
        assert task.pretrained is not None
        assert {t.dtype for t in task.pretrained.tensors.values()} == {torch.bfloat16}
        with torch.no_grad():
            for parameter in first.parameters():
                parameter.add_(1.0)
        second = task.build_model(ops).state_dict()
        assert {t.dtype for t in second.values()} == {dtype}
        for name, tensor in task.pretrained.tensors.items():
            assert torch.equal(second[name].float(), tensor.float())
        assert first.frequencies.device.type == "cpu"


def test_a_run_in_bf16_is_used_in_bf16(tmp_path, ops):  # type: ignore[no-untyped-def]
    """A model that fitted while it was trained fits when it predicts, and is the same."""
    write_qwen(tmp_path)
    task = SummarizeTask(init=str(tmp_path), block_size=64, weights="bf16", lora_rank=2)
    trained = task.build_model(ops)
    torch.nn.init.normal_(trained.blocks[0].query.up)
    shape = json.dumps(asdict(task.model_config)).encode()
    restored = task.restore({"tokenizer.tiktoken": task.tokenizer.to_bytes(), "model.json": shape})
    used = restored.inference_model(ops, trained.state_dict()).state_dict()
    assert used.keys() == trained.state_dict().keys()
    for name, tensor in trained.state_dict().items():
        assert used[name].dtype == tensor.dtype and torch.equal(used[name], tensor)
    again = restored.build_model(ops)
    again.load_state_dict(trained.state_dict())
    tokens = torch.randint(0, 200, (2, 9))
    assert torch.equal(again.eval()(tokens), trained.eval()(tokens))


def test_a_folder_here_is_not_taken_for_the_hubs(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    write_qwen(tmp_path / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    task = SummarizeTask(model="Qwen3-0.6B", block_size=64)
    assert isinstance(task.tokenizer, HubTokenizer)
    assert task.pretrained is not None and task.pretrained.source == "Qwen3-0.6B"


@pytest.mark.parametrize(("text", "width"), [("gpt2-xl", 1600), ("2x4x64", 64)])
def test_sizes(text, width):  # type: ignore[no-untyped-def]
    assert parse_model_size(text).width == width


@pytest.mark.parametrize("text", ["gpt3", "2x3x64", "0x1x2"])
def test_sizes_that_are_none(text):  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        parse_model_size(text)


def test_lora_starts_as_pefts_does(ops):  # type: ignore[no-untyped-def]
    peft = pytest.importorskip("peft")
    theirs = peft.get_peft_model(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=256, n_head=4)),
        peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True),
    )
    model = LanguageModel(DecoderConfig(1, 4, 256, 50, 40), ops)
    add_lora(model, LoraConfig(8, 8.0))
    starts = [
        next(value for name, value in of.named_parameters() if mark in name).detach().abs()
        for of, mark in ((theirs, "lora_A"), (model, ".down"))
    ]
    assert starts[0].shape == starts[1].shape
    for measure in (torch.mean, torch.max):
        assert float(measure(starts[1])) == pytest.approx(float(measure(starts[0])), rel=0.1)


def test_lora_starts_as_the_model_and_merges_into_it(ops):  # type: ignore[no-untyped-def]
    config = DecoderConfig(2, 2, 32, 50, 40)
    model, tokens = LanguageModel(config, ops).eval(), torch.randint(0, 50, (2, 10))
    before = model(tokens)
    lora = LoraConfig(4, 8.0, ("qkv", "mlp_out"))
    add_lora(model, lora)
    assert torch.allclose(model(tokens), before, atol=1e-6)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2 and all(n.endswith((".up", ".down")) for n in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".up"):
                parameter.normal_()
    plain = LanguageModel(config, ops).eval()
    plain.load_state_dict(merge_lora(dict(model.named_parameters()), lora.scale))
    assert torch.allclose(plain(tokens), model(tokens), atol=1e-5)
    assert not torch.allclose(plain(tokens), before, atol=1e-2)
