"""Tokens equal transformers' `generate`; draws belong to rows."""

import copy
import json

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend

from tpukit.tasks.llm.generation import continuous_batching
from tpukit.tasks.llm.generation.batch_decoder import BatchDecoder
from tpukit.tasks.llm.generation.beam import BeamGenerator
from tpukit.tasks.llm.generation.continuous_batching import StreamingGenerator, sample_tokens
from tpukit.tasks.llm.generation.decoding import Decoding, Prompt, plan_generation
from tpukit.tasks.llm.model.lean import LanguageModel
from tpukit.tasks.llm.model.load import load_lm, shape_of
from tpukit.tasks.llm.model.rows import rows_of

transformers = pytest.importorskip("transformers")

VOCABULARY, END, POSITIONS = 60, 7, 96
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": POSITIONS}
LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS = {
    "mistral": LLAMA | {"sliding_window": 8},
    "gemma2": LLAMA | {"sliding_window": 8, "query_pre_attn_scalar": 12},
    "qwen3_moe": LLAMA | EXPERTS | {"num_experts": 4},
    "gpt_oss": LLAMA | EXPERTS | {"num_local_experts": 4, "sliding_window": 8},
    "deepseek_v3": LLAMA | EXPERTS | {
        "head_dim": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "gpt_neox": {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"},
    "opt": {
        "num_hidden_layers": 2, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48,
        "num_attention_heads": 2, "max_position_embeddings": POSITIONS, "dropout": 0.0,
    },
    "gemma4_text": LLAMA | {
        "sliding_window": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCABULARY, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip
"""Windows, capped scores, experts, sinks, keys wider than values, half of a head rotated, a model
within the model, layers that share keys and values."""


def model_pair(kind, fields, ops):  # type: ignore[no-untyped-def]
    """The same random weights in transformers and here, lively enough to end now and then."""
    torch.manual_seed(3)
    common = {"vocab_size": VOCABULARY, "bos_token_id": END, "eos_token_id": END}
    config = transformers.AutoConfig.for_model(kind, initializer_range=0.6, **(common | fields))
    theirs = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ).eval()
    lm = load_lm(shape_of(config, POSITIONS), torch.float32, drawn=False)
    lm.load_state_dict(theirs.state_dict())
    last_at_wanted = rows_of(config).last_at_wanted
    return theirs, LanguageModel(lm, ops, last_at_wanted=last_at_wanted).eval()


@pytest.fixture
def pair(ops):  # type: ignore[no-untyped-def]
    return model_pair("gpt2", GPT2, ops)


def make_prompts(count: int = 23) -> list[Prompt]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 40, count)
    return [
        Prompt(row, rng.integers(8, VOCABULARY, length).astype(np.int64))
        for row, length in enumerate(lengths)
    ]


def generate(  # type: ignore[no-untyped-def]
    model, prompts, decoding, *, batch_size=4, devices=1, ends=(END,), positions=POSITIONS
):
    backend = FakeBackend(devices=devices)
    plan = plan_generation(prompts, batch_size, devices, 1, decoding.num_beams)
    generator = (BeamGenerator if decoding.num_beams > 1 else StreamingGenerator)(
        model, backend, plan, decoding, positions, VOCABULARY, frozenset(ends)
    )
    return {row: tokens for chunk in plan.chunks for row, tokens in generator.run(chunk).items()}


def theirs_one_by_one(model, prompts, ends=(END,), **options):  # type: ignore[no-untyped-def]
    answers = {}
    for prompt in prompts:
        tokens = torch.from_numpy(prompt.tokens)[None]
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), pad_token_id=END,
            eos_token_id=[*ends], **options,
        )  # fmt: skip
        answer = made[0, len(prompt.tokens) :].tolist()
        stop = next((n for n, token in enumerate(answer, 1) if token in ends), None)
        answers[prompt.row] = answer[:stop]
    return answers


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}])
@pytest.mark.parametrize("devices", [1, 2])
def test_greedy_equals_transformers(pair, devices, options):  # type: ignore[no-untyped-def]
    theirs, ours = pair
    prompts, decoding = make_prompts(), Decoding(max_new_tokens=20, **options)
    expected = theirs_one_by_one(theirs, prompts, do_sample=False, max_new_tokens=20, **options)
    assert len({len(tokens) for tokens in expected.values()}) > 3, "the rows should end variously"
    assert generate(ours, prompts, decoding, devices=devices) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_architectures_equal_transformers(kind, ops):  # type: ignore[no-untyped-def]
    theirs, ours = model_pair(kind, KINDS[kind], ops)
    prompts = make_prompts(5)
    for options in ({}, {"num_beams": 3, "repetition_penalty": 1.3}):
        how = {"max_new_tokens": 12, **options}
        expected = theirs_one_by_one(theirs, prompts, do_sample=False, **how)
        assert generate(ours, prompts, Decoding(**how), batch_size=6) == expected


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_beams": 4, "early_stopping": True}]
)
def test_several_end_tokens_as_in_transformers(pair, options):  # type: ignore[no-untyped-def]
    """Each ends an answer; with many of them most of the best continuations of beams end."""
    theirs, ours = pair
    prompts, ends = make_prompts(), [*range(7, VOCABULARY, 3)]
    how = {"max_new_tokens": 20, "do_sample": False, **options}
    expected = theirs_one_by_one(theirs, prompts, ends, **how)
    assert len({tokens[-1] for tokens in expected.values()} & {*ends}) > 2
    assert generate(ours, prompts, Decoding(**how), batch_size=8, ends=ends) == expected


@pytest.mark.parametrize("options", [
    {"num_beams": 3},
    {"num_beams": 2, "length_penalty": 0.0},
    {"num_beams": 4, "early_stopping": True},
    {"num_beams": 2, "repetition_penalty": 1.4},
])  # fmt: skip
@pytest.mark.parametrize("devices", [1, 2])
def test_beams_equal_transformers(pair, options, devices):  # type: ignore[no-untyped-def]
    theirs, ours = pair
    prompts = make_prompts(9)
    expected = theirs_one_by_one(theirs, prompts, do_sample=False, max_new_tokens=16, **options)
    made = generate(
        ours, prompts, Decoding(max_new_tokens=16, **options), batch_size=8, devices=devices
    )
    assert made == expected


def test_nothing_is_compiled_for_generation(pair, compiled_without_inductor):  # type: ignore[no-untyped-def]
    """Each prompt's length and each tighter cache is a shape, used a few times."""
    _, model = pair
    decoding = Decoding(max_new_tokens=4)
    expected = generate(model, make_prompts(8), decoding)
    backend = FakeBackend()
    backend.compiles = True
    prepared = backend.prepare(model)
    plan = plan_generation(make_prompts(8), 4, 1, 1)
    generator = StreamingGenerator(prepared, backend, plan, decoding, 96, VOCABULARY, {END})
    found = {row: tokens for chunk in plan.chunks for row, tokens in generator.run(chunk).items()}
    assert found == expected
    assert backend.compilations() == 0
    tokens = torch.from_numpy(make_prompts(1)[0].tokens)[None]
    backend.call(prepared, lambda module: module(tokens))
    assert backend.compilations() == 1, "training goes on compiled"


def test_few_beams_are_copied(pair, monkeypatch):  # type: ignore[no-untyped-def]
    """A beam that goes on keeps its row; what moves takes the row of one that ended."""
    _, ours = pair
    orders = []
    reorder = BatchDecoder.reorder

    def noted(self, order, differing):  # type: ignore[no-untyped-def]
        orders.append(order)
        reorder(self, order, differing)

    monkeypatch.setattr(BatchDecoder, "reorder", noted)
    decoding = Decoding(max_new_tokens=16, num_beams=4, early_stopping=True)
    generate(ours, make_prompts(9), decoding, batch_size=8)
    for order in orders:
        assert all(order[source] == source for source in order)
    assert any(order[row] != row for order in orders for row in range(len(order)))


def test_a_tighter_cache_goes_on_alike(pair, monkeypatch):  # type: ignore[no-untyped-def]
    """Rows and positions go while rows are in the middle of their answers, the ring turned over."""
    theirs, ours = pair
    prompts = make_prompts()
    shapes = []
    keep = BatchDecoder.keep

    def noted(self, rows, positions):  # type: ignore[no-untyped-def]
        keep(self, rows, positions)
        shapes.append((self.shape.rows, self.shape.positions))

    monkeypatch.setattr(BatchDecoder, "keep", noted)
    monkeypatch.setattr(continuous_batching, "WORTH_TIGHTENING", 0.99)
    monkeypatch.setattr(plan_generation.__module__ + ".POSITION_STEP", 8)
    decoding = Decoding(max_new_tokens=50)
    made = generate(ours, prompts, decoding, batch_size=5)
    assert made == theirs_one_by_one(theirs, prompts, do_sample=False, max_new_tokens=50)
    rows, positions = (set(sizes) for sizes in zip(*shapes, strict=True))
    assert len(rows) > 2 and len(positions) > 1


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("devices", [1, 2])
def test_chunks_share_a_cache(pair, monkeypatch, options, devices):  # type: ignore[no-untyped-def]
    """A chunk of the same shape goes on in the cache of the one before it, and sees none of it."""
    _, ours = pair
    how = {"batch_size": 6, "devices": devices}
    prompts = [Prompt(p.row, p.tokens[:3]) for p in make_prompts(24)]
    whole = generate(ours, prompts, Decoding(12, **options), **how)
    monkeypatch.setattr(plan_generation.__module__ + ".BATCHES_PER_CHUNK", 1)
    caches, start = [], BatchDecoder.restart
    monkeypatch.setattr(BatchDecoder, "restart", lambda self: caches.append(self) or start(self))
    monkeypatch.setattr(continuous_batching, "WORTH_TIGHTENING", 0.0)
    assert generate(ours, prompts, Decoding(12, **options), **how) == whole
    assert len({*caches}) == 1 and len(caches) > 4


def test_a_context_that_is_full_ends_a_row(ops):  # type: ignore[no-untyped-def]
    _, model = model_pair("gpt2", GPT2 | {"n_positions": 24}, ops)
    made = generate(model, [Prompt(0, np.full(20, 9))], Decoding(50), positions=24)
    assert len(made[0]) <= 4


def test_draws_belong_to_rows(pair):  # type: ignore[no-untyped-def]
    _, ours = pair
    prompts = make_prompts()
    drawn = Decoding(10, do_sample=True, temperature=0.8, top_k=12, top_p=0.9, seed=5)
    alone = {p.row: generate(ours, [p], drawn)[p.row] for p in prompts}
    assert generate(ours, prompts, drawn, batch_size=6) == alone
    assert generate(ours, prompts, Decoding(10, do_sample=True, seed=6)) != alone


@pytest.mark.parametrize("options", [
    {"temperature": 0.7, "top_k": 15, "top_p": 0.8}, {"min_p": 0.1, "top_k": 0},
    {"typical_p": 0.6}, {"temperature": 1.3},
])  # fmt: skip
def test_draws_have_the_probabilities_of_transformers(pair, options):  # type: ignore[no-untyped-def]
    """Those that `generate` samples from, of its own list of processors."""
    theirs, _ = pair
    logits, decoding = torch.randn(1, VOCABULARY) * 2, Decoding(do_sample=True, **options)
    how = transformers.GenerationConfig(do_sample=True, **({"top_k": 50} | options))
    processors = theirs._get_logits_processor(generation_config=how, input_ids_seq_length=1)
    expected = processors(torch.zeros(1, 1, dtype=torch.long), logits).softmax(-1)[0]
    uniform = (torch.arange(20000) + 0.5) / 20000
    scores = decoding.processors()(None, logits).expand(20000, -1)
    drawn = sample_tokens(scores, uniform, decoding.top_k)
    measured = torch.bincount(drawn, minlength=VOCABULARY) / 20000
    assert (measured - expected).abs().max() < 1e-3


def test_what_a_file_of_the_weights_says_otherwise():  # type: ignore[no-untyped-def]
    said = {"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9, "eos_token_id": [0],
            "no_repeat_ngram_size": 3, "length_penalty": 2.0, "max_new_tokens": 9,
            "transformers_version": "5", "repetition_penalty": 1.1}  # fmt: skip
    assert Decoding().unlike(json.dumps(said)) == (
        "generation_config.json of the weights is not followed: do_sample=True, temperature=0.6,"
        " top_p=0.9, repetition_penalty=1.1, no_repeat_ngram_size=3. Options of `predict`:"
        " --do-sample --temperature 0.6 --top-p 0.9 --repetition-penalty 1.1."
    )
    followed = Decoding(do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    left = followed.unlike(json.dumps(said))
    assert left and left.endswith("is not followed: no_repeat_ngram_size=3.")
    assert Decoding().unlike(json.dumps({"temperature": 0.6, "eos_token_id": 2})) is None


def test_tokens_beyond_the_vocabulary_are_never_chosen(ops):  # type: ignore[no-untyped-def]
    _, model = model_pair("gpt2", GPT2 | {"vocab_size": VOCABULARY + 40}, ops)
    with torch.no_grad():
        model.lm.get_input_embeddings().weight[VOCABULARY:] *= 1e3
    for decoding in (Decoding(20), Decoding(20, num_beams=2), Decoding(20, do_sample=True)):
        made = generate(model, make_prompts(3), decoding)
        assert max(max(tokens) for tokens in made.values()) < VOCABULARY
