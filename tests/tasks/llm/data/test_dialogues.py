"""Generated dialogues: seeded, of any size, and not too easy."""

import csv
import re
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.llm.baseline import lead_line, nearest_summaries, training_rows
from tpukit.tasks.llm.data.rows import DIALOGUES
from tpukit.tasks.llm.generate import (
    GeneratedDialogues,
    dialogue_parts,
    make_dialogue,
    write_dialogues,
)
from tpukit.tasks.llm.metrics import AnyScript, rouge_scores

PARTS = ("train", "test")


def test_a_row_is_a_function_of_seed_part_and_number() -> None:
    assert make_dialogue(3, "train", 8) == make_dialogue(3, "train", 8)
    made = {make_dialogue(seed, part, 8).dialogue for seed in (3, 4) for part in ("train", "test")}  # type: ignore[arg-type]
    assert len(made) == 4


def test_names_topics_and_templates_of_the_test_part_are_its_own() -> None:
    def names(part):  # type: ignore[no-untyped-def]
        return {n for i in range(3000) for n in make_dialogue(0, part, i).names}

    train, test = names("train"), names("test")
    assert len(train) > 500 and len(test) > 100 and not train & test
    for lists in dialogue_parts()["words"].values():
        if "all" not in lists:
            train_words, test_words = ({" ".join(p) for p in product(*lists[k])} for k in PARTS)
            assert len(test_words - train_words) >= 0.5 * len(test_words)


def test_summaries_follow_from_dialogues() -> None:
    for index in range(500):
        sample = make_dialogue(1, "test", index)
        assert all(name in sample.dialogue and name in sample.summary for name in sample.names)
        assert not set("[]{}|") & set(sample.dialogue + sample.summary)


def test_the_test_part_puts_things_in_its_own_way() -> None:
    def said(phrase: str) -> set[str]:
        parts = [part.split("|") for part in re.split(r"[][]", phrase)]
        return {"".join(chosen) for chosen in product(*parts)}

    parts = dialogue_parts()
    lists = [*parts["phrases"].values()]
    for scenario in parts["scenario"]:
        lists += [scenario["opening"], *(phrases for _, phrases in scenario["ending"])]
    for *train, test in lists:
        assert len(said(test)) > 1 and not said(test).intersection(chain(*map(said, train)))


def test_the_set_is_not_too_easy(tmp_path: Path) -> None:
    files = write_dialogues(tmp_path, 4000, 0)
    tests = [make_dialogue(0, "test", index) for index in range(files["test_rows"])]
    references = [sample.summary for sample in tests]
    lead = rouge_scores(references, [lead_line(sample.dialogue) for sample in tests])
    rows = training_rows(Path(files["train"]), DIALOGUES, {1, 2})
    assert {row.number for row in rows} == {*range(3, len(rows) + 3)}
    nearest = rouge_scores(references, nearest_summaries(rows, [s.dialogue for s in tests]))
    assert lead["rougeL"].mean() <= 0.30
    assert np.mean(nearest["rougeL"]) <= 0.45


def test_files(tmp_path: Path) -> None:
    files = write_dialogues(tmp_path / "new", 50, 2)
    assert (files["train_rows"], files["test_rows"]) == (45, 5)
    with Path(files["test"]).open(newline="") as file:
        tests = list(csv.DictReader(file))
    with Path(files["references"]).open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [row["id"] for row in tests]
    assert list(tests[0]) == ["id", "dialogue"]
    before = Path(files["train"]).read_bytes()
    write_dialogues(tmp_path / "new", 50, 2)
    assert Path(files["train"]).read_bytes() == before
    assert not list((tmp_path / "new").glob(".*"))


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        GeneratedDialogues(n=1)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        write_dialogues(tmp_path / "file" / "x", 10, 0)


@pytest.mark.parametrize(
    ("reference", "made", "tokens", "expected"),
    [
        ("今天 天气, 好", "天气好", ["今", "天", "天", "气", "好"], 2 * 1.0 * 0.6 / 1.6),
        ("Привет, мир!", "мир", ["привет", "мир"], 2 * 1.0 * 0.5 / 1.5),
        ("हिन्दी में लिखो।", "हिन्दी", ["हिन्दी", "में", "लिखो"], 2 * 1.0 / 3 / (4 / 3)),
    ],
)
def test_rouge_counts_words_of_any_script(reference, made, tokens, expected):
    assert AnyScript().tokenize(reference) == tokens
    found = rouge_scores([reference, reference], [made, reference])
    assert found["rouge1"].tolist() == pytest.approx([expected, 1.0])
    english = rouge_scores(["Running, über 3 cafés"], ["run uber 3 café"])["rougeL"]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    assert english == scorer.score("Running, über 3 cafés", "run uber 3 café")["rougeL"].fmeasure
