"""Pretrained weights that ranks read shard by shard: no host holds the model."""

import pytest
import torch
from runs import last_json, script

from tpukit.hardware.eager.deferred import deferred
from tpukit.tasks.llm.model.load import load_lm, shape_of

transformers = pytest.importorskip("transformers")


def saved(folder, **fields):
    """A Llama of these sizes, in several files."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, **fields}
    config = transformers.LlamaConfig(**sizes)
    torch.manual_seed(1)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    lm.save_pretrained(folder, max_shard_size="20MB")
    return config


SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def tensors(lm):
    return {**dict(lm.named_parameters()), **dict(lm.named_buffers())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_that_are_read_later_are_those_of_transformers(tmp_path, dtype, tied):
    shape = shape_of(saved(tmp_path, tie_word_embeddings=tied, **SMALL), 64)
    whole = load_lm(shape, dtype, folder=tmp_path)
    lm, later = deferred(lambda: load_lm(shape, dtype, folder=tmp_path))
    assert later is not None and lm.training == whole.training
    expected, found = tensors(whole), tensors(lm)
    assert sum(tensor.is_meta for tensor in found.values()) > 10
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        value = later.value(tensor) if tensor.is_meta else tensor
        assert torch.equal(value, expected[name]) and value.dtype == expected[name].dtype, name


def test_files_that_transformers_has_to_convert_are_read_at_once(tmp_path):
    from safetensors.torch import load_file, save_file

    shape = shape_of(saved(tmp_path, **SMALL), 64)
    [file] = tmp_path.glob("*.safetensors")
    kept = load_file(file)
    save_file({name.removeprefix("model."): t for name, t in kept.items()}, file, {"format": "pt"})
    lm, _ = deferred(lambda: load_lm(shape, torch.float32, folder=tmp_path))
    assert not any(tensor.is_meta for tensor in lm.parameters())
    assert torch.equal(lm.model.norm.weight, kept["model.norm.weight"])
    assert torch.equal(lm.model.embed_tokens.weight, kept["model.embed_tokens.weight"])


@pytest.mark.slow
def test_a_rank_holds_its_share_and_one_block(tmp_path):
    """Of 0.57 GB, four ranks each a quarter. Matrices are larger than what malloc keeps when it is
    freed."""
    width, wider = 1536, 6144
    saved(tmp_path / "small", **SMALL)
    saved(
        tmp_path / "large", hidden_size=width, intermediate_size=wider, num_hidden_layers=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    found = last_json(script("pretrained_rank.py", tmp_path, 4, ranks=4))
    block = 4 * (3 * width**2 + 3 * width * wider)
    assert found["equal"] and found["share"] > block
    assert found["peak"] <= 1.15 * (found["share"] + block), found
