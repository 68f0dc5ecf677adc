"""Models whose packed rows are not their samples alone: found before a run's first step."""

import os

import pytest
import torch
from torch import nn

from tpukit.errors import DataError
from tpukit.tasks.llm.model import lean, rows
from tpukit.tasks.llm.model.rows import rows_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def tried_anew(monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(rows, "_KNOWN", {})


def of(kind: str, **fields):  # type: ignore[no-untyped-def]
    return rows_of(transformers.AutoConfig.for_model(kind, **fields))


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma2", "deepseek_v3", "gpt_oss", "opt"])
def test_packed(kind):  # type: ignore[no-untyped-def]
    assert of(kind) == rows.Rows(packed=True)


def test_a_model_that_views_its_result_as_the_rows_it_was_given():  # type: ignore[no-untyped-def]
    """As StarCoder's: fewer places are no such rows."""
    assert of("gpt_bigcode") == rows.Rows(packed=True, last_at_wanted=False)


SHARED = {"num_hidden_layers": 7, "num_kv_shared_layers": 3}


@pytest.mark.parametrize(("kind", "fields"), [
    ("gemma4_text", {**SHARED, "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2
                     + ["full_attention"]}),
    ("gemma3", {}),
])  # fmt: skip
def test_a_small_copy_can_be_made(kind, fields):  # type: ignore[no-untyped-def]
    """Layers that share keys, the last of a given kind; a vision tower."""
    assert of(kind, **fields).packed


def test_samples_beyond_a_model_s_limits_are_tried_where_there_are_any():  # type: ignore[no-untyped-def]
    """Llama 4 attends within chunks."""
    config = transformers.AutoConfig.for_model("llama4_text")
    assert rows_of(config, config.attention_chunk_size).packed
    assert not rows_of(config, config.attention_chunk_size + 1).packed


def test_a_small_copy_scales_positions_as_its_model():  # type: ignore[no-untyped-def]
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    config = transformers.AutoConfig.for_model("llama", rope_parameters=scaled)
    assert rows.small(config).rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize("kind", ["phimoe", "mixtral"])
def test_noise_of_the_routing_is_no_difference(kind):  # type: ignore[no-untyped-def]
    noise = {"input_jitter_noise": 0.01} if kind == "phimoe" else {}
    assert of(kind, router_jitter_noise=0.1, **noise) == rows.Rows(packed=True)


@pytest.mark.parametrize("fields", [{}, {"multi_query": False, "alibi": True}])
def test_attention_of_a_list_of_its_own(fields):  # type: ignore[no-untyped-def]
    """Falcon's, with keys for each head too (falcon-rw)."""
    found = of("falcon", **fields)
    assert (found.packed, found.attention) == (False, "eager")
    assert found.reason == "its layers take attention from a list of their own"


@pytest.mark.parametrize(
    ("kind", "attention"), [("mamba", "tpukit"), ("jamba", "tpukit"), ("bloom", "eager")]
)
def test_padded(kind, attention):  # type: ignore[no-untyped-def]
    """State spaces, both kinds of layers, ALiBi."""
    found = of(kind)
    assert not found.packed and found.attention == attention
    assert "packed samples are not as they are alone" in found.reason


@pytest.mark.parametrize(
    ("kind", "said"), [("bert", "padded samples are not"), ("xlm", "M parameters")]
)
def test_refused(kind, said):  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=f"a {kind} cannot be .*{said}"):
        of(kind)


def test_what_a_form_breaks_is_found(monkeypatch):  # type: ignore[no-untyped-def]
    """A last layer that is wrong at wanted places is computed whole; wrong attention is refused."""
    right = lean.gather_positions
    monkeypatch.setattr(lean, "gather_positions", lambda x, wanted: right(x, wanted) * 1.01)
    with pytest.raises(DataError):
        of("qwen3")
    monkeypatch.setattr(lean, "gather_positions", right)
    monkeypatch.setattr(lean.LastLayer, "forward", lambda self, x, *a, **k: self._layer(x, *a, **k))
    rows._KNOWN.clear()
    assert of("qwen3") == rows.Rows(packed=True, last_at_wanted=False)


def test_the_generators_go_on_as_if_nothing_was_tried():  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    of("qwen3")
    assert torch.equal(torch.rand(2), expected)


def test_small_copies_have_each_kind_of_layer():  # type: ignore[no-untyped-def]
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = transformers.AutoConfig.for_model(
        "gemma3_text", num_hidden_layers=12, layer_types=kinds * 2, sliding_window=512
    )
    made = rows.small(config)
    assert set(made.layer_types) == {*kinds} and made.num_hidden_layers == 4
    assert made.sliding_window < rows.LENGTH
    meta = transformers.AutoModelForCausalLM.from_config(made)
    assert isinstance(meta, nn.Module)
    assert sum(p.numel() for p in meta.parameters()) < 1e5
