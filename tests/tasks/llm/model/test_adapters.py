"""Adapters of every kind, and weights in 4 bits, beside peft itself."""

import copy
import importlib.util

import pytest
import torch

from tpukit.errors import ConfigError, DataError, UsageError
from tpukit.hardware.backend import TorchOps
from tpukit.hardware.modules import require_unpacked
from tpukit.tasks.hub import adapters
from tpukit.tasks.llm.model import four_bits
from tpukit.tasks.llm.model.build import language_model
from tpukit.tasks.llm.model.load import load_lm, shape_of
from tpukit.tasks.llm.settings import parse_fields, read_fields
from tpukit.tasks.llm.task import SummarizeTask

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
packs = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100,
        "max_position_embeddings": 64, "tie_word_embeddings": True}  # fmt: skip
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 100, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 1}  # fmt: skip
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["qkv", "mlp_out"]}
KINDS = {
    "lora": LORA,
    "rslora": LORA | {"use_rslora": True},
    "dora": LORA | {"use_dora": True},
    "pissa": LORA | {"init_lora_weights": "pissa", "rank_pattern": {"q_proj": 2}},
    "pissa rslora": LORA | {"init_lora_weights": "pissa_niter_4", "use_rslora": True},
    "pissa dora": LORA | {"init_lora_weights": "pissa", "use_dora": True},
    "pissa, an embedding, another beside": LORA | {
        "init_lora_weights": "pissa", "target_modules": ["qkv", "embed_tokens"],
        "modules_to_save": ["lm_head"],
    },
    "olora": LORA | {"init_lora_weights": "olora"},
    "one layer": LORA | {"layers_to_transform": [1]},
    "an embedding beside": LORA | {"modules_to_save": ["embed_tokens"]},
    "one for both ends": LORA | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "an embedding": LORA | {"target_modules": ["qkv", "embed_tokens"]},
    "mixtral's parameters": LORA | {
        "target_modules": ["qkv"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "loha": {"peft_type": "LOHA", "r": 4, "target_modules": ["qkv"]},
    "randlora": {"peft_type": "RANDLORA", "r": 4, "target_modules": ["qkv"]},
    "all linear layers": LORA | {"target_modules": ["all-linear"]},
    "ia3": {"peft_type": "IA3", "target_modules": ["key", "value", "mlp_out"],
            "feedforward_modules": ["down_proj"]},
    "of gpt2": LORA,
    "pissa of gpt2": LORA | {"init_lora_weights": "pissa"},
}  # fmt: skip
ALONE = ("one for both ends", "randlora")
"""Those of which peft takes no second one."""
TOKENS = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))


def model(kind="qwen3", **more):
    size = (GPT2 if kind == "gpt2" else SIZE) | more
    config = transformers.AutoConfig.for_model(kind, **size)
    lm = load_lm(shape_of(config, 64), torch.float32)
    lm.set_attn_implementation("eager")
    return lm


@torch.no_grad()
def logits(lm):
    return lm.eval()(TOKENS).logits


def learned(base, fields):
    """A copy of a model whose adapter has learned three steps."""
    lm = copy.deepcopy(base)
    adapters.add_adapter(lm, fields, keep_start=adapters.takes_part(fields))
    torch.testing.assert_close(logits(lm), logits(base), rtol=0, atol=1e-6)
    optimizer = torch.optim.AdamW((p for p in lm.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(3):
        lm.train()(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return lm


def trained(lm):
    return [name for name, p in lm.named_parameters() if p.requires_grad]


def write(lm, folder):
    for name, content in adapters.adapter_files(lm).items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_is_peft_s(name, tmp_path):
    more = {"tie_word_embeddings": False} if "embedding" in name else {}
    kind = next((kind for kind in ("gpt2", "mixtral") if kind in name), "qwen3")
    base = model(kind, **more)
    lm = learned(base, KINDS[name])
    found = logits(lm)
    assert (found - logits(base)).abs().max() > 1e-3
    active = [id(layer._active_adapter) for _, layer in adapters._layers(lm)]
    with adapters.as_at_start(lm):
        torch.testing.assert_close(logits(lm), logits(base), rtol=0, atol=1e-6)
    assert torch.equal(logits(lm), found)
    assert active == [id(layer._active_adapter) for _, layer in adapters._layers(lm)]
    write(lm, tmp_path)
    # As a run is read for its export.
    restored = copy.deepcopy(base)
    takes = adapters.takes_part(KINDS[name])
    adapters.add_adapter(restored, KINDS[name], fresh=False, keep_start=takes)
    restored.load_state_dict(lm.state_dict())
    assert adapters.adapter_files(restored) == adapters.adapter_files(lm)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(logits(theirs), found, rtol=0, atol=1e-6)
    read = copy.deepcopy(base)
    fields = read_fields(tmp_path)
    adapters.add_adapter(read, fields)
    assert trained(read) == trained(lm) != []
    read = copy.deepcopy(base)
    keep_start = name not in ALONE
    adapters.add_adapter(read, fields, keep_start=keep_start)
    adapters.load_adapter(read, tmp_path)
    torch.testing.assert_close(logits(read), found, rtol=0, atol=1e-6)
    with adapters.as_at_start(read):
        at_start = found if keep_start else logits(base)
        torch.testing.assert_close(logits(read), at_start, rtol=0, atol=1e-6)
    adapters.merge_adapter(lm)
    assert lm.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(logits(lm), found, rtol=0, atol=1e-6)


def test_an_update_of_bf16_weights_is_rounded_once():
    lm = learned(model(), LORA)
    layer = lm.model.layers[0].mlp.down_proj
    layer.get_base_layer().to(torch.bfloat16)
    update = (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).double() * 2
    wanted = (layer.weight.double() + update).to(torch.bfloat16)
    adapters.merge_adapter(lm)
    merged = lm.model.layers[0].mlp.down_proj.weight
    assert merged.dtype == torch.bfloat16
    assert (merged == wanted).float().mean() > 0.99  # the product above is fp32's


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": ["q_prj"]}, "a qwen3 has no q_prj"),
        ({"use_dorra": True}, "has no field 'use_dorra'"),
        ({"peft_type": "LORRA"}, "has no peft_type 'LORRA'"),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}, "has no field 'r'"),
        ({"init_lora_weights": "eva"}, "'eva' is made from data"),
        ({"trainable_token_indices": [1]}, "cannot be merged"),
        ({"peft_type": "ADALORA"}, "needs a training loop of its own"),
        ({"lora_bias": True}, "has no bias"),
        ({"modules_to_save": "header"}, "modules_to_save: a qwen3 has no header"),
        ({"rank_pattern": "q_proj"}, "peft cannot adapt this model so"),
        (parse_fields("use_dora=no"), "use_dora 'no' is not true or false"),
        ({"r": -1}, "`r` should be a positive integer"),
        ({"layers_to_transform": [7]}, "there is no layer 7"),
        ({"modules_to_save": ["embed_tokens"]}, "embeddings are its output projection"),
        ({"target_modules": ".*embed_tokens"}, "embeddings are its output projection"),
    ],
)
def test_what_cannot_be_adapted_is_named(fields, said):
    lm = model()
    with pytest.raises(ConfigError, match=said):
        adapters.add_adapter(lm, LORA | fields)


def test_python_s_words_are_values():
    assert parse_fields("use_dora=False,use_rslora=True,layers_to_transform=None,r=4") == {
        "use_dora": False, "use_rslora": True, "layers_to_transform": None, "r": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "saved", "adapted"),
    [
        ("modules_to_save=lm_head", {"lm_head"}, {"q_proj", "k_proj", "v_proj", "down_proj"}),
        ("exclude_modules=k_proj|v_proj", set(), {"q_proj", "down_proj"}),
        ("target_modules=k_proj|mlp_out", set(), {"k_proj", "down_proj"}),
        ("target_modules=.*k_proj", set(), {"k_proj"}),
    ],
)
def test_words_are_names_of_modules(text, saved, adapted):
    """peft takes a word for a pattern of whole names, or for its letters."""
    lm = model(tie_word_embeddings=False)
    adapters.add_adapter(lm, LORA | parse_fields(text))
    own = [name.split(".") for name in trained(lm)]
    assert {n[n.index("modules_to_save") - 1] for n in own if "modules_to_save" in n} == saved
    assert {n[n.index("lora_A") - 1] for n in own if "lora_A" in n} == adapted


def test_another_model_s_adapter_is_refused(tmp_path):
    write(learned(model(), LORA), tmp_path)
    lm = model()
    adapters.add_adapter(lm, LORA | {"target_modules": ["qkv"]})
    with pytest.raises(DataError, match=r"does not fit these weights: 'model\.layers\.0\.mlp"):
        adapters.load_adapter(lm, tmp_path)
    with pytest.raises(DataError, match="lora_init takes a directory"):
        read_fields(tmp_path / "none")


# -- weights in 4 bits ----------------------------------------------------------------------------
def packed(base):
    lm = copy.deepcopy(base)
    four_bits.in_four_bits(lm)
    adapters.add_adapter(lm, LORA)
    return lm


def losses(lm):
    trained = [p for p in lm.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(10):
        # An evaluation between steps must not change how weights are packed.
        logits(lm)
        loss = lm.train()(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@packs
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_steps_are_those_of_peft_s_own_loop(kind, tmp_path):
    base = model(kind)
    base.save_pretrained(tmp_path)
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=how, device_map="cpu", dtype=torch.float32,
        attn_implementation="eager",
    )  # fmt: skip
    for layer in theirs.modules():
        layer.support_avx512bf16_for_cpu = False
    lm = packed(base)
    targets = sorted(lm.peft_config["default"].target_modules)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    own = {n: p for n, p in lm.named_parameters() if p.requires_grad}
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(own[name.removeprefix("base_model.model.")].data)
    found = losses(lm)
    assert found == pytest.approx(losses(theirs), abs=1e-6) and found[-1] < found[0] - 0.1


@packs
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_merged_weights_are_those_that_were_trained_beside(kind):
    base = model(kind)
    lm = packed(base)
    losses(lm)
    found = logits(lm)
    four_bits.keep_trained_alone(lm)
    state = lm.state_dict()
    assert len(state) == 4 * (4 if kind == "qwen3" else 2)
    plain = copy.deepcopy(base)
    four_bits.rounded_to_four_bits(plain)
    assert (logits(plain) - logits(base)).abs().max() > 1e-3
    adapters.add_adapter(plain, LORA, fresh=False)
    assert not plain.load_state_dict(state, strict=False).unexpected_keys
    adapters.merge_adapter(plain)
    torch.testing.assert_close(logits(plain), found, rtol=0, atol=1e-6)
    assert plain.state_dict().keys() == base.state_dict().keys()


def test_an_adapter_that_needs_whole_weights_is_refused():
    task = SummarizeTask(init="a", weights="nf4", adapter="peft_type=LOHA")._with(
        shape=shape_of(model().config, 64), pretrained=None
    )
    with pytest.raises(ConfigError, match="weights nf4: LOHA of peft computes with the whole"):
        language_model(task, TorchOps())


@packs
def test_packed_weights_take_a_sixth_and_are_not_split():
    lm = model()
    whole = lm.model.layers[0].mlp.up_proj.weight.nbytes
    four_bits.in_four_bits(lm)
    assert lm.model.layers[0].mlp.up_proj.weight.nbytes * 8 == whole
    assert isinstance(lm.lm_head, torch.nn.Linear) and lm.lm_head.weight.dtype == torch.float32
    with pytest.raises(UsageError, match=r"--shard: '.*weight' is packed into 4 bits"):
        require_unpacked(lm, "--shard")
