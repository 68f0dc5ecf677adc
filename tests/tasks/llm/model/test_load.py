"""Weights and shapes of transformers' directories: read whole, or refused by name."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_qwen import CHAT, write_qwen, write_tokenizer

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.llm.data.tokenizer import Tokenizer
from tpukit.tasks.llm.data.tokenizer_choice import load_tokenizer
from tpukit.tasks.llm.model.load import (
    Pretrained,
    Shape,
    config_of,
    from_scratch,
    load_lm,
    read_pretrained,
    require_vocabulary,
)
from tpukit.tasks.llm.model.sizes import SIZES, parse_model_size
from tpukit.tasks.llm.task import SummarizeTask

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 97, "n_positions": 64}


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(tmp_path)
    return tmp_path


def loaded(folder: Path, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    found = read_pretrained(str(folder), 64)
    return load_lm(found.shape, dtype, folder=found.folder)


def rewritten(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("transformer.h.0.ln_1.bias"), r"has no tensor transformer.h.0.ln_1.bias"),
        (lambda t: t.update({"transformer.h.2.ln_1.bias": torch.ones(32)}),
         r"a tensor too many: transformer.h.2.ln_1.bias"),
        (lambda t: t.update({"transformer.ln_f.bias": torch.ones(31)}), "ln_f.bias"),
        (lambda t: t.update({"lm_head.weight": torch.ones(97, 32)}), "output projection"),
    ],
    ids=["missing", "unexpected", "shape", "untied"],
)  # fmt: skip
def test_weights_that_are_not_those_of_the_configuration(gpt2, change, said):  # type: ignore[no-untyped-def]
    """transformers warns of them, and draws what is missing."""
    rewritten(gpt2, change)
    with pytest.raises(DataError, match=said):
        loaded(gpt2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_type", "gpt5"), ("model_type", "t5"), ("n_layer", "two"), ("n_head", 5)],
)
def test_configurations_of_no_causal_model(gpt2, name, value):  # type: ignore[no-untyped-def]
    fields = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps({**fields, name: value}))
    with pytest.raises(DataError):
        loaded(gpt2)


def test_what_is_no_model_is_said(tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "x.pt").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for source, text in [
        (str(tmp_path / "x.pt"), "a file there"),
        (str(tmp_path / "empty"), "config.json"),
        ("./nowhere", "nothing there"),
    ]:
        with pytest.raises(DataError, match=text):
            read_pretrained(source, 64)


def test_only_safetensors_are_read(gpt2):  # type: ignore[no-untyped-def]
    """A pickle may execute anything."""
    tensors = load_file(gpt2 / "model.safetensors")
    (gpt2 / "model.safetensors").unlink()
    torch.save(tensors, gpt2 / "pytorch_model.bin")
    with pytest.raises(DataError, match="safetensors"):
        loaded(gpt2)


def test_code_of_the_folder_is_not_executed(gpt2):  # type: ignore[no-untyped-def]
    fields = json.loads((gpt2 / "config.json").read_text())
    more = {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (gpt2 / "config.json").write_text(json.dumps({**fields, "model_type": "own", **more}))
    (gpt2 / "own.py").write_text("raise SystemExit(3)")
    with pytest.raises(DataError, match="own"):
        loaded(gpt2)


def test_the_context_is_at_most_that_of_the_weights(gpt2):  # type: ignore[no-untyped-def]
    assert read_pretrained(str(gpt2), 8).shape.block_size == 8
    assert read_pretrained(str(gpt2), 1024).shape.block_size == 64
    with pytest.raises(ConfigError, match=r"--model 2x2x64 is not the size of .* \(2x2x32\)"):
        read_pretrained(str(gpt2), 8, "2x2x64")
    read_pretrained(str(gpt2), 8, "2x2x32")


def test_vocabulary_must_fit(gpt2, tokenizer: Tokenizer):  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"512 tokens.*have 97"):
        require_vocabulary(read_pretrained(str(gpt2), 64), tokenizer)


def test_tokens_that_were_added_after_training_are_refused(tmp_path: Path) -> None:
    """Special ones that nothing writes may lie beyond the weights, as Gemma's of images do."""
    whole = transformers.AutoTokenizer.from_pretrained(folder_of_qwen(tmp_path))
    size = len(whole)
    weights = Pretrained(from_scratch("1x1x16", size, 64), tmp_path, "the weights")
    for token, special, chat, template in (
        ("<picture>", True, False, False), ("<sep>", False, False, False),
        ("<turn>", True, True, True), ("<turn>", True, True, False),
    ):  # fmt: skip
        ours = load_tokenizer(
            str(folder_of_qwen(tmp_path / f"{token}{template}", token, special, template))
        )
        assert ours.vocabulary_size == size + 1
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


def test_the_hub_without_a_network_says_what_to_bring(monkeypatch):  # type: ignore[no-untyped-def]
    # The variable HF_HUB_OFFLINE is read once, when the hub's client is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="could not be downloaded") as caught:
        read_pretrained("gpt2-that-is-not-there", 64)
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
    assert not task.tokenizer.of_no_model
    assert task.shape.config.hidden_size == 32


def test_a_folder_here_is_not_taken_for_the_hubs(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    write_qwen(tmp_path / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    task = SummarizeTask(model="Qwen3-0.6B", block_size=64)
    assert not task.tokenizer.of_no_model
    assert task.pretrained is not None and task.pretrained.source == "Qwen3-0.6B"


def test_weights_are_of_the_type_asked_for_and_apart(tmp_path, ops):  # type: ignore[no-untyped-def]
    """What a model learns is not in the next one."""
    write_qwen(tmp_path)
    rewritten(tmp_path, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    tensors = load_file(tmp_path / "model.safetensors")
    for weights, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        task = SummarizeTask(init=str(tmp_path), block_size=64, weights=weights)
        with torch.no_grad():
            for parameter in task.build_model(ops).parameters():
                parameter.add_(1.0)
        second = task.build_model(ops)
        assert {p.dtype for p in second.parameters()} == {dtype}
        for name, tensor in tensors.items():
            assert torch.equal(second.lm.state_dict()[name].float(), tensor.float())
        assert second.lm.model.rotary_emb.inv_freq.dtype == torch.float32


def test_unfilled_models_are_tied_and_compute_their_frequencies():  # type: ignore[no-untyped-def]
    """A checkpoint holds neither."""
    shape = from_scratch("Qwen3-0.6B", 61, 64)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 16}
    shape = Shape({**shape.fields, **small, "layer_types": ["full_attention"]}, 64)
    drawn, unfilled = (load_lm(shape, torch.float32, drawn=drawn) for drawn in (True, False))
    assert unfilled.lm_head.weight is unfilled.model.embed_tokens.weight
    assert torch.equal(unfilled.model.rotary_emb.inv_freq, drawn.model.rotary_emb.inv_freq)


def test_gpt2_starts_as_a_model_that_copies():  # type: ignore[no-untyped-def]
    """Queries are the keys, what a head gives back is what it took in, neighbours are alike."""
    lm = load_lm(from_scratch("2x2x64", 97, 128), torch.float32)
    attention = lm.transformer.h[1].attn
    query, key, value = attention.c_attn.weight.chunk(3, 1)
    assert torch.equal(query, key)
    assert torch.allclose(attention.c_proj.weight, value.T / 2)  # the root of twice the layers
    places = torch.nn.functional.normalize(lm.transformer.wpe.weight.detach())
    assert (places[1:] * places[:-1]).sum(-1).min() > 0.9
    assert float(lm.transformer.wpe.weight.std()) == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize(("text", "width"), [("gpt2-xl", 1600), ("2x4x64", 64)])
def test_sizes(text, width):  # type: ignore[no-untyped-def]
    assert parse_model_size(text)["n_embd"] == width


@pytest.mark.parametrize("text", ["gpt3", "2x3x64", "0x1x2"])
def test_sizes_that_are_none(text):  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        parse_model_size(text)


PARAMETERS = {
    "gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200,
    "SmolLM2-135M": 134515008, "SmolLM2-360M": 361821120, "SmolLM2-1.7B": 1711376384,
    "SmolLM3-3B": 3075098624, "Llama-3.1-8B": 8030261248, "Llama-3.2-1B": 1235814400,
    "Llama-3.2-3B": 3212749824, "Qwen2.5-0.5B": 494032768, "Qwen2.5-1.5B": 1543714304,
    "Qwen2.5-3B": 3085938688, "Qwen2.5-7B": 7615616512, "Qwen3-0.6B": 596049920,
    "Qwen3-1.7B": 1720574976, "Qwen3-4B": 4022468096, "Qwen3-8B": 8190735360,
    "Gemma-2-2B": 2614341888, "Gemma-3-270M": 268098176, "Gemma-3-1B": 999885952,
    "OLMo-2-1B": 1484916736, "Phi-3-mini": 3821079552, "Mistral-7B": 7248023552,
}  # fmt: skip
"""Parameters of the public models, as their cards give them."""


@pytest.mark.slow
def test_named_sizes_have_the_public_models_parameters():  # type: ignore[no-untyped-def]
    assert set(PARAMETERS) == set(SIZES)
    for name, parameters in PARAMETERS.items():
        fields = parse_model_size(name)
        with torch.device("meta"):
            config = config_of(fields, name)
            lm = transformers.AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in lm.parameters()) == parameters, name


@pytest.mark.parametrize("name", ["SmolLM3-3B", "Phi-3-mini"])
def test_a_named_size_takes_a_small_vocabulary(name):  # type: ignore[no-untyped-def]
    """Its token of padding lies beyond."""
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(from_scratch(name, 300, 64).config)
    assert lm.get_input_embeddings().weight.shape[0] == 300
