"""The token cache: right, keyed, safe against a kill, whatever the number of rows."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tpukit.errors import DataError
from tpukit.io.progress import Progress
from tpukit.tasks.llm.data.dataset import split_indices
from tpukit.tasks.llm.data.prompt import BEFORE_DIALOGUE, BEFORE_SUMMARY, PromptFormat
from tpukit.tasks.llm.data.rows import Row
from tpukit.tasks.llm.data.token_cache import open_token_cache
from tpukit.tasks.llm.data.tokenizer import Tokenizer
from tpukit.tasks.llm.data.tokenizer_choice import train_tokenizer
from tpukit.tasks.llm.generate import write_dialogues

COLUMNS = ["id", "dialogue", "summary"]


def test_a_sample_is_markers_dialogue_summary_and_end(
    tmp_path: Path, tokenizer: Tokenizer, write_csv
) -> None:  # type: ignore[no-untyped-def]
    path = write_csv(tmp_path / "t.csv", COLUMNS, [["1", "Ann: hi\r\nBob: ho", "They greet."]])
    tokens, targets, _ = open_token_cache(path, tokenizer, 256).example(0)
    text = tokenizer._whole.decode(tokens.tolist(), skip_special_tokens=False)
    expected = f"{BEFORE_DIALOGUE}Ann: hi\r\nBob: ho{BEFORE_SUMMARY}They greet.<|endoftext|>"
    assert text == expected
    assert tokens[-1] == tokenizer.end
    assert tokenizer.decode(tokens[-targets:].tolist()) == "They greet."


def test_the_dialogue_is_cut_never_the_rest(tokenizer: Tokenizer) -> None:
    formats = PromptFormat(tokenizer, 64)
    example = formats.example(Row(1, "1", "long words " * 1000, "A short one."))
    assert example is not None and len(example.tokens) == 64
    text = tokenizer._whole.decode(example.tokens, skip_special_tokens=False)
    assert text.startswith(BEFORE_DIALOGUE + "long words")
    assert text.endswith(BEFORE_SUMMARY + "A short one.<|endoftext|>")
    assert formats.example(Row(1, "1", "x", "summary " * 100)) is None


def test_long_summaries_are_counted(tmp_path: Path, tokenizer: Tokenizer, write_csv) -> None:  # type: ignore[no-untyped-def]
    rows = [["1", "a", "fine"], ["2", "b", "much too long " * 50], ["3", "c", "fine"]]
    cache = open_token_cache(write_csv(tmp_path / "t.csv", COLUMNS, rows), tokenizer, 64)
    assert (len(cache), cache.skipped) == (2, 1)
    only = write_csv(tmp_path / "u.csv", COLUMNS, rows[1:2])
    with pytest.raises(DataError, match="completions of over 30% of 64"):
        open_token_cache(only, tokenizer, 64)


def test_many_processes_write_what_one_writes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = write_dialogues(tmp_path, 3000, 0)
    progress = Progress("Tokenising", enabled=False)
    cache = open_token_cache(Path(files["train"]), tokenizer, 256, progress=progress)
    assert progress.done == 2700 and len(cache) == 2700
    formats = PromptFormat(tokenizer, 256)
    from tpukit.tasks.llm.data.rows import read_rows

    for index, row in enumerate(read_rows(Path(files["train"]), summaries=True)):
        if index % 450 == 0:
            example = formats.example(row)
            assert example is not None
            assert cache.example(index)[0].tolist() == example.tokens


def test_content_tokenizer_and_context_are_the_key(
    tmp_path: Path, tokenizer: Tokenizer, write_csv
) -> None:  # type: ignore[no-untyped-def]
    path = write_csv(tmp_path / "t.csv", COLUMNS, [["1", "abc", "x"]])
    first = open_token_cache(path, tokenizer, 64).path
    stamp = first.stat().st_mtime_ns
    assert open_token_cache(path, tokenizer, 64).path == first
    assert first.stat().st_mtime_ns == stamp
    assert open_token_cache(path, tokenizer, 128).path != first
    assert open_token_cache(path, train_tokenizer(["abc"], 300), 64).path != first
    write_csv(path, COLUMNS, [["1", "abd", "x"]])
    assert open_token_cache(path, tokenizer, 64).path != first


@pytest.mark.parametrize("at", [0, 12, 4100, -3])
def test_a_damaged_cache_is_built_again(
    tmp_path: Path, tokenizer: Tokenizer, write_csv, at: int
) -> None:  # type: ignore[no-untyped-def]
    """A letter of its header, its length, a token, a place."""
    path = write_csv(tmp_path / "t.csv", COLUMNS, [["1", "Ann: hi", "They greet."]])
    whole = open_token_cache(path, tokenizer, 64).path.read_bytes()
    [cache] = (Path(os.environ["TPUKIT_CACHE_DIR"]) / "tokens").glob("*.tokens")
    damaged = bytearray(whole)
    damaged[at] ^= 1
    cache.unlink()
    cache.write_bytes(damaged)
    assert open_token_cache(path, tokenizer, 64).path.read_bytes() == whole


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_that_is_taken_for_a_cache(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    files = write_dialogues(tmp_path, 8_000, 0)
    (tmp_path / "tokenizer").write_bytes(tokenizer.to_bytes())
    code = (
        "import sys; from pathlib import Path;"
        "from tpukit.tasks.llm.data.token_cache import open_token_cache;"
        "from tpukit.tasks.llm.data.tokenizer import tokenizer_from_bytes;"
        f"content = Path({str(tmp_path / 'tokenizer')!r}).read_bytes();"
        "tokenizer = tokenizer_from_bytes(content, 'the test');"
        f"open_token_cache(Path({files['train']!r}), tokenizer, 256)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    folder = Path(os.environ["TPUKIT_CACHE_DIR"]) / "tokens"
    while child.poll() is None and not any(
        p.stat().st_size > 5000 for p in folder.glob(".*.partial")
    ):
        time.sleep(0.005)
    killed = child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert killed and not list(folder.glob("*.tokens"))
    assert len(open_token_cache(Path(files["train"]), tokenizer, 256)) == 7_200
    assert not list(folder.glob(".*.partial"))


def test_the_split_is_seeded_and_covers_all(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = write_dialogues(tmp_path, 300, 0)
    cache = open_token_cache(Path(files["train"]), tokenizer, 256)
    train, valid = split_indices(len(cache), 0.05, 1)
    assert len(valid) == round(270 * 0.05)
    assert sorted([*train, *valid]) == list(range(270))
    again = split_indices(len(cache), 0.05, 1)[0]
    assert np.array_equal(train, again)
    assert not np.array_equal(train, split_indices(len(cache), 0.05, 2)[0])


def test_a_cache_folder_that_cannot_be_written(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, write_csv
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").touch()
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "file"))
    path = write_csv(tmp_path / "t.csv", COLUMNS, [["1", "abc", "x"]])
    with pytest.raises(DataError, match="token cache"):
        open_token_cache(path, tokenizer, 64)
