# ruff: noqa: E501 - a case is one line
"""Reading logs: of any size and kind, in a time limit; real tools' logs give no false alarm."""

import json
import os
import random
import threading
import time
from contextlib import suppress

import pytest
from forked import MODULE, completed, environment
from known_logs import LOGS
from runs import python

from tpukit.errors import DataError
from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs import explain as explain_module
from tpukit.probe.logs import explain_log, log_source, open_log

OOM = LOGS["cuda-oom"].split("\n")[-1]


def explain(path, seconds: float = 20.0):
    return explain_log(open_log(str(path), seconds), known_errors())


def ids(path, seconds: float = 20.0) -> list[str]:
    return [explanation.id for explanation in explain(path, seconds).explanations]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
def test_encodings(tmp_path, encoding):
    path = tmp_path / "log"
    path.write_text("Übung\n" + OOM + "\n", encoding=encoding)
    log = explain(path)
    assert [(e.id, e.line) for e in log.explanations] == [("cuda-oom", 2)]


@pytest.fixture
def small_pieces(monkeypatch):
    """As a log of some GB meets the limits, so does one of some kB."""
    monkeypatch.setattr(log_source, "_PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(explain_module, "_WHOLE_BYTES", 1 << 14)


def test_line_numbers_over_pieces(tmp_path, small_pieces):
    path = tmp_path / "log"
    filler = "".join(f"step {i} loss {i * 0.37:.3f} é\n" for i in range(600))
    path.write_text(filler + OOM + "\n" + "tail\n" * 10)
    log = explain(path)
    assert log.explanations[0].line == 601
    assert log.lines == 611


def test_large_log_of_like_lines_is_read_whole(tmp_path, small_pieces):
    """Where the file is large, lines that differ by numbers alone are not searched again."""
    path = tmp_path / "log"
    with path.open("w") as file:
        for i in range(10):
            file.write("".join(f"[rank{i % 4}]: step {j} loss 2.{j}\n" for j in range(150)))
            file.write(f"[rank1]: {OOM}\n" * (i in (8, 9)))
    log = explain(path)
    assert [(e.id, e.line, e.count) for e in log.explanations] == [("cuda-oom", 1351, 1)]
    assert log.notes == []


def test_time_limit_reads_the_end(tmp_path, small_pieces):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.seek(3 * 2**30)
        file.write(b"\n" + OOM.encode() + b"\n")
    with path.open("r+b") as file:
        file.write(b"text\n" * 200_000)
    start = time.monotonic()
    log = explain(path, seconds=0.2)
    assert "cuda-oom" in [e.id for e in log.explanations]
    assert "within the time limit" in log.notes[0]
    assert time.monotonic() - start < 60


def test_one_endless_line(tmp_path):
    """Lines are cut at a length, so that the error at the line's end may be missed, but not the
    one on the next line."""
    path = tmp_path / "log"
    path.write_text("x" * 30_000_000 + "\n" + OOM + "\n")
    start = time.monotonic()
    assert [(e.id, e.line) for e in explain(path).explanations] == [("cuda-oom", 2)]
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x7fELF\x02\x01" + bytes(5000), "a program"),
        (b"PK\x03\x04" + bytes(range(256)) * 20, "a zip archive"),
        (b"\x1f\x8b\x08" + bytes(200), "a gzip archive"),
        (bytes(range(256)) * 400, "a binary file"),
        (bytes(10_000), "a binary file"),
        (b"\x90\x00\x00\x00\x00\x00\x00\x00{}" + bytes(range(32)) * 100, "a binary file"),
    ],
)
def test_binary_file(tmp_path, data, said):
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(DataError, match=said):
        explain(path)


def test_a_few_odd_bytes_are_no_binary(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\x00\x01 start\n" + b"\xff\xfe\x80 text\n" * 3 + OOM.encode())
    assert ids(path) == ["cuda-oom"]


def test_empty_folder_missing_and_pipe(tmp_path):
    (tmp_path / "empty").touch()
    assert ids(tmp_path / "empty") == []
    with pytest.raises(DataError, match="is a folder"):
        explain(tmp_path)
    with pytest.raises(DataError, match="No such file"):
        explain(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    log = explain(tmp_path / "pipe", seconds=0.3)
    assert log.explanations == []


def test_pipe_that_nobody_closes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)

    def write() -> None:
        os.write(writer, f"{OOM}\n".encode())

    thread = threading.Thread(target=write)
    thread.start()
    log = explain(tmp_path / "pipe", seconds=1.0)
    thread.join()
    os.close(writer)
    assert [e.id for e in log.explanations] == ["cuda-oom"]
    assert "did not end" in log.notes[0]


def test_a_line_of_an_error_s_level_is_named_where_nothing_else_is(tmp_path):
    told = "2026-03-28 11:57:16.078552: E frob/cache.cc:113] Computation requires 9 frobs (limit 8)"
    path = tmp_path / "run.log"
    path.write_text(f"step 1\n{told}\n")
    assert [line.number for line in explain(path).unknown] == [2] and explain(path).has_error
    path.write_text(f"step 1\n{told}\nKeyError: 'labels'\n")
    assert [line.number for line in explain(path).unknown] == []


def test_a_line_that_is_explained_again_is_not_unknown(tmp_path):
    path = tmp_path / "run.log"
    told = "RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    path.write_text(told + "step failed\n" + told)
    log = explain(path)
    assert [e.count for e in log.explanations] == [2] and 3 not in {x.number for x in log.unknown}


def test_unknown_error_is_named(tmp_path):
    path = tmp_path / "log"
    path.write_text("fine\nTraceback (most recent call last):\nmypkg.FrobError: cannot frob\n")
    log = explain(path)
    assert [(e.id, e.line) for e in log.explanations] == [("unknown-exception", 3)]
    assert "mypkg.FrobError: cannot frob" in log.explanations[0].cause


def test_an_exception_in_two_words_is_an_error(tmp_path):
    """As Kaggle's scoring prints what a metric raised."""
    path = tmp_path / "log"
    path.write_text("Scoring Exception: nobody knows this text\n")
    assert [line.number for line in explain(path).unknown] == [1] and explain(path).has_error
    path.write_text("Evaluation Exception: Submission and solution row IDs do not match\n")
    assert [e.id for e in explain(path).explanations] == ["kaggle-submission-refused"]
    assert explain(path).has_error


def test_line_that_only_looks_like_an_error_is_suspected(tmp_path):
    path = tmp_path / "log"
    counts = "failed cases 0 of 500\nerror: 0\n[INFO] 3 files failed"
    path.write_text(f"{counts}\nthe frobnicator failed with code 3\n")
    log = explain(path)
    assert log.explanations == []
    assert [line.number for line in log.unknown] == [4]


def test_notebook_and_kaggle_log(tmp_path):
    traceback = f"\x1b[31mRuntimeError\x1b[0m: {OOM.partition(': ')[2]}"
    cells = [{"cell_type": "code", "outputs": [{"output_type": "error", "traceback": [traceback]}]}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}, indent=1))
    assert ids(tmp_path / "a.ipynb") == ["cuda-oom"]
    rows = [{"stream_name": "stderr", "time": 3.1, "data": f"{OOM}\n"}]
    (tmp_path / "kaggle.log").write_text(json.dumps(rows))
    assert ids(tmp_path / "kaggle.log") == ["cuda-oom"]


# -- logs of the installed tools -------------------------------------------------------------------
TOOLS = {
    "pip list": ["-m", "pip", "list"],
    "pip check": ["-m", "pip", "check"],
    "pip help": ["-m", "pip", "install", "--help"],
    "torchrun help": ["-m", "torch.distributed.run", "--help"],
    "pytest collecting": ["-m", "pytest", "--collect-only", "-q", "-n", "0", "tests/train"],
    "a small training": [
        "-c",
        "import torch\nm = torch.nn.Linear(4, 4)\no = torch.optim.AdamW(m.parameters())\n"
        "for i in range(50):\n    loss = m(torch.randn(8, 4)).square().mean()\n"
        "    loss.backward(); o.step(); o.zero_grad()\n    print(f'step {i} loss {loss:.4f}')",
    ],
    "environment report": ["-m", "torch.utils.collect_env"],
}
WARNINGS_THAT_ARE_TRUE = {"omp-num-threads-notice", "cuda-no-driver"}


QUICK_TOOLS = ("pip list", "pip check")


@pytest.mark.parametrize(
    "tool", [pytest.param(t, marks=() if t in QUICK_TOOLS else pytest.mark.slow) for t in TOOLS]
)
def test_log_of_a_tool_gives_no_false_alarm(tmp_path, tool):
    done = python(*TOOLS[tool])
    path = tmp_path / "log"
    path.write_text(done.stdout + done.stderr)
    assert len(done.stdout) > 20
    assert set(ids(path)) <= WARNINGS_THAT_ARE_TRUE


@pytest.mark.slow
def test_torchrun_with_a_rank_that_dies(tmp_path):
    """The cause is named before what torchrun makes of it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch.distributed as d\nd.init_process_group('gloo')\n"
        'if d.get_rank() == 1:\n    raise RuntimeError("Expected all tensors to be on the same '
        'device, but found at least two devices, cuda:0 and cpu!")\nd.barrier()\n'
    )
    torchrun = [MODULE, "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = completed([*torchrun, str(script)], "torch", environment(), tmp_path, timeout=240)
    path = tmp_path / "log"
    path.write_text(done.stderr)
    found = ids(path)
    assert found[0] == "different-devices"
    assert "child-failed" in found
    roles = [e.role for e in explain(path).explanations]
    assert roles == sorted(roles, key=["cause", "consequence", "warning", "harmless"].index)


# -- fuzz ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_logs(count, tmp_path):
    draw, path = random.Random(count), tmp_path / "log"
    texts = list(LOGS.values())
    for _ in range(count):
        text = "\n".join(draw.choice(texts) for _ in range(3))
        data = bytearray(text.encode())
        for _ in range(draw.randrange(8)):
            where = draw.randrange(len(data))
            kind = draw.randrange(4)
            if kind == 0:
                data[where] = draw.randrange(256)
            elif kind == 1:
                del data[where : where + draw.randrange(50)]
            elif kind == 2:
                data[where:where] = draw.choice([b"\x1b[", b"\r", b"\n", b"{\"data\": \"", b"[rank",
                                                 b"\\u001b[", b"\xff\xff", b"<n>", b"(" * 40])  # fmt: skip
            else:
                data[where:where] = bytes(draw.randrange(256) for _ in range(6))
            data = data or bytearray(b"x")
        path.write_bytes(data)
        with suppress(DataError):
            log = explain(path)
            assert all(1 <= e.line <= log.lines for e in log.explanations)
