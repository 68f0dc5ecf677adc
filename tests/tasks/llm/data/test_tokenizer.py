"""The tokenizer: any text comes back; files of tiktoken and of directories; what is none."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpukit.errors import DataError
from tpukit.tasks.llm.data.prompt import first_tokens
from tpukit.tasks.llm.data.rows import Columns
from tpukit.tasks.llm.data.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERN,
    Tokenizer,
    tokenizer_from_bytes,
    tokenizer_of_ranks,
)
from tpukit.tasks.llm.data.tokenizer_choice import load_tokenizer, trained_tokenizer

TEXT = "Ann: it's 5 o'clock, isn't it? 😀\r\n  Bob:  <|endoftext|>"


def whole_of(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.files["tokenizer.json"])


@pytest.fixture(scope="session")
def ranks(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Of the trained tokenizer, as tiktoken has them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary = whole_of(tokenizer)["model"]["vocab"]
    return {bytes(map(byte_of.__getitem__, text)): rank for text, rank in vocabulary.items()}


def lines_of(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_comes_back_with_the_tokens_of_tiktoken(
    tokenizer: Tokenizer, ranks: dict[bytes, int], text: str
) -> None:
    theirs = tiktoken.Encoding(
        "test", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 511}
    )
    tokens = theirs.encode_ordinary(text)
    for ours in (tokenizer, tokenizer_of_ranks(lines_of(ranks), "the test")):
        assert ours.encode(text) == tokens and ours.end == 511 not in tokens
        assert ours.decode(tokens) == text


@pytest.mark.parametrize("name", ["a.tiktoken", "ended.tiktoken", "tokenizer.json", "."])
def test_files_round_trip(
    tmp_path: Path, tokenizer: Tokenizer, ranks: dict[bytes, int], name: str
) -> None:
    (tmp_path / "a.tiktoken").write_bytes(lines_of(ranks))
    (tmp_path / "ended.tiktoken").write_bytes(lines_of({**ranks, END_OF_TEXT.encode(): 511}))
    (tmp_path / "tokenizer.json").write_text(tokenizer.files["tokenizer.json"])
    read = load_tokenizer(str(tmp_path / name))
    for again in (read, tokenizer_from_bytes(read.to_bytes(), "the test")):
        assert again.vocabulary_size == tokenizer.vocabulary_size == 512
        assert again.encode(TEXT) == tokenizer.encode(TEXT) and again.ends == tokenizer.ends
        assert again.decode([*tokenizer.encode(TEXT), tokenizer.end, 1]) == TEXT


def test_a_directory_without_a_tokenizer_json_is_converted(tmp_path, tokenizer):  # type: ignore[no-untyped-def]
    """Vocabulary and merges, as GPT-2's first files."""
    model = whole_of(tokenizer)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps({**model["vocab"], END_OF_TEXT: 511}))
    merges = ["#version: 0.2", *map(" ".join, model["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    read = load_tokenizer(str(tmp_path))
    text = "Ann: it's 5 o'clock <|endoftext|>"
    assert read.encode(text) == tokenizer.encode(text) and read.end == tokenizer.end


@pytest.mark.parametrize("other", ["prefix space", "no cuts", "begin", "begin and end"])
def test_other_rules_than_gpt2s_are_kept(tmp_path: Path, tokenizer: Tokenizer, other: str) -> None:
    """Of a byte-level BPE with GPT-2's end token; of a file that is not called tokenizer.json."""
    import tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.processors import TemplateProcessing

    theirs: Any = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"])
    theirs.pre_tokenizer = ByteLevel(other == "prefix space", use_regex=other != "no cuts")
    if other.startswith("begin"):
        form = "<|endoftext|> $A" + " <|endoftext|>" * other.endswith("end")
        theirs.post_processor = TemplateProcessing(form, special_tokens=[(END_OF_TEXT, 511)])
    (tmp_path / "tokenizer.json").write_text(tokenizer.files["tokenizer.json"])
    theirs.save(str(tmp_path / "mine.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.end}))
    ours = load_tokenizer(str(tmp_path / "mine.json"))
    text = "Ann: it's 5 o'clock\n\nBob: yes, the the"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.prefix == [511] * other.startswith("begin")


def special_words(kind: str) -> Any:
    """A tokenizer whose model has its special tokens among its words."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    model, trainer, how = {
        "Unigram": (models.Unigram(), trainers.UnigramTrainer, {"unk_token": "<unk>"}),
        "BPE": (models.BPE(unk_token="<unk>", ignore_merges=True), trainers.BpeTrainer, {}),
        "byte-level": (models.BPE(), trainers.BpeTrainer, {}),
        "WordPiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer, {}),
        "WordLevel": (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer, {}),
    }[kind]
    made: Any = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "byte-level":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        how = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    texts = ["Ann came. <eos> [x] Be: Who?", *"abcdefghijklmnopqrstuvwxyz<>"] * 3
    special = ["<pad>", "<eos>", "<unk>"]
    made.train_from_iterator(
        texts, trainer(vocab_size=330, special_tokens=special, show_progress=False, **how)
    )
    made.add_tokens(["[x]"])
    return made


@pytest.mark.parametrize("kind", ["Unigram", "BPE", "byte-level", "WordPiece", "WordLevel"])
def test_special_tokens_in_texts_are_text_in_every_model(tmp_path: Path, kind: str) -> None:
    theirs = special_words(kind)
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    ours = load_tokenizer(str(tmp_path))
    assert ours.encode("Ann [x] came.") == theirs.encode("Ann [x] came.").ids
    pad, end = (theirs.token_to_id(text) for text in ("<pad>", "<eos>"))
    for text in ("Ann <eos> [x]", "<eos>", "<pad> <unk>", "Who? \uff1ceos\uff1e"):
        assert not {pad, end} & {*ours.encode(text)}
        tokens = ours.encode_parts(["Be: ", text, "<eos>"])
        assert pad not in tokens and tokens.index(end) == len(tokens) - 1
        if "[x]" in text:
            assert theirs.token_to_id("[x]") in tokens


def test_a_long_text_is_read_no_further_than_needed(tokenizer: Tokenizer) -> None:
    text = "a" * 10_000_000
    tokens = first_tokens(tokenizer.encode, text, 50)
    assert len(tokens) == 50 and text.startswith(tokenizer.decode(tokens))
    assert first_tokens(tokenizer.encode, "short", 50) == tokenizer.encode("short")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.tiktoken", b"not base64 at all", "line 1"),
        ("x.tiktoken", b"YQ== -1\n", "line 1"),
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


def test_no_network_says_which_file_to_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="GPT-2 tokenizer") as caught:
        load_tokenizer("gpt2")
    assert "tokenizer.json" in str(caught.value.hint)


@pytest.mark.parametrize("column", ["question/answer", "q" * 300])
def test_a_tokenizer_is_trained_on_columns_of_any_name(tmp_path: Path, column: str) -> None:
    path = tmp_path / "train.csv"
    path.write_text(f"{column},said\nWho came?,Ann\n")
    made = trained_tokenizer(path, 300, Columns(column, "said", None))
    assert trained_tokenizer(path, 300, Columns(column, "said", None)) == made
