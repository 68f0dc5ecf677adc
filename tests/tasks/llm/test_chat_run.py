"""A run on conversations, beside transformers as the README of its export uses it."""

import csv
import json
import random
import re
from pathlib import Path

import pytest
from runs import result, tpukit
from tiny_qwen import write_qwen

from tpukit.tasks.llm.data.prompt import PromptStyle
from tpukit.tasks.llm.data.rows import Columns
from tpukit.tasks.llm.export import _python_of

pytest.importorskip("transformers")

WORDS = ["Ann", "and", "Bob", "came", "alone", "be", "brief"]


TURNS = ("chat=true", "prompt_column=messages")
ASKED = ("prompt_column=text", "completion_column=answer", "template={tone}: {text}\nWho? ")


def some_words():
    """Words, each on a line of its own."""
    return "\n".join(random.choices(WORDS, k=6))


def row(name, settings):
    if settings == ASKED:
        return {"id": name, "text": some_words(), "tone": random.choice(WORDS), "answer": "Bob\nor"}
    roles = ("user", "assistant") * random.randint(1, 2)
    return {"id": name, "messages": [{"role": r, "content": some_words()} for r in roles]}


def name_another_end(folder, text):
    """The last token of `text` ends answers, beside the one that ends messages."""
    from tokenizers import Tokenizer

    token = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[-1]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, token]}))


def write_data(folder, settings):
    random.seed(0)
    for name, count in (("train", 12), ("test", 6)):
        rows = [row(f"{name} {i}", settings) for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("settings", "spaces", "end"),
    [
        pytest.param(TURNS, False, "alone", id="conversations"),
        pytest.param(ASKED, True, "brief", id="template", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_transformers_with_their_lines(
    tmp_path, monkeypatch, settings, spaces, end
):
    write_qwen(tmp_path / "hub", spaces=spaces)
    name_another_end(tmp_path / "hub", end)
    write_data(tmp_path, settings)
    result(tpukit(
        "summarize-train", "--hw", "cpu", "--data-path", tmp_path, "--init", tmp_path / "hub",
        "--block-size", "256", *(w for s in settings for w in ("--set", s)),
        "--set", "score_samples=0", "--set", "max_new_tokens=9", "--set", "warmup_steps=1",
        "--max-steps", "30",
        "--global-batch-size", "4", "--lr", "0.02", "--results-dir", tmp_path / "run",
        "--export", tmp_path / "export", "--json",
    ))  # fmt: skip
    told = result(tpukit(
        "predict", "--run", tmp_path / "run", "--data-path", tmp_path, "--hw", "cpu",
        "--out", tmp_path / "answers.csv", "--json",
    ))  # fmt: skip

    monkeypatch.chdir(tmp_path / "export")
    code = "".join(re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL))
    code = code.replace("max_new_tokens=100", "max_new_tokens=9")
    expected, cut_off = {}, 0
    for row in map(json.loads, (tmp_path / "test.jsonl").read_text().splitlines()):
        exec(code, names := {**row, "messages": row.get("messages", [])[:-1]})
        made = names["tokens"][0, names["inputs"]["input_ids"].shape[1] :]
        ends = names["model"].generation_config.eos_token_id
        cut_off += not {*made.tolist()} & {*ends}
        stop = next((n for n, token in enumerate(made.tolist()) if token in ends), None)
        made = made[:stop]
        expected[row["id"]] = names["tokenizer"].decode(made, skip_special_tokens=True).strip()
    with (tmp_path / "answers.csv").open(newline="") as file:
        assert {row[0]: row[1] for row in [*csv.reader(file)][1:]} == expected
    assert told["cut_off"] == cut_off
    assert cut_off < 6 if end == "alone" else any("\n" in text for text in expected.values())


def test_a_prompt_of_a_readme_may_be_a_list_of_messages():
    class Tokenizer:
        def apply_chat_template(self, messages, **options):
            return messages

    code = _python_of(PromptStyle(Columns("prompt", "completion"), chat=True))
    said = [{"role": "user", "content": "Who?"}]
    for prompt in ("Who?", said):
        assert eval(code, {"tokenizer": Tokenizer(), "prompt": prompt}) == said
