"""Families of transformers in the lean form beside the same models as they come."""

import copy
import os
import sys

import pytest
import torch

from tpukit.errors import ConfigError
from tpukit.hardware.backend import TorchOps
from tpukit.tasks.llm.model import lean
from tpukit.tasks.llm.model.lean import ATTENTION, LanguageModel
from tpukit.tasks.llm.model.load import Shape, load_lm, set_dropout, shape_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, CUT = 61, 40, 17
SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "initializer_range": 0.25, "pad_token_id": 8, "bos_token_id": 1, "eos_token_id": 7,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 4.0], "factor": 2.0,
        "partial_rotary_factor": 0.75}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CASES = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt2-scaled": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_inner": 100,
                    "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    "llama": {"rope_parameters": LLAMA3, "attention_bias": True, "head_dim": 16},
    "llama-dynamic": {"rope_parameters": DYNAMIC},
    "mistral": {"sliding_window": 9, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9,
               "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 9, "layer_types": MIXED},
    "phi3": {"sliding_window": 11, "rope_parameters": LONG},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "layer_types": MIXED, "sliding_window": 9},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.3},
    "gpt_neox": {"attention_dropout": 0.0},
}  # fmt: skip
"""Kinds of layers: one for each that the form treats in its own way."""


@pytest.fixture(params=CASES)
def pair(request):  # type: ignore[no-untyped-def]
    """A model as it comes, with its own attention, and in the lean form; the same weights."""
    kind = request.param.partition("-")[0]
    config = transformers.AutoConfig.for_model(kind, **SIZE, **CASES[request.param])
    theirs = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    lm = load_lm(shape_of(config, LENGTH), torch.float32, drawn=False)
    lm.load_state_dict(theirs.state_dict())
    return theirs.train(), LanguageModel(lm, TorchOps(), recompute=True).train()


def near(actual: torch.Tensor, expected: torch.Tensor, within: float = 1e-5) -> bool:
    """Equal to a part of the largest value."""
    most = max(1.0, float(expected.detach().abs().max()))
    return bool((actual - expected).abs().max() <= within * most)


def test_packed_rows_wanted_places_losses_and_gradients(pair, monkeypatch):  # type: ignore[no-untyped-def]
    theirs, ours = pair
    tokens = torch.randint(8, VOCABULARY, (2, LENGTH))
    tokens[:, 3] = 8  # padding's
    starts = torch.zeros_like(tokens)
    starts[0, CUT:] = CUT
    packed = ours(tokens, starts=starts)
    for found, alone in (
        (packed[0, :CUT], tokens[:1, :CUT]), (packed[0, CUT:], tokens[:1, CUT:]),
        (packed[1], tokens[1:]),
    ):  # fmt: skip
        assert near(found, theirs(alone, use_cache=False).logits[0])

    # Two groups of one row each: places count within a group.
    wanted = torch.tensor([[3, 16, 17, 39, 20], [0, 39, 5, 5, 22]])
    picked = ours(tokens, wanted, starts=starts)
    assert near(picked, torch.stack([packed[row][wanted[row]] for row in range(2)]))

    # The loss on half of the places, whole and in blocks, and all its gradients.
    labels = tokens.clone()
    labels[:, :20] = -100
    loss = theirs(tokens, labels=labels).loss
    loss.backward()
    wanted = torch.cat([torch.arange(19, 39), torch.arange(19, 39) + LENGTH])[None]
    for largest in (2**28, 500):
        monkeypatch.setattr(lean, "LARGEST_LOGITS", largest)
        ours.zero_grad()
        own = ours(tokens, wanted, labels=tokens[:, 20:].reshape(1, -1)).mean()
        own.backward()
        assert abs(own - loss) < 1e-5
        expected = dict(theirs.named_parameters())
        for name, parameter in ours.lm.named_parameters():
            gradient = torch.zeros(()) if parameter.grad is None else parameter.grad
            given = expected[name].grad
            given = torch.zeros_like(parameter) if given is None else given
            if name.endswith("c_attn.bias"):
                _, keys, _ = gradient.chunk(3)
                assert not keys.any(), "rounding alone, which Adam would scale up"
                gradient, given = (torch.cat([g[:32], g[64:]]) for g in (gradient, given))
            if name.endswith("embed_tokens.weight"):
                gradient, given = gradient[9:], given[9:]  # the padding token's is left out there
            assert near(gradient, given, 3e-5), name
    assert ours.lm.get_input_embeddings().weight.grad[8].any()


@pytest.mark.parametrize("kind", ["mixtral", "jetmoe"])
def test_the_loss_of_experts_is_that_of_transformers(kind):  # type: ignore[no-untyped-def]
    """Of the samples' tokens alone; the last layer's experts are chosen at all of them."""
    more = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    config = transformers.AutoConfig.for_model(kind, **SIZE, **more)
    theirs = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    )
    lm = load_lm(shape_of(config, LENGTH), torch.float32, drawn=False)
    lm.load_state_dict(theirs.state_dict())
    ours = LanguageModel(lm, TorchOps(), balances=True).train()
    tokens = torch.randint(9, VOCABULARY, (1, LENGTH))
    two = torch.zeros(2, CUT + LENGTH, dtype=torch.long)
    starts = torch.arange(CUT + LENGTH).repeat(2, 1)
    two[0, :CUT], two[0, CUT:] = tokens[0, :CUT], tokens[0]
    starts[0, :CUT], starts[0, CUT:] = 0, CUT
    padded, mask = torch.zeros(2, LENGTH, dtype=torch.long), torch.zeros(2, LENGTH)
    padded[0, :CUT], padded[1], mask[0, :CUT], mask[1] = tokens[0, :CUT], tokens[0], 1, 1
    wanted = torch.tensor([*range(CUT - 1), *range(CUT, CUT + LENGTH - 1), 0])[None]
    labels = torch.cat([tokens[0, 1:CUT], tokens[0, 1:], torch.tensor([-100])])[None]
    loss = theirs(padded, labels=padded.where(mask > 0, -100), attention_mask=mask).loss
    own = ours(two, wanted, labels=labels, starts=starts).sum() / (labels >= 0).sum()
    plain = ours.eval()(two, wanted, labels=labels, starts=starts).sum() / (labels >= 0).sum()
    assert abs(own - loss) < 1e-5 and loss - plain > 0.01
    loss.backward()
    own.backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in lm.named_parameters():
        assert name.endswith("embed_tokens.weight") or near(parameter.grad, expected[name].grad)


@pytest.mark.slow
def test_one_graph_of_torch_compile(pair):  # type: ignore[no-untyped-def]
    """GPUs compile the forward pass: what is done around modules must not break it."""
    tokens = torch.randint(8, VOCABULARY, (2, LENGTH))
    wanted, starts = torch.arange(9, 39).repeat(2, 1), torch.zeros_like(tokens)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(pair[1])(tokens, wanted, labels=tokens[:, 10:], starts=starts)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_a_copy_is_a_model_of_its_own():  # type: ignore[no-untyped-def]
    """An EMA is one."""
    shape = Shape({"model_type": "qwen3", **SIZE, "head_dim": 8}, LENGTH)
    model = LanguageModel(load_lm(shape, torch.float32), TorchOps())
    copied, tokens = copy.deepcopy(model), torch.randint(8, VOCABULARY, (1, LENGTH))
    before = model(tokens, torch.tensor([[3, 5]]))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(model(tokens, torch.tensor([[3, 5]])), before)
    assert not copied(tokens, torch.tensor([[3, 5]])).any()


def test_rotary_forms_are_taken_where_they_are_the_same():  # type: ignore[no-untyped-def]
    for kind, taken in (("qwen3", True), ("cohere", False), ("glm", False)):
        shape = Shape({"model_type": kind, **SIZE}, LENGTH)
        model = LanguageModel(load_lm(shape, torch.float32), TorchOps())
        module = sys.modules[type(model.lm).__module__]
        assert (module.apply_rotary_pos_emb is lean.rotate_by_halves) == taken, kind


def test_weights_in_bf16_attend_in_bf16():  # type: ignore[no-untyped-def]
    """Norms whose weights are fp32 leave queries in fp32, which no kernel of attention takes."""
    kinds = set()

    class Ops(TorchOps):
        def attention(self, query, key, value, bias=None, **how):  # type: ignore[no-untyped-def]
            kinds.add((query.dtype, key.dtype, value.dtype))
            return super().attention(query, key, value, bias, **how)

    lm = load_lm(Shape({"model_type": "qwen3", **SIZE, "head_dim": 8}, LENGTH), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        LanguageModel(lm, Ops())(torch.randint(8, VOCABULARY, (1, LENGTH)))
    assert kinds == {(torch.bfloat16,) * 3}
    assert lm.config._attn_implementation == ATTENTION


@pytest.mark.parametrize("name", ["past", "starts", "ops"])
def test_an_argument_that_a_layer_keeps_to_itself_is_an_error(name):  # type: ignore[no-untyped-def]
    """As layers of transformers 5.24 keep `cache`: attention without it would be another."""
    lm = load_lm(Shape({"model_type": "llama", **SIZE}, LENGTH), torch.float32)
    model = LanguageModel(lm, TorchOps())
    layer = lm.model.layers[1].self_attn
    handed_on = layer.forward
    layer.forward = lambda *given, **named: handed_on(
        *given, **{key: value for key, value in named.items() if key != name}
    )
    with pytest.raises(TypeError, match=name):
        model(torch.randint(8, VOCABULARY, (1, LENGTH)))


def test_dropout_is_that_of_embeddings_and_branches():  # type: ignore[no-untyped-def]
    config = transformers.AutoConfig.for_model("gpt2")
    set_dropout(config, 0.25)
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.25, 0.25, 0.0)
    set_dropout(config, 0.0)
    assert (config.resid_pdrop, config.embd_pdrop) == (0.0, 0.0), "whatever the file says"
    with pytest.raises(ConfigError, match=r"dropout 0.25: a qwen3 of transformers has none"):
        set_dropout(transformers.AutoConfig.for_model("qwen3"), 0.25)


def test_layers_that_are_not_computed_again_are_named():  # type: ignore[no-untyped-def]
    size = {"n_embd": 16, "dff": 16, "n_layer": 1, "n_head": 1, "vocab_size": VOCABULARY}
    lm = load_lm(Shape({"model_type": "ctrl", **size}, LENGTH), torch.float32)
    with pytest.raises(ConfigError, match="recompute: a ctrl of transformers has no layers for it"):
        LanguageModel(lm, TorchOps(), recompute=True)


def test_longrope_is_that_of_the_context():  # type: ignore[no-untyped-def]
    """transformers changes the factors with the text; short texts have those of the training."""
    config = transformers.AutoConfig.for_model(
        "phi3", **SIZE, rope_parameters=LONG, original_max_position_embeddings=64
    )
    theirs = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ).eval()
    tokens = torch.randint(8, VOCABULARY, (1, 80))
    with torch.no_grad():
        short = theirs(tokens[:, :40]).logits
    for length, text in ((64, tokens[:, :40]), (128, tokens)):
        lm = load_lm(shape_of(config, length), torch.float32, drawn=False)
        lm.load_state_dict(theirs.state_dict())
        ours = LanguageModel(lm, TorchOps()).eval()
        with torch.no_grad():
            assert near(ours(text), theirs(text).logits), length
    with torch.no_grad():
        assert near(ours(tokens)[:, :40], ours(tokens[:, :40]))
        assert not near(ours(tokens[:, :40]), short)
