"""Every family of models beside transformers, from small random configurations."""

import copy
import dataclasses
import json
import os
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from safetensors.torch import load_file, save_file

from tpukit.errors import ConfigError, DataError
from tpukit.hardware.backend import TorchOps
from tpukit.tasks.summarize.export import export_hugging_face
from tpukit.tasks.summarize.generation.beam import BeamGenerator
from tpukit.tasks.summarize.generation.continuous_batching import StreamingGenerator
from tpukit.tasks.summarize.generation.decoding import Decoding, Prompt, plan_generation
from tpukit.tasks.summarize.model import decoder
from tpukit.tasks.summarize.model.decoder import LanguageModel
from tpukit.tasks.summarize.model.families import FAMILIES, named_sizes
from tpukit.tasks.summarize.model.lora import (
    LoraConfig,
    add_lora,
    load_adapter,
    merge_lora,
    parse_layers,
    parse_targets,
    peft_adapter,
    read_adapter,
)
from tpukit.tasks.summarize.model.transformers_config import read_shape
from tpukit.tasks.summarize.model.weights import (
    SIZES,
    Pretrained,
    cropped,
    parse_model_size,
    read_pretrained,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

VOCABULARY, END, LENGTH = 61, 7, 40
SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
        "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 4.0],
        "partial_rotary_factor": 0.75}  # fmt: skip
GLOBAL_AND_LOCAL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]
CASES = {
    "llama": {},
    "llama-llama3-biases": {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True,
                            "tie_word_embeddings": True, "head_dim": 16},
    "llama-yarn": {"rope_parameters": YARN},
    "llama-yarn-mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2,
                                                     "beta_fast": 16, "truncate": False}},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "mistral-window": {"sliding_window": 9, "head_dim": 8},
    "mistral-wide": {"sliding_window": 64},
    "qwen2": {"sliding_window": None},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9,
               "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9,
                    "rope_parameters": GLOBAL_AND_LOCAL, "layer_types": ALTERNATE},
    # transformers writes both names of the pattern.
    "gemma3_text-wide": {"head_dim": 16, "sliding_window": 64, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": 11},
    "phi3-longrope": {"rope_parameters": LONG, "original_max_position_embeddings": 24},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
}  # fmt: skip
CLASSES = {"gemma3_text": "Gemma3TextConfig", "smollm3": "SmolLM3Config"}


@cache
def theirs_of(name: str):  # type: ignore[no-untyped-def]
    """The model of transformers with random weights, norms and biases included."""
    torch.manual_seed(5)
    kind = name.partition("-")[0]
    config = getattr(transformers, CLASSES.get(kind, f"{kind.capitalize()}Config"))
    model = getattr(transformers, FAMILIES[kind].architecture)._from_config(
        config(**SIZE, **CASES[name]), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


@pytest.fixture
def pair(request, tmp_path: Path):  # type: ignore[no-untyped-def]
    theirs = theirs_of(request.param)
    theirs.save_pretrained(tmp_path / "hf")
    pretrained = read_pretrained(str(tmp_path / "hf"))
    ours = LanguageModel(pretrained.config, TorchOps()).eval()
    ours.load_state_dict(pretrained.tensors)
    return theirs, ours


every_family = pytest.mark.parametrize("pair", CASES, indirect=True)


def near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to 1e-5 of the largest value."""
    return bool((actual - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())))


def padded(lengths: list[int], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(len(lengths), LENGTH, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        part = slice(LENGTH - length, LENGTH) if left else slice(length)
        tokens[row, part] = torch.randint(8, VOCABULARY, (length,))
        mask[row, part] = 1
    return tokens, mask


@every_family
def test_logits_loss_gradients_and_packed_rows(pair, tmp_path, tokenizer, monkeypatch):  # type: ignore[no-untyped-def]
    theirs, ours = pair
    lengths = [LENGTH, 17, 23]
    for left in (False, True):
        tokens, mask = padded(lengths, left=left)
        expected = theirs(tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0))
        for row, length in enumerate(lengths):
            alone = ours(tokens[row][mask[row] == 1][None])[0]
            assert near(alone, expected.logits[row][mask[row] == 1]), (left, length)

    # Rows of several samples: each as if alone.
    tokens = torch.randint(8, VOCABULARY, (2, LENGTH))
    starts = torch.zeros_like(tokens)
    starts[0, 17:] = 17
    packed = ours(tokens, starts=starts)
    assert near(packed[0, :17], ours(tokens[:1, :17])[0])
    assert near(packed[0, 17:], ours(tokens[:1, 17:])[0])

    # The loss on half of the places, whole and in blocks, and all its gradients.
    labels = tokens.clone()
    labels[:, :20] = -100
    loss = theirs(tokens, labels=labels).loss
    theirs.zero_grad()
    loss.backward()
    wanted = torch.cat([torch.arange(19, 39), torch.arange(19, 39) + LENGTH])[None]
    for largest in (2**28, 500):
        monkeypatch.setattr(decoder, "LARGEST_LOGITS", largest)
        ours.zero_grad()
        own = ours(tokens, wanted, labels=tokens[:, 20:].reshape(1, -1)).mean()
        own.backward()
        assert abs(own - loss) < 1e-5
        theirs.save_pretrained(tmp_path / "gradients", state_dict={
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in theirs.named_parameters()
        })  # fmt: skip
        expected = read_pretrained(str(tmp_path / "gradients")).tensors
        for name, parameter in ours.named_parameters():
            assert near(parameter.grad, expected[name]), name

    export_hugging_face(tmp_path / "back", ours.config, ours.state_dict(), tokenizer)
    again = read_pretrained(str(tmp_path / "back"))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.tensors[name], tensor), name
    loaded = type(theirs).from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, theirs(tokens).logits)
    assert loaded.generation_config.eos_token_id == tokenizer.end


@every_family
def test_greedy_and_beam_tokens(pair):  # type: ignore[no-untyped-def]
    """Beside left-padded rows: past a window, in a ring that turns over, prompts of all lengths."""
    theirs, ours = pair
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(row, rng.integers(8, VOCABULARY, length))
        for row, length in enumerate([3, 31, 12, 5, 22])
    ]
    tokens = torch.zeros(len(prompts), 31, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for prompt in prompts:
        tokens[prompt.row, 31 - len(prompt.tokens) :] = torch.from_numpy(prompt.tokens)
        mask[prompt.row, 31 - len(prompt.tokens) :] = 1
    for beams, kind in ((1, StreamingGenerator), (3, BeamGenerator)):
        decoding = Decoding(max_new_tokens=14, num_beams=beams)
        made = theirs.generate(
            tokens, attention_mask=mask, max_new_tokens=14, num_beams=beams, do_sample=False,
            use_cache=beams == 1,
        )[:, 31:].tolist()  # fmt: skip
        expected = [row[: row.index(END) + 1] if END in row else row for row in made]
        plan = plan_generation(prompts, 2 * beams, 1, 1, beams)
        generator = kind(ours, FakeBackend(), plan, decoding, 96, VOCABULARY, {END})
        found = {r: t for chunk in plan.chunks for r, t in generator.run(chunk).items()}
        assert [found[row] for row in range(len(prompts))] == expected


@pytest.mark.parametrize("pair", ["phi3-longrope"], indirect=True)
def test_longrope_is_that_of_the_context(pair, tmp_path, tokenizer):  # type: ignore[no-untyped-def]
    """transformers changes the factors with the text: an export has those of its training."""
    theirs, ours = pair
    text = torch.randint(8, VOCABULARY, (1, 20))
    short = cropped(read_pretrained(str(tmp_path / "hf")), 24)
    with torch.no_grad():
        expected = theirs(text).logits
        assert near(model_of(short)(text), expected)
        assert not near(ours(text), expected)
        export_hugging_face(tmp_path / "out", ours.config, ours.state_dict(), tokenizer)
        exported = type(theirs).from_pretrained(tmp_path / "out", attn_implementation="eager")
        assert near(ours(text), exported.eval()(text).logits)


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
        with torch.device("meta"):
            model = LanguageModel(parse_model_size(name), TorchOps())
        assert sum(p.numel() for p in model.parameters()) == parameters, name
    assert parse_model_size("Gemma-3-1B").windowed[:6] == (0, 1, 2, 3, 4, 6)
    fields = {**named_sizes()["Gemma-2-2B"]}
    del fields["hub"], fields["rms_norm_eps"]
    assert read_shape(fields, Path()).norm_eps == 1e-6, "the default of transformers"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Phi-3-mini", {"attention_bias": False, "mlp_bias": False, "full_attn_mod": 1}),
        ("Gemma-2-2B", {"hidden_act": "gelu_pytorch_tanh"}),
        ("Gemma-3-1B", {"hidden_act": "gelu_pytorch_tanh"}),
        ("Mistral-7B", {"attention_bias": False}),
    ],
)
def test_what_public_configurations_say_beside(name, said):  # type: ignore[no-untyped-def]
    """Fields of the public files that their family does not read, with the one value it has."""
    fields = {key: value for key, value in named_sizes()[name].items() if key != "hub"}
    assert read_shape({**fields, **said}, Path(name)).family == fields["model_type"]
    for key, value in said.items():
        with pytest.raises(DataError, match=key):
            read_shape({**fields, key: "relu" if value is not False else True}, Path(name))


@pytest.mark.parametrize(
    ("pair", "layers"),
    [*((name, None) for name in CASES if "-" not in name), ("qwen3", "0,2"), ("phi3", "1-2")],
    indirect=["pair"],
)
def test_adapters_are_those_of_peft(pair, layers, tmp_path, tokenizer):  # type: ignore[no-untyped-def]
    """Made here and loaded by peft, and the other way round; merged on export."""
    peft = pytest.importorskip("peft")
    theirs, ours = pair
    theirs, tokens = copy.deepcopy(theirs), torch.randint(8, VOCABULARY, (2, LENGTH))
    targets = parse_targets("qkv,attention_out,mlp_in,mlp_out")
    lora = LoraConfig(3, 6.0, targets, layers=layers and parse_layers(layers))
    add_lora(ours, lora)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith((".up", ".down")):
                parameter.normal_(std=0.2)
    state = ours.state_dict()
    merged, adapter = merge_lora(state, lora.scale), peft_adapter(state, lora, ours.config)
    export_hugging_face(tmp_path / "out", ours.config, merged, tokenizer, adapter=adapter)
    with warnings.catch_warnings(action="error", category=UserWarning):  # of missing keys
        loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "out" / "adapter")
    with torch.no_grad():
        assert near(ours(tokens), loaded(tokens).logits)
        assert near(model_of(read_pretrained(str(tmp_path / "out")))(tokens), loaded(tokens).logits)

    loaded.save_pretrained(tmp_path / "theirs")
    with pytest.raises(DataError) as found:
        read_pretrained(str(tmp_path / "theirs"))
    assert f"--set lora_init={tmp_path / 'theirs'}" in str(found.value.hint)
    fields = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    weights = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    tensors, again = read_adapter(weights, fields, ours.config)
    assert (again.rank, again.alpha, set(again.targets)) == (
        3, 6.0, {name for name in lora.targets if hasattr(ours.blocks[0], name)}
    )  # fmt: skip
    fresh = LanguageModel(ours.config, TorchOps())
    add_lora(fresh, lora)
    load_adapter(fresh, tmp_path / "theirs", lora)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, state[name])
        assert torch.equal(fresh.state_dict()[name], tensor)
    with pytest.raises(ConfigError, match="rank 3"):
        load_adapter(fresh, tmp_path / "theirs", LoraConfig(4, 6.0, lora.targets))
    smaller = {name: tensor[..., :-1].contiguous() for name, tensor in weights.items()}
    save_file(smaller, tmp_path / "theirs" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="weights that it was trained beside"):
        load_adapter(fresh, tmp_path / "theirs", lora)
    save_file(weights, tmp_path / "theirs" / "adapter_model.safetensors")
    for other in ({"init_lora_weights": "pissa"}, {"alora_invocation_tokens": [1]}):
        with pytest.raises(DataError, match=f"{next(iter(other))}.* is not known"):
            read_adapter(weights, fields | other, ours.config)
    if layers:
        assert again.layers == lora.layers
        assert fields["layers_to_transform"] == list(lora.layers)
        every = LanguageModel(ours.config, TorchOps())
        add_lora(every, dataclasses.replace(lora, layers=None))
        with pytest.raises(ConfigError, match="and layers"):
            load_adapter(every, tmp_path / "theirs", dataclasses.replace(lora, layers=None))


def model_of(pretrained: Pretrained) -> LanguageModel:
    model = LanguageModel(pretrained.config, TorchOps()).eval()
    model.load_state_dict(pretrained.tensors)
    return model
