# ruff: noqa: E501 - a case is one line
"""What an answer advises: versions that the tables know, no foreign options, the log's own values."""

import re

import pytest
from explained_logs import explained

from tpukit.commands.reports.explanation import explanation_lines
from tpukit.knowledge.calls import successor as of_calls
from tpukit.knowledge.error_table import known_errors
from tpukit.knowledge.versions import pair_of, same_release, seen_together, version_table
from tpukit.probe.logs.explain import ExplainedLog
from tpukit.probe.logs.explanations import fill, shorten

LAST = version_table()["torch_xla"]["last_release"]

FOR_TPUKIT_ALONE = ("--num-workers", "--precision", "--accumulate", "--devices", "--hw ", "--memory-limit", "--global-batch-size", "--results-dir", "--block-size")  # fmt: skip


def report(text: str) -> list[str]:
    return explanation_lines(ExplainedLog(explained(text), [], text.count("\n") + 1, []))


def test_advice_names_no_option_of_another_program():
    wrong = {e.id for e in known_errors() if any(option in e.fix for option in FOR_TPUKIT_ALONE)}
    assert wrong <= {"xla-defaulting-to-cpu", "tpu-not-found"}


def test_spawn_does_not_get_the_advice_of_torchrun():
    failed = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGABRT"
    assert "torchrun" not in " ".join(f"{e.cause} {e.fix}" for e in explained(failed))
    by_torchrun = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    assert "torchrun" in explained(by_torchrun)[0].fix


# -- versions ---------------------------------------------------------------------------------------
def test_advised_torch_xla_is_its_last_release():
    last = LAST
    for entry in known_errors():
        advised = re.findall(r"torch_xla(?:\[[\w,]+\])?==([\d.]+)", entry.fix)
        advised += re.findall(r"torch==(2\.\d+\.\d+)", entry.fix)
        assert set(advised) <= {last}, entry.id


def test_advised_libtpu_and_jax_belong_to_it():
    pair = pair_of(LAST)
    for entry in known_errors():
        if "torch_xla" in entry.fix:
            assert set(re.findall(r"\(libtpu (\d[\d.]*\d)", entry.fix)) <= {pair.libtpu}, entry.id
            assert set(re.findall(r"\bjax (\d[\d.]*\d)", entry.fix)) <= {pair.jax}, entry.id


def test_successor_and_what_it_takes():
    name = version_table()["torch_xla"]["successor"]
    assert name == of_calls().package == "torch_tpu"
    assert (
        of_calls().last_release
        == f"torch_xla {pair_of(version_table()['torch_xla']['last_release']).torch_xla}"
    )
    first, before = version_table()[name]["torch"]
    advising = [e for e in known_errors() if re.search(r"pip install[^`]*torch_tpu", e.fix)]
    assert {"pip-no-torch-xla-wheel", "torch-tpu-extension"} <= {e.id for e in advising}
    assert all(f"'torch>={first},<{before}' torch_tpu" in e.fix for e in advising)
    found = explained("ERROR: No matching distribution found for torch_xla==2.10.0")[0]
    assert "last release is 2.9.0" in found.cause


def test_every_fact_about_versions_has_a_source():
    table = version_table()
    assert table["torch_xla"]["source"] and table["torch_tpu"]["source"]
    for seen in seen_together():
        if seen.torch_xla:
            assert same_release(seen.libtpu, pair_of(seen.torch_xla).libtpu), seen.name


# -- the log's own values ---------------------------------------------------------------------------
def test_places_in_texts_are_filled_from_the_log():
    for entry in known_errors():
        texts = [re.sub(r"\[\[.*?\]\](?!\])", "", text) for text in (entry.cause, entry.fix)]
        places = {name for text in texts for name in re.findall(r"\{(\w+)\}", text)}
        for expression in entry.message if entry.exception and not entry.regex else ():
            assert places - {"raiser", "remedy", "pip"} <= set(expression.groupindex), entry.id
    assert (
        "`kill 4711`"
        in explained("Exception: The TPU is already in use by process with pid 4711.")[0].fix
    )
    assert fill("`{name}` and {other}", {"name": "x"}) == "`x` and OTHER"


# -- how it is shown --------------------------------------------------------------------------------
def test_words_are_not_cut():
    assert shorten("one two three", 100) == "one two three"
    assert shorten("one two threefold", 12) == "one two ..."
    assert len(shorten("x" * 500, 100)) < 110


@pytest.mark.parametrize(
    ("log", "word"),
    [("CUDA out of memory. Tried to allocate", "certain"), ("ValueError: odd", "possible"),
     ("failed (exitcode: -9) local_rank: 1 (pid: 5161)", "probable")],
)  # fmt: skip
def test_an_answer_says_how_sure_it_is_and_names_the_line(log, word):
    shown = report(f"start\n{log}")[0]
    assert shown.startswith("First cause (line 2, ")
    assert f", {word}): " in shown


def test_the_exception_that_the_first_line_shows_is_not_repeated():
    shown = report("ValueError: odd")
    assert "`" not in shown[1] and "ValueError: odd" in shown[0]
    assert explained("ValueError: odd")[0].cause.startswith("`ValueError: odd`. ")


def test_an_answer_fits_on_a_screen():
    texts = [text for entry in known_errors() for text in entry.match[:1] if "<" not in text]
    shown = report("\n".join(f"RuntimeError: {text}" for text in texts))
    assert len(texts) > 60
    assert len(shown) <= 45
    assert any("--json has all" in line for line in shown)
    assert len(report("ValueError: odd")) <= 5


def test_advice_offers_tpukits_search_to_its_own_tasks_alone():
    for entry in known_errors():
        for part in entry.fix.split("`tpukit probe-batch")[:-1]:
            assert part.endswith("for a tpukit task "), entry.id
