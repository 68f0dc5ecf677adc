"""The tokenizer: parity with the tokenizers library, files, what is no tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpukit.errors import DataError
from tpukit.tasks.llm.data import tokenizer_choice as module
from tpukit.tasks.llm.data.hub_tokenizer import HubTokenizer, tokenizer_from_bytes
from tpukit.tasks.llm.data.tokenizer import END_OF_TEXT, Tokenizer, first_tokens
from tpukit.tasks.llm.data.tokenizer_choice import load_tokenizer
from tpukit.tasks.llm.data.tokenizer_json import tokenizer_json


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_comes_back_and_is_cut_as_the_tokenizers_library_cuts_it(
    tokenizer: Tokenizer, text: str
) -> None:
    import tokenizers

    theirs = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer))
    tokens = tokenizer.encode(text)
    if "<|endoftext|>" not in text:
        assert theirs.encode(text).ids == tokens
    assert tokenizer.decode(tokens) == text
    assert tokenizer.end not in tokens


def test_files_round_trip(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.tiktoken").write_bytes(tokenizer.to_bytes())
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(tokenizer))
    assert load_tokenizer(str(tmp_path / "a.tiktoken")).to_bytes() == tokenizer.to_bytes()
    text = "Ann: it's 5 o'clock, isn't it? 😀\r\n  Bob:  <|endoftext|>"
    for name in ("a.tiktoken", "tokenizer.json", "."):
        read = load_tokenizer(str(tmp_path / name))
        assert read.vocabulary_size == tokenizer.vocabulary_size == 512
        assert read.encode(text) == tokenizer.encode(text) and read.ends == tokenizer.ends
        assert read.decode([*tokenizer.encode(text), tokenizer.end, 1]) == text


def test_a_directory_without_a_tokenizer_json_is_converted(tmp_path, tokenizer):  # type: ignore[no-untyped-def]
    """Vocabulary and merges, as GPT-2's first files."""
    whole = json.loads(tokenizer_json(tokenizer))
    (tmp_path / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = ["#version: 0.2", *map(" ".join, whole["model"]["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    read = load_tokenizer(str(tmp_path))
    text = "Ann: it's 5 o'clock <|endoftext|>"
    assert read.encode(text) == tokenizer.encode(text) and read.end == tokenizer.end
    again = tokenizer_from_bytes(read.to_bytes(), "the run")
    assert again.encode(text) == tokenizer.encode(text)


def test_transformers_loads_what_is_exported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(tokenizer))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "Ann: it's 5 o'clock, isn't it? 😀\r\n  Bob:  yes"
    assert theirs.encode(text) == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("other", ["prefix space", "no cuts", "begin", "begin and end"])
def test_other_rules_than_gpt2s_are_kept(tmp_path: Path, tokenizer: Tokenizer, other: str) -> None:
    """Of a byte-level BPE with GPT-2's end token; of a file that is not called tokenizer.json."""
    import tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.processors import TemplateProcessing

    theirs: Any = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer))
    theirs.pre_tokenizer = ByteLevel(other == "prefix space", use_regex=other != "no cuts")
    if other.startswith("begin"):
        form = "<|endoftext|> $A" + " <|endoftext|>" * other.endswith("end")
        theirs.post_processor = TemplateProcessing(form, special_tokens=[(END_OF_TEXT, 511)])
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(tokenizer))
    theirs.save(str(tmp_path / "mine.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.end}))
    ours = load_tokenizer(str(tmp_path / "mine.json"))
    assert isinstance(ours, HubTokenizer)
    text = "Ann: it's 5 o'clock\n\nBob: yes, the the"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.prefix == [511] * other.startswith("begin")


def test_a_long_text_is_read_no_further_than_needed(tokenizer: Tokenizer) -> None:
    text = "a" * 10_000_000
    tokens = first_tokens(tokenizer.encode, text, 50)
    assert len(tokens) == 50 and text.startswith(tokenizer.decode(tokens))
    assert first_tokens(tokenizer.encode, "short", 50) == tokenizer.encode("short")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.tiktoken", b"not base64 at all", "line 1"),
        ("x.tiktoken", b"YQ== 0\n", "255 of the 256"),
        ("x.json", b"{}", "Cannot read the tokenizer of .*x.json"),
        (".", b"", "Cannot read the tokenizer of "),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name != ".":
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path / name))


def test_a_missing_file_says_what_is_taken() -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer("nowhere.json")
    assert "--tokenizer" in str(caught.value.hint)


def test_no_network_says_which_file_to_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(DataError, match="GPT-2 tokenizer") as caught:
        load_tokenizer("gpt2")
    assert "tokenizer.json" in str(caught.value.hint)


def test_a_download_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOWNLOAD_SECONDS", 0.01)
    with pytest.raises(DataError, match="could not be downloaded"):
        load_tokenizer("gpt2")
