"""Bad input to the commands: one or two lines, exit code 2, nothing half-written."""

import os
import socket
from pathlib import Path

import pytest
import torch
from fake_backend import FakeBackend
from runs import failure, tpukit

from tpukit import cli
from tpukit.errors import ConfigError, DataError, UsageError
from tpukit.io.tables import read_table
from tpukit.tasks.llm.data.rows import read_rows
from tpukit.tasks.llm.generation.decoding import Decoding
from tpukit.tasks.llm.predict import _open_journal, require_writable
from tpukit.train.submission import require_match

SMALL = ["--model", "1x1x16", "--tokenizer", "train", "--set", "vocabulary_size=300",
         "--block-size", "256", "--hw", "cpu", "--global-batch-size", "2", "--max-steps", "1",
         "--set", "score_samples=0", "--num-workers", "0", "--accumulate", "1"]  # fmt: skip


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    """Runs summarize-train in this process on a train.csv; returns code and what was told."""

    def run(content: bytes | None, *options: str) -> tuple[int, str]:
        before = dict(os.environ)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "data").mkdir(exist_ok=True)
        if content is not None:
            (tmp_path / "data" / "train.csv").write_bytes(content)
        try:
            code = cli.run(["summarize-train", *SMALL, *options])
        finally:
            os.environ.clear()
            os.environ.update(before)
        return code, capsys.readouterr().err

    return run


GOOD = b"id,dialogue,summary\n" + b"".join(b"%d,Ann: hi,They greet.\n" % i for i in range(8))
FAULTS = {
    "no file": (None, "There is no training file data/train.csv"),
    "missing column": (b"id,dialogue,sumary\n1,a,b\n", "Rename 'sumary' to 'summary'?"),
    "no rows": (b"id,dialogue,summary\n", "has no rows"),
    "too long": (
        b"id,dialogue,summary\n1,a," + b"words " * 200 + b"\n",
        "rows are completions of over 30% of",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_training_file_with(train, name: str) -> None:  # type: ignore[no-untyped-def]
    content, text = FAULTS[name]
    code, told = train(content)
    assert code == 2 and text in told and "Traceback" not in told
    assert len([line for line in told.splitlines() if line.startswith(("Error", "  "))]) <= 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--model", "gpt5"], "invalid size"),
        (["--model", "./data"], "are given with --init ./data"),
        (["--model", "gpt5", "--tokenizer", ""], "invalid size"),  # before the tokenizer's download
        (["--tokenizer", "nowhere.json"], "No tokenizer at nowhere.json"),
        (["--init", "./nowhere"], "nothing there"),
        (["--lora-rank", "4", "--set", "lora_targets=wte"], "an adapter of one alone"),
        (["--lora-rank", "4", "--set", "lora_targets=5"], "a gpt2 has no 5"),
        (["--lora-rank", "4", "--lora-layers", "1-x"], "neither a layer nor a range"),
        (["--lora-rank", "4", "--lora-layers", "0-9"], "there is no layer 9"),
        (["--lora-rank", "4", "--set", "lora_layers=9"], "there is no layer 9"),
        (["--lora-rank", "4", "--lora-layers", "0-99999999"], "neither a layer nor a range"),
        (["--set", "lora_init=a", "--set", "adapter=use_dora=true"], "adapter: that of lora_init"),
        (["--set", "weights=fp8"], "weights 'fp8' is not one of fp32, bf16, nf4"),
        (["--set", "recompute=maybe"], "recompute 'maybe' is not true or false or auto"),
        (["--set", "paking=false"], "Did you mean packing?"),
        (["--set", "buckets=3"], "Rows hold several samples, or with packing=false one"),
        (["--set", "block_size=long"], "block_size 'long' is not a whole number in [32, 1048576]"),
        (["--set", "dropout=1"], "dropout 1 is not a number in [0, 1)"),
        (["--global-batch-size", "64"], "larger than the training data"),
    ],
)
def test_an_option_that(train, options: list[str], text: str) -> None:  # type: ignore[no-untyped-def]
    code, told = train(GOOD, *options)
    assert code == 2 and text in told


def test_a_vocabulary_that_does_not_fit_the_weights(train, tmp_path: Path, ops) -> None:  # type: ignore[no-untyped-def]
    from tpukit.tasks.llm.data.tokenizer_choice import train_tokenizer
    from tpukit.tasks.llm.export import export_hugging_face
    from tpukit.tasks.llm.model.load import from_scratch, load_lm

    shape = from_scratch("1x1x16", 900, 256)
    bytes_alone = train_tokenizer([], 257)
    export_hugging_face(tmp_path / "hf", shape, load_lm(shape, torch.float32), bytes_alone)
    code, told = train(GOOD, "--init", str(tmp_path / "hf"), "--model", "gpt2")
    assert code == 2
    assert "have 900" in told and "--tokenizer" in told


def predict(tmp_path: Path, *options: object, capsys) -> tuple[int, str]:  # type: ignore[no-untyped-def]
    code = cli.run(["predict", "--hw", "cpu", *map(str, options)])
    return code, capsys.readouterr().err


def test_predicting_with_a_run_that_is_missing_or_anothers(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    code, told = predict(tmp_path, "--run", tmp_path / "none", capsys=capsys)
    assert code == 2 and "Run folder" in told and "does not exist" in told
    (tmp_path / "empty").mkdir()
    code, told = predict(tmp_path, "--run", tmp_path / "empty", capsys=capsys)
    assert code == 2 and "no config.toml" in told


def test_a_device_is_no_file_to_read() -> None:
    """Reading it would never end."""
    with pytest.raises(DataError, match="/dev/full: not a regular file"):
        next(read_rows(Path("/dev/full"), summaries=False))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": float("nan")}, r"--temperature .* in \(0, 1000\]"),
        ({"temperature": 0.0}, r"--temperature .* in \(0, 1000\]"),
        ({"top_p": float("inf")}, r"--top-p .* in \(0, 1\]"),
        ({"num_beams": 2**63}, r"--num-beams .* in \[1, 1024\]"),
        ({"max_new_tokens": 0}, r"--max-new-tokens .* in \[1, 1048576\]"),
        ({"max_new_tokens": 10**20}, r"--max-new-tokens .* in \[1, 1048576\]"),
        ({"do_sample": True, "num_beams": 2}, "--do-sample and --num-beams are both given"),
    ],
)
def test_senseless_decoding(given, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=said):
        Decoding(**given)


def test_where_out_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        require_writable(tmp_path / "none" / "submission.csv")
    with pytest.raises(UsageError, match="is a folder"):
        require_writable(tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        require_writable(Path("/proc/submission.csv"))


def test_a_sample_with_other_ids(tmp_path: Path) -> None:
    sample = tmp_path / "sample.csv"
    sample.write_text("id,summary\nb,\na,\n")
    # Another order is the sample's in the end.
    columns = ("id", "summary")
    require_match(columns, ["a", "b"], read_table(sample))
    with pytest.raises(DataError, match=r"lacks 1 id \(b\); it should not have 1 id \(c\)"):
        require_match(columns, ["a", "c"], read_table(sample))
    with pytest.raises(DataError, match=r"1 column \(summary\); .* 1 column \(answer\)"):
        require_match(("id", "answer"), ["a", "b"], read_table(sample))
    with pytest.raises(DataError, match=r"should not have 1 id \(summary\)"):
        require_match(columns, ["a", "b", "summary"], read_table(sample))


@pytest.mark.slow
def test_two_predictions_into_one_file(tmp_path: Path) -> None:
    out, backend = tmp_path / "submission.csv", FakeBackend()
    with (
        _open_journal(out, backend),
        pytest.raises(UsageError, match="Another prediction"),
        _open_journal(out, backend),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".submission.csv.journal-0"]


def test_a_busy_port(tmp_path: Path, train) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_bytes(GOOD)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = tpukit("summarize-train", *SMALL, "--data-path", tmp_path / "data", "--nproc", 2,
                      "--results-dir", tmp_path / "run", "--master-port", port)  # fmt: skip
    assert str(port) in failure(done, done.returncode) and done.returncode != 0
