# ruff: noqa: E501 - a case is one line
"""The knowledge: every entry is found in a realistic log, in every disguise; nothing else is."""

import functools
import json
import random
import re
import time
from pathlib import Path

import pytest
import torch
from explained_logs import explained
from known_logs import LOGS, TB
from torch import nn

from tpukit.errors import DataError
from tpukit.hardware.memory import is_out_of_memory_text
from tpukit.io.secrets import without_secrets
from tpukit.knowledge.error_table import known_errors, read_known_errors
from tpukit.probe.logs.explain import explain_exception
from tpukit.probe.logs.explanations import fill, logged_bytes
from tpukit.probe.logs.matching import explain_text

ENTRIES = {entry.id: entry for entry in known_errors()}


@functools.cache
def found(text: str) -> list[str]:
    return [explanation.id for explanation in explained(text)]


def in_colour(text: str) -> str:
    return "\n".join(f"\x1b[31m\x1b[1m{line}\x1b[0m" for line in text.split("\n"))


def by_rank(text: str) -> str:
    other = "[rank0]: step {i} loss 2.1"
    lines = text.split("\n")
    return "\n".join(f"[rank3]: {line}\n{other.format(i=i)}" for i, line in enumerate(lines))


def by_logger(text: str) -> str:
    start = "2026-11-20 10:00:00,123 - trainer - ERROR - "
    return "\n".join(start + line for line in text.split("\n"))


def by_glog(text: str) -> str:
    return "\n".join(f"W1120 10:00:00.123 4711 file.py:12] {line}" for line in text.split("\n"))


def by_mpirun(text: str) -> str:
    return "\n".join(f"[1,3]<stderr>:{line}" for line in text.split("\n"))


def wrapped(text: str, width: int = 61) -> str:
    """As a terminal breaks long lines: in the middle of a word."""
    return "\n".join(
        line[i : i + width] for line in text.split("\n") for i in range(0, len(line) or 1, width)
    )


def in_a_box(text: str) -> str:
    lines = wrapped(text, 70).split("\n")
    return "\n".join(["╭" + "─" * 74 + "╮", *(f"│ {line:<72} │" for line in lines)])


def from_kaggle(text: str) -> str:
    """As Kaggle stores a run's log: one JSON object a write."""
    rows = [{"stream_name": "stderr", "time": 1.2, "data": f"{x}\n"} for x in text.split("\n")]
    return "[" + "\n,".join(json.dumps(row) for row in rows) + "]"


def in_a_notebook(text: str) -> str:
    return json.dumps({"outputs": [{"text": text.splitlines(keepends=True)}]}, indent=1)


DISGUISES = [
    in_colour, by_rank, by_logger, by_glog, by_mpirun, wrapped, in_a_box, from_kaggle,
    in_a_notebook, lambda text: by_glog(wrapped(text)), lambda text: in_colour(by_rank(text)),
]  # fmt: skip


def test_every_entry_has_a_log():
    assert set(LOGS) == set(ENTRIES)


def test_the_words_of_the_table_are_shown_whole():
    told = [text for entry in ENTRIES.values() for text in (entry.cause, entry.fix)]
    assert [text for text in told if without_secrets(text) != text] == []


def test_a_sentence_without_its_names_is_left_out():
    """A line without a traceback tells nothing of who has to change what."""
    lines = [entry for entry in ENTRIES.values() if entry.match or entry.regex]
    assert [entry.id for entry in lines if "REMEDY" in fill(entry.fix, {})] == []


def test_every_entry_is_found():
    assert [id for id in LOGS if id not in found(LOGS[id])] == []


SHAPED = {id for id, entry in ENTRIES.items() if not entry.match}
SHAPED |= {"host-oom-killed", "target-out-of-bounds", "loss-nan"}
"""Known by the shape of one line, which a disguise changes."""


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, 1])
def test_entries_are_found_in_disguise(every):
    """Every fourth in each disguise, others in each, so that all are asked about; or all in all."""
    asked = [id for id in LOGS if id not in SHAPED]
    cases = [(id, kind) for kind in range(len(DISGUISES)) for id in asked[kind % every :: every]]
    missed = [case for case in cases if case[0] not in found(DISGUISES[case[1]](LOGS[case[0]]))]
    assert missed == []


def test_no_log_brings_a_cause_that_is_not_in_it():
    """What else is found says the same less exactly, or follows from it."""
    others = {id: {*found(log)} - {id} - ALSO.get(id, set()) for id, log in LOGS.items()}
    assert {id: other for id, other in others.items() if other} == {}


ONE_LINE = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception): (?P<message>.{12,})")
TOLD = {id: line["message"] for id, log in LOGS.items() if (line := ONE_LINE.fullmatch(log))}


@pytest.mark.parametrize("before", ["Step failed: ", "[Frob] ERROR: could not run the node: "])
def test_an_exception_that_a_program_tells_of_is_rarely_taken_for_another(before):
    first = {id: found(before + TOLD[id])[:1] for id in sorted(TOLD)}
    right = sum(ids == [id] for id, ids in first.items())
    other = {id: ids for id, ids in first.items() if ids not in ([], [id])}
    assert right >= 0.8 * len(first) and len(other) <= 0.05 * len(first), other


ALSO = {
    "tpu-oom-loading-program": {"tpu-oom-reserve", "process-aborted"},
    "jax-coordinator-unreachable": {"xla-connection-lost"},
    "placeholder-class": {"cannot-pickle"},
    "rocm-architecture": {"cuda-failed"},
    "tpu-device-busy": {"tpu-backend-init"},
    "tpu-in-use-by-pid": {"tpu-backend-init"},
    "launching-on-gpus-on-tpu": {"unknown-exception"},
    "child-failed": {"host-oom-killed"},
}


@pytest.mark.parametrize("disguise", range(8))
def test_numbers_do_not_matter(disguise):
    draw = random.Random(disguise)
    text = LOGS["tpu-oom-compile"] + "\n" + LOGS["cuda-oom"]
    changed = "".join(draw.choice("123456789") if c.isdigit() else c for c in text)
    assert {"tpu-oom-compile", "cuda-oom"} <= set(found(changed))


def test_first_cause_before_what_followed():
    log = "\n".join([
        "W1120 10:00:00.000 1 run.py:1] Setting OMP_NUM_THREADS environment variable for each "
        "process to be 1 in default",
        LOGS["child-failed"].split("\n")[0],
        "[rank0]: " + LOGS["rank-connection-lost"].split("\n")[-1],
        "[rank1]: " + LOGS["cuda-oom"].split("\n")[-1],
    ])  # fmt: skip
    ids = found(log)
    assert ids[0] == "cuda-oom"
    assert ids[-1] == "omp-num-threads-notice"
    assert {"child-failed", "rank-connection-lost"} <= set(ids)


def test_line_and_count():
    line = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
    explanation = explain_text("\n".join(["a", "b", line, "c", line]))
    assert (explanation.line, explanation.count) == (3, 2)
    assert explanation.text == line


@pytest.mark.parametrize(
    ("asked", "word"), [(2, "can grow"), (6, ": fine"), (16, "near the limit"), (17, "over the limit")]
)  # fmt: skip
def test_verdict_by_the_sizes_in_the_text(asked, word):
    text = f"Allocation (size={asked * 2**30}) would exceed memory (size=17179869184) :: #x"
    assert word in explain_text(text).fix


def test_scale_by_the_sizes_in_the_text():
    assert "0.68" in explain_text(LOGS["tpu-oom-compile"]).fix


def test_sizes():
    assert logged_bytes("21.84G") == int(21.84 * 2**30)
    assert logged_bytes("17179869184") == 2**34
    assert logged_bytes("much") is None


OUT_OF_MEMORY = [
    "tpu-allocation-exceeds-memory", "tpu-oom-compile", "tpu-oom-reserve", "tpu-oom-allocate",
    "tpu-oom-loading-program", "xla-resource-exhausted", "xla-cpu-oom", "cuda-oom", "cpu-oom",
]  # fmt: skip


def test_batch_search_takes_the_same_texts_for_out_of_memory():
    """The recogniser of the batch search and the error table agree."""
    memory = {entry.id for entry in known_errors() if entry.topic == "out-of-memory"}
    assert set(OUT_OF_MEMORY) <= memory
    assert {id for id, log in LOGS.items() if is_out_of_memory_text(log)} == memory


HARMLESS = [
    "", "step 10 loss 2.3 lr 1e-3", "Killed the old server politely", "the loss is nanny's",
    "tests/test_memory.py::test_cuda_out_of_memory_is_recognised PASSED",
    "nan_loss_guard enabled; loss: 0.0012", "val_loss=0.231 infer_time=3.1", "loss_inf_check=False",
    "INFO memory: 12.1 GiB of 15.7 GiB used", "Collecting torch_xla==2.9.0", "exit code 13",
    "WARNING: Running pip as the 'root' user can result in broken permissions",
    "n:1:2 [0] NCCL INFO NVLS multicast support is not available on dev 0",
    "srun: job 12 queued and waiting for resources", "3/3 nodes are available", "ImagePullPolicy: Always",
    "Successfully installed tensorflow-cpu-2.18.0 torch-2.9.0 torch_xla-2.9.0",
    "Loss: 1.37 (0 inf, 0 nan skipped)", "Downloading gpt2/resolve/main/config.json 100%",
]  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS)
def test_nothing_is_known_about_ordinary_lines(text):
    assert found(text) == []


@pytest.mark.parametrize(
    "text",
    ["loss: nan", "train/loss nan", "loss=nan", "step 3 | loss NaN |", "'loss': nan,",
     "epoch 2 loss: inf", "Loss is nan, stopping training", "total_loss = tensor(nan, device='xla:0')",
     "val_loss: nan", "NaN loss at step 31"],
)  # fmt: skip
def test_a_loss_that_is_no_number(text):
    assert found(text) == ["loss-nan"]


def test_exception_and_its_cause():
    try:
        try:
            raise MemoryError("DefaultCPUAllocator: can't allocate memory: 8 bytes")
        except MemoryError as error:
            raise RuntimeError("training failed") from error
    except RuntimeError as error:
        assert explain_exception(error).id == "cpu-oom"
    assert explain_exception(RuntimeError("nobody knows")) is None


# -- a person's own knowledge ---------------------------------------------------------------------
def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


def test_own_entry_is_found_and_replaces_one_of_the_same_id(tmp_path):
    path = own(tmp_path, """
        [[error]]
        id = "cuda-oom"
        match = ["our scheduler evicted job <n:job>"]
        cause = "Quota."
        fix = "Ask ops."
    """)  # fmt: skip
    entries = read_known_errors([path])
    assert len(entries) == len(ENTRIES)
    explanation = explain_text("2026 our scheduler evicted job 4711", entries)
    assert (explanation.cause, explanation.captures) == ("Quota.", {"job": "4711"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing = 1", "no [[error]] entries"),
        ("[[error]", "invalid TOML"),
        ('[[error]]\nid = "a"\ncause = "b"\nfix = "c"', "neither `match` nor `regex`"),
        ('[[error]]\nid = "a"\nmatch = ["text here"]\nfix = "c"', "`cause` is missing"),
        ('[[error]]\nid = "a"\nmatch = "text"\ncause = "b"\nfix = "c"', "a list of texts"),
        ('[[error]]\nid = "a"\nmatch = ["<n>"]\ncause = "b"\nfix = "c"', "at least 4 letters"),
        ('[[error]]\nid = "a"\nregex = ["("]\ncause = "b"\nfix = "c"', "invalid `regex`"),
        ('[[error]]\nid = "a"\nmatches = ["x"]\ncause = "b"\nfix = "c"', "unknown field `matches`"),
        ('[[error]]\nid = "a"\nmatch = ["text"]\ncause = "b"\nfix = "c"\nrole = "bad"', "unknown role"),
    ],
)  # fmt: skip
def test_bad_knowledge_names_file_and_entry(tmp_path, text, expected):
    with pytest.raises(DataError) as raised:
        read_known_errors([own(tmp_path, text)])
    assert expected in raised.value.message
    assert "own.toml" in raised.value.message


def test_own_knowledge_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_known_errors([tmp_path / "none.toml"])


def test_traceback_alone_says_nothing():
    assert found(TB) == []


@pytest.mark.parametrize("word", ["a", "a.", "a-b"])
def test_expressions_take_a_long_word_in_one_pass(word):
    """A group without a bound before a fixed text takes 20,000 times as long as one pass."""
    text, over = word * (20_000 // len(word)), []
    for entry in known_errors():
        for expression in (*entry.message, *entry.regex, *entry.last_resort):
            begin = time.process_time()
            expression.search(text)
            over += [entry.id] * (time.process_time() - begin > 2)
    assert over == []


@pytest.mark.parametrize("name", ["uint8", "int8", "uint16", "int16", "int32", "int64", "bool"])
@pytest.mark.parametrize(
    "layer",
    [nn.Linear(4, 4), nn.Conv2d(1, 1, 1), nn.LSTM(4, 4)],
    ids=lambda layer: type(layer).__name__,
)
def test_whole_numbers_as_features_are_to_be_floats(layer, name):
    """As torch itself refuses them: half precision has nothing to do with it."""
    with pytest.raises((RuntimeError, ValueError)) as raised:
        layer(torch.zeros(1, 4, 4, dtype=getattr(torch, name)))
    assert explain_exception(raised.value).id == "input-dtype"
