"""Prompts of any columns: templates, the model's chat template, several turns."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_qwen import write_tokenizer

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.llm.data.prompt import PromptFormat, PromptStyle
from tpukit.tasks.llm.data.rows import Columns, Row, read_rows
from tpukit.tasks.llm.data.tokenizer import ASKED, tokenizer_from_bytes
from tpukit.tasks.llm.data.tokenizer_choice import load_tokenizer
from tpukit.tasks.llm.evaluate import has_references, read_references, score_rows
from tpukit.tasks.llm.task import SummarizeTask

transformers = pytest.importorskip("transformers")

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who came?"},
    {"role": "assistant", "content": "Ann."},
    {"role": "user", "content": "And <|im_end|> Bob?"},
    {"role": "assistant", "content": "No, Ann alone."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:  # type: ignore[no-untyped-def]
    path: Path = tmp_path_factory.mktemp("hub")
    write_tokenizer(path)
    return path


def written(path: Path, rows: list[dict]) -> Path:  # type: ignore[type-arg]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tokens_are_those_of_transformers(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(str(folder / "tokenizer.json"))

    text = "Ann: e\u0301t\u00e9, 2026 \U0001f600 who?"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode([*ours.encode("Ann came."), ours.end, 5]) == "Ann came."
    assert ours.end == theirs.eos_token_id
    assert theirs.eos_token_id not in ours.encode("Ann <|end|>"), "texts have no special tokens"
    again = tokenizer_from_bytes(ours.to_bytes(), "the test")
    assert again == ours and again.to_bytes() == ours.to_bytes()


TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:\n\n{% endif %}"
)
MOVES = (
    "{% set first = messages[0] if messages[0].role == 'system' else none %}{{ bos_token }}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and first %}{{ first.content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [TRIMS, MOVES], ids=["trims", "moves the system's"])
@pytest.mark.parametrize("spaces", [True, False], ids=["SentencePiece", "byte-level"])
def test_prompts_of_any_text_have_the_tokens_of_transformers(
    tmp_path: Path, template: str, spaces: bool
) -> None:
    """Words and line breaks of the template and of the text share tokens; blanks may go."""
    write_tokenizer(tmp_path, chat=template, spaces=spaces)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    base = load_tokenizer(str(tmp_path))
    plain = PromptStyle(Columns("text", "answer", None, ("tone",)), "{tone}: {text}\nWho? ")
    turns = PromptStyle(Columns("messages", id=None, has_messages=True), chat=True)
    asked = PromptStyle(Columns("text", "answer", None), chat=True)
    draw = random.Random(0)

    def text() -> str:
        return "".join(draw.choices(["Ann", "Bob", " ", "\n", "  ", "who?", "e\u0301"], k=5)) + "x"

    for roles in (["user"], ["system", "user"], ["system", "user", "assistant", "user"]) * 6:
        messages = [{"role": role, "content": text()} for role in roles]
        row = Row(1, "1", json.dumps(messages), text(), {"tone": text()})

        def of_theirs(messages: list[dict[str, str]]) -> list[int]:
            return theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]  # type: ignore[no-any-return]

        assert PromptFormat(base.for_chat(), 500, turns).prompt(row, 0) == of_theirs(messages)
        row = replace(row, dialogue=text())
        user = [{"role": "user", "content": row.dialogue}]
        assert PromptFormat(base.for_chat(), 500, asked).prompt(row, 0) == of_theirs(user)
        whole = theirs(f"{row.further['tone']}: {row.dialogue}\nWho? ")["input_ids"]
        assert PromptFormat(base, 500, plain).prompt(row, 0) == whole


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if loop.last or '</think>' not in m.content %}{{ m.content }}{% else %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}<|im_end|>{% endgeneration %}"
    "{% else %}{% set asked = m.content.replace('/brief', '').rstrip() %}"
    "{% if '/brief' in m.content %}Be brief.{% endif %}{{ asked or 'Nothing?' }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_templates_see_what_they_look_for(tmp_path: Path) -> None:
    """Earlier thoughts go, switches are obeyed, as transformers has it; so is what is learned."""
    write_tokenizer(tmp_path, chat=THINKS)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    turns = PromptStyle(Columns("messages", id=None, has_messages=True), chat=True)
    ours = PromptFormat(load_tokenizer(str(tmp_path)).for_chat(), 900, turns)
    draw = random.Random(1)

    def text() -> str:
        words = ["Ann", " ", "\n", "who?", "</think>", "<think>\n", "/brief", "\u00e9"]
        return "".join(draw.choices(words, k=draw.randint(1, 6)))

    for _ in range(60):
        messages = [
            {"role": role, "content": text()} for role in ("user", "assistant", "user", "assistant")
        ]
        row = Row(1, "1", json.dumps(messages[:3]), "")
        asked = theirs.apply_chat_template(messages[:3], add_generation_prompt=True)["input_ids"]
        assert ours.prompt(row, 0) == asked
    messages[1]["content"] = "<think>\nWho?\n</think>\n\nAnn."
    messages[3]["content"] = "<think>\nwho</think>Bob."
    example = ours.example(replace(row, dialogue=json.dumps(messages[:3]),
                                   summary=messages[3]["content"]))  # fmt: skip
    whole = theirs.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    assert example is not None and example.learned is not None
    assert example.tokens == whole["input_ids"][: len(example.tokens)]
    assert [*map(int, example.learned)] == whole["assistant_masks"][: len(example.tokens)]


TOOLS = (
    "{% if tools %}<tool_call>{...}</tool_call>{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% elif '<tool_call>' in m.content %}?<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", ["Ann", "<|im_end|>"])
def test_a_message_is_learned_from_its_beginning_to_its_end(tmp_path: Path, name: str) -> None:
    """Calls of tools, which the template looks for, are all of what these turns say."""
    write_tokenizer(tmp_path, chat=TOOLS)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    turns = PromptStyle(Columns("messages", id=None, has_messages=True), chat=True)
    ours = PromptFormat(load_tokenizer(str(tmp_path)).for_chat(), 900, turns)
    said = [f"<tool_call>\n{name}\n</tool_call>", f"So <tool_call>{name}</tool_call>", "Bob."]
    messages = [
        {"role": role, "content": text} for answer in said
        for role, text in (("user", "Who?"), ("assistant", answer))
    ]  # fmt: skip
    example = ours.example(Row(1, "1", json.dumps(messages[:-1]), "Bob."))
    assert example is not None and example.learned is not None
    learned = np.array(example.tokens)[example.learned]
    assert theirs.decode(learned) == "".join(f"{text}<|im_end|>" for text in said)


def test_an_end_in_plain_text_is_no_token_that_an_answer_may_have(tmp_path: Path) -> None:
    """A template whose `<|done|>` the tokenizer was not given: `<` alone would end answers."""
    write_tokenizer(tmp_path, chat=TOOLS.replace("<|im_end|>", "<|done|>"))
    tokenizer = load_tokenizer(str(tmp_path)).for_chat()
    assert tokenizer.decode([*tokenizer.encode("1 < 2"), tokenizer.end, 5]) == "1 < 2"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content + eos_token }}{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}(INST) {{ m.content }} (/INST)"
    "{% else %}{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("blank", ["first", "always"])
@pytest.mark.parametrize("template", [CHATML, ZEPHYR, LLAMA_2], ids=["ChatML", "Zephyr", "Llama 2"])
def test_an_answer_has_the_tokens_of_the_whole_text(
    tmp_path: Path, template: str, blank: str
) -> None:
    """Of tokenizers that write a blank before every text, or after each special token."""
    write_tokenizer(tmp_path, chat=template, spaces=True)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"first"', f'"{blank}"'))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    turns = PromptStyle(Columns("messages", id=None, has_messages=True), chat=True)
    asked = PromptStyle(Columns("text", "answer", None), chat=True)
    chat = load_tokenizer(str(tmp_path)).for_chat()
    several, one = (PromptFormat(chat, 900, style) for style in (turns, asked))
    draw = random.Random(2)

    def text() -> str:
        return "Bob" + "".join(draw.choices(["Ann", " ", "who?", "\u00e9", "came"], k=6)) + "x"

    roles = ("user", "assistant", "user", "assistant")
    for _ in range(20):
        messages = [{"role": role, "content": text()} for role in roles]
        last = messages[3]["content"]
        example = several.example(Row(1, "1", json.dumps(messages[:3]), last))
        single = one.example(Row(1, "1", messages[2]["content"], last))
        for found, said in ((example, messages), (single, messages[2:])):
            whole = theirs.apply_chat_template(
                said, return_assistant_tokens_mask=True, return_dict=True
            )
            assert found is not None
            count = len(found.tokens)
            assert found.tokens == whole["input_ids"][:count]
            mask = whole["assistant_masks"][:count]
            assert sum(mask) == found.targets == sum(whole["assistant_masks"])
            assert found.learned is None or mask == [*map(int, found.learned)]


CLOSES = CHATML.replace("{% generation %}{{ m.content }}", "{% generation %}{{ m.content }}"
                        "{% if '<think>' in m.content %}</think>{% endif %}")  # fmt: skip


def test_an_answer_that_the_template_goes_on_with_learns_its_end(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat=CLOSES)
    turns = PromptStyle(Columns("messages", id=None, has_messages=True), chat=True)
    formats = PromptFormat(load_tokenizer(str(tmp_path)).for_chat(), 900, turns)
    said = [MESSAGES[1], {"role": "assistant", "content": "<think>Ann?"}, MESSAGES[3]]
    example = formats.example(Row(1, "1", json.dumps(said), "Bob"))
    assert example is not None and example.learned is not None
    learned = np.array(example.tokens)[example.learned]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.decode(learned) == "<think>Ann?<|im_end|>Bob<|im_end|>"


ASKS_IF_EMPTY = CHATML.replace("{{ m.content }}<|im_end|>{% end", "{{ m.content or '?' }}<|im_end|>"
                               "{% end", 1)  # fmt: skip


@pytest.mark.parametrize("template", [CHATML, ZEPHYR, THINKS, ASKS_IF_EMPTY])
@pytest.mark.parametrize("said", ["", "  ", "</think>", "<think>\nWho?</think>\n", "\n  Ann "])
def test_an_earlier_answer_is_learned_as_transformers_masks_it(
    tmp_path: Path, template: str, said: str
) -> None:
    write_tokenizer(tmp_path, chat=template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    turns = PromptStyle(Columns("messages", id=None, has_messages=True), chat=True)
    formats = PromptFormat(load_tokenizer(str(tmp_path)).for_chat(), 900, turns)
    messages = [{"role": role, "content": text} for role, text in (
        ("user", "Who?"), ("assistant", said), ("user", "Bob?"), ("assistant", "Ann"))]  # fmt: skip
    example = formats.example(Row(1, "1", json.dumps(messages[:3]), "Ann"))
    whole = theirs.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    assert example is not None and example.learned is not None
    count = len(example.tokens)
    assert example.tokens == whole["input_ids"][:count]
    own = [*map(int, example.learned)]
    if not (template == ASKS_IF_EMPTY and not said):  # the template says it
        assert own == whole["assistant_masks"][:count]


def test_an_answer_after_a_template_has_the_tokens_of_the_whole_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, spaces=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    style = PromptStyle(Columns("text", "answer", None), "{text}\nwho?\n")
    example = PromptFormat(load_tokenizer(str(tmp_path)), 200, style).example(
        Row(1, "1", "Ann came.", "Bob alone.")
    )
    assert example is not None
    assert example.tokens[:-1] == theirs("Ann came.\nwho?\nBob alone.")["input_ids"]


def test_fields_that_templates_write_beside_the_content_are_refused(tmp_path: Path) -> None:
    columns = Columns("messages", id=None, has_messages=True)
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "find"}]}
    path = written(tmp_path / "train.jsonl", [{"messages": [MESSAGES[1], called]}])
    with pytest.raises(DataError, match="not a list of messages of a role and a text"):
        list(read_rows(path, summaries=True, columns=columns))
    written(path, [{"messages": [MESSAGES[1], MESSAGES[2] | {"weight": 0}]}])
    with pytest.raises(DataError, match="not a list of messages of a role and a text"):
        list(read_rows(path, summaries=True, columns=columns))
    called |= {"content": "Ann.", "tool_calls": []}
    written(path, [{"messages": [MESSAGES[1], called]}])
    assert len(list(read_rows(path, summaries=True, columns=columns))) == 1


def test_a_long_conversation_loses_its_oldest_turns(folder: Path) -> None:
    """The system's message and the last turns are asked, as chats do."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    turns = PromptStyle(Columns("messages", id=None, has_messages=True), chat=True)
    system = {"role": "system", "content": "Be brief."}
    talk = [
        {"role": role, "content": f"{word} said turn {turn}."}
        for turn in range(4) for role, word in (("user", "Ann"), ("assistant", "Bob"))
    ][:-1]  # fmt: skip
    row = Row(1, "1", json.dumps([system, *talk]), "", {})
    for start in (4, 6):
        kept = [system, *talk[start:]]
        expected = theirs.apply_chat_template(kept, add_generation_prompt=True)["input_ids"]
        chat = PromptFormat(load_tokenizer(str(folder)).for_chat(), len(expected) + 8, turns)
        assert chat.prompt(row, 8) == chat.prompt(row, 5) == expected
    # Then the longest message but the system's loses its end.
    for kept in (chat.prompt(row, 13), chat.prompt(row, 20)):
        text = theirs.decode(kept, skip_special_tokens=False)
        said = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        assert talk[-1]["content"].startswith(said)
        shorter = [system, {"role": "user", "content": said}]
        assert kept == theirs.apply_chat_template(shorter, add_generation_prompt=True)["input_ids"]
    with pytest.raises(DataError, match="Row 1: without its question the conversation is"):
        chat.prompt(row, len(expected))


def test_a_conversation_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    write_tokenizer(tmp_path, chat=refuses + TRIMS)
    style = PromptStyle(Columns("messages", id=None, has_messages=True), chat=True)
    formats = PromptFormat(load_tokenizer(str(tmp_path)).for_chat(), 200, style)
    assert formats.example(Row(1, "1", json.dumps(MESSAGES[1:2]), "Ann")) is not None
    with pytest.raises(DataError, match=r"Row 7: .* refuses system, user: no system"):
        formats.example(Row(7, "7", json.dumps(MESSAGES[:2]), "Ann"))


@pytest.mark.parametrize(
    ("asked", "said", "kept"),
    [(8, 25, (9, 25)), (8, 31, None), (90, 19, (20, 19)), (90, 25, None)],
    ids=["fits whole", "does not fit", "the prompt is cut", "half is too little"],
)
def test_long_answers_are_learned_where_they_fit(
    folder: Path, asked: int, said: int, kept: tuple[int, int] | None
) -> None:
    """Dialogues' summaries may take 30 %; whose answers are long asks for them."""
    style = PromptStyle(Columns("text", "answer", None), "{text}?")
    formats = PromptFormat(load_tokenizer(str(folder)), 40, style)
    example = formats.example(Row(1, "1", "1" * asked, "2" * said))
    tokens = example and (len(example.tokens) - example.targets, example.targets - 1)
    assert tokens == kept


def test_a_long_prompt_loses_the_end_of_its_column(folder: Path) -> None:
    """Never the template; an answer ends as the template ends it."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    style = PromptStyle(Columns("text", "answer", None, ("tone",)), "Be {tone}: {text}", True)
    chat = load_tokenizer(str(folder)).for_chat()
    row = Row(1, "1", "Bob " * 90, "Ann.", {"tone": "brief"})
    short = PromptFormat(chat, 40, style).prompt(row, 4)
    assert len(short) == 36 and theirs.decode(short).endswith("<|im_start|>assistant\n")
    example = PromptFormat(chat, 40, style).example(row)
    assert example is not None
    assert theirs.decode(example.tokens[-example.targets :]) == "Ann.<|im_end|>"


def test_a_prompt_that_is_cut_has_no_blank_more(tmp_path: Path) -> None:
    """Of a tokenizer that writes one before every text."""
    write_tokenizer(tmp_path, spaces=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    formats = PromptFormat(
        load_tokenizer(str(tmp_path)), 40, PromptStyle(Columns("text"), "{text}\nwho?\n")
    )
    tokens = formats.prompt(Row(1, "1", "Bob" * 90, ""), 0)
    assert len(tokens) == 40 and theirs.decode(tokens).endswith("Bob\nwho?\n")


def test_a_template_beyond_the_context_is_refused(folder: Path) -> None:
    style = PromptStyle(Columns("text", "answer", None, ("tone",)), "{tone} {text}")
    formats = PromptFormat(load_tokenizer(str(folder)), 32, style)
    row = Row(7, "7", "Who?", "Ann", {"tone": "Bob " * 40})
    with pytest.raises(DataError, match="Row 7: without 'text' the prompt has"):
        formats.example(row)


def test_further_columns_are_text(folder: Path) -> None:
    """Tokens as of the whole prompt; what looks like a special token, or a column, stays text."""
    chat = load_tokenizer(str(folder)).for_chat()
    columns = Columns("text", "answer", None, ("tone", "who"))
    formats = PromptFormat(chat, 200, PromptStyle(columns, "Be {tone}, {who}: {text}", True))
    asked = {"tone": "brief", "who": "Ann"}
    row = Row(1, "1", "alone?", "", asked)
    first, last = chat.chat_pieces(ASKED, asks=True).texts
    assert formats.prompt(row, 0) == chat.encode_parts([f"{first}Be brief, Ann: alone?{last}"])
    row = replace(row, further={"tone": "<|im_end|>", "who": "{tone}"})
    tokens = formats.prompt(row, 0)
    assert tokens.count(chat.end) == chat.encode_parts([first + last]).count(chat.end)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert "Be <|im_end|>, {tone}: alone?" in theirs.decode(tokens)


def test_a_last_message_is_learned_after_what_asks_for_it(tmp_path: Path) -> None:
    """Qwen3's template writes an empty thought before a last answer, and none in a prompt."""
    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    thinking = "{% if loop.last and message.role == 'assistant' %}<think></think>{% endif %}"
    settings["chat_template"] = settings["chat_template"].replace(
        "{{ message['content']", thinking + "{{ message['content']"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = theirs.apply_chat_template(MESSAGES[:2], add_generation_prompt=True, tokenize=False)
    assert "<think>" in theirs.apply_chat_template(MESSAGES[:3], tokenize=False)
    columns = Columns("messages", id=None, has_messages=True)
    rows = written(tmp_path / "train.jsonl", [{"messages": MESSAGES[:3]}])
    (row,) = read_rows(rows, summaries=True, columns=columns)
    formats = PromptFormat(load_tokenizer(str(tmp_path)).for_chat(), 200,
                           PromptStyle(columns, chat=True))  # fmt: skip
    example = formats.example(row)
    assert example is not None and example.learned is not None
    assert theirs.decode(example.tokens) == f"{asked}Ann.<|im_end|>"
    said = [t for t, learned in zip(example.tokens, example.learned, strict=True) if learned]
    assert theirs.decode(said) == "Ann.<|im_end|>"
    assert formats.prompt(row, 0) == example.tokens[: -len(said)]


ANSWERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}BEFORE"
    "{{ m.content }}{% else %}\n{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistantASKS{% endif %}"
)
NO_THOUGHT = "{% if '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("before", "asks", "said", "learned"),
    [
        ("\n" + NO_THOUGHT, "\n<think>\n", "Ann.", "\n</think>\n\nAnn."),
        ("\n" + NO_THOUGHT, "\n<think>\n", "<think>\nWho?\n</think>\n\nAnn.", None),
        ("\n", "\n<think>\n", "Ann.", "\n</think>\n\nAnn."),
        ("\n", "\n<think>\n", "<think>\nWho?\n</think>\n\nAnn.", None),
        ("\n" + NO_THOUGHT, "\n", "Ann.", "Ann."),
        ("<|begin|>final:", "", "Ann.", "<|begin|>final:Ann."),
    ],
    ids=["empty thought", "thought", "begun thought", "thought as text", "Qwen3", "gpt-oss"],
)
def test_an_answer_goes_on_from_what_the_prompt_begins(
    request: pytest.FixtureRequest, tmp_path: Path, before: str, asks: str, said: str,
    learned: str | None,
) -> None:  # fmt: skip
    """A thought is opened once and closed; what a template writes before answers is learned, and
    left out of what the model wrote."""
    template = ANSWERS.replace("BEFORE", before).replace("ASKS", asks)
    write_tokenizer(tmp_path, chat=template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    formats = PromptFormat(load_tokenizer(str(tmp_path)).for_chat(), 900,
                           PromptStyle(Columns("text", "answer", None), chat=True))  # fmt: skip
    example = formats.example(Row(1, "1", "Who came?", said))
    assert example is not None
    asked = {"role": "user", "content": "Who came?"}
    prompt = theirs.apply_chat_template([asked], add_generation_prompt=True, tokenize=False)
    end = f"{learned or said.removeprefix('<think>' + chr(10))}<|im_end|>"
    assert theirs.decode(example.tokens) == prompt + end
    assert theirs.decode(example.tokens[-example.targets :]) == end
    whole = theirs.apply_chat_template([asked, {"role": "assistant", "content": said}])["input_ids"]
    if "Qwen3" not in request.node.name and theirs.decode(whole).startswith(prompt):
        assert example.tokens == whole[: len(example.tokens)]
    assert formats.written(example.tokens[-example.targets :]) == said


def test_several_turns_learn_what_the_assistant_says(folder: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [{"messages": MESSAGES}, {"messages": MESSAGES[1:3]}, {"messages": MESSAGES[:3]}]
    written(tmp_path / "train.jsonl", rows)
    task = SummarizeTask(
        data_path=str(tmp_path), tokenizer=str(folder), model="1x1x16", block_size=128, chat=True,
        prompt_column="messages", id_column="", valid_fraction=0.0, packing=True,
    )  # fmt: skip
    train = task.datasets().train
    sample = train[0]
    # What a text says never becomes a special token: it is compared without.
    text = theirs.apply_chat_template(MESSAGES, tokenize=False).replace(" <|im_end|> Bob", "")
    found = theirs.decode(sample["tokens"]).replace(" <|im_end|> Bob", "")
    assert text.startswith(found) and found.endswith("<|im_end|>")
    said = theirs.decode(np.asarray(sample["tokens"])[sample["learned"]])
    assert said == "Ann.<|im_end|>No, Ann alone.<|im_end|>"
    assert sample["targets"] == sample["learned"].sum()
    prompt, targets = train.prompt_and_targets(0)
    assert theirs.decode(targets) == "No, Ann alone.<|im_end|>"
    assert theirs.decode(prompt).endswith("<|im_start|>assistant\n")
    whole = SummarizeTask(**{**vars(task.settings), "loss_on_prompt": True}).datasets().train
    assert whole[0]["targets"] == len(whole[0]["tokens"]) - 1


def test_what_follows_the_last_answer_is_not_learned(tmp_path: Path) -> None:
    columns = Columns("messages", id=None, has_messages=True)
    path = written(tmp_path / "x.jsonl", [{"messages": MESSAGES[:4]}])
    (learned,), (asked,) = (
        list(read_rows(path, summaries=way, columns=columns)) for way in (True, False)
    )
    assert (json.loads(learned.dialogue), learned.summary) == (MESSAGES[:2], "Ann.")
    assert (json.loads(asked.dialogue), asked.summary) == (MESSAGES[:4], "")
    path = written(tmp_path / "y.jsonl", [{"messages": MESSAGES[:2]}])
    with pytest.raises(DataError, match="the assistant says nothing"):
        list(read_rows(path, summaries=True, columns=columns))
    path = written(tmp_path / "z.jsonl", [{"messages": MESSAGES[2:3]}])
    with pytest.raises(DataError, match="nothing precedes the assistant's message"):
        list(read_rows(path, summaries=True, columns=columns))


def test_references_of_conversations_in_a_file_of_their_own(tmp_path: Path) -> None:
    columns = Columns("messages", "answer", has_messages=True)
    written(tmp_path / "test.jsonl", [{"id": "a", "messages": MESSAGES[:2]}])
    written(tmp_path / "test_references.jsonl", [{"id": "a", "answer": "Ann."}])
    (row,) = read_references(tmp_path, columns)
    assert (json.loads(row.dialogue), row.summary) == (MESSAGES[:2], "Ann.")


@pytest.mark.parametrize("count", [1, 3])
def test_questions_without_answers_are_no_references(tmp_path: Path, count: int) -> None:
    """As conversations that go on with a question are."""
    columns = Columns("messages", id=None, has_messages=True)
    for messages, has in ((MESSAGES[1 : count + 1], False), (MESSAGES[1:5], True)):
        written(tmp_path / "test.jsonl", [{"messages": messages}])
        assert has_references(tmp_path, columns) == has


def test_the_first_line_of_a_conversation_is_that_of_its_question(tmp_path: Path) -> None:
    columns = Columns("messages", id=None, has_messages=True)
    row = Row(1, "1", json.dumps(MESSAGES[:2]), "Who came?")
    metrics, each = score_rows([row], ["Who, Ann?"], tmp_path / "none.csv", columns, print)
    assert (metrics["rougeL_lead"], each.tolist()) == (1.0, [0.5])


def test_what_is_no_list_of_messages_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{"messages": MESSAGES}, {"messages": "hi"}])
    columns = Columns("messages", id=None, has_messages=True)
    with pytest.raises(DataError, match=r"row 2 .*not a list of messages"):
        list(read_rows(path, summaries=True, columns=columns))


def test_null_is_no_text_and_conversations_are_recognised(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{"id": 1, "q": 2, "a": None}])
    with pytest.raises(DataError, match=r"row 1 .*'a' is empty"):
        list(read_rows(path, summaries=True, columns=Columns("q", "a")))
    path = written(tmp_path / "x.jsonl", [{"id": 1, "q": "NaN", "a": float("nan")}])
    with pytest.raises(DataError, match=r"row 1 .*'a' is empty"):
        list(read_rows(path, summaries=True, columns=Columns("q", "a")))
    path = written(tmp_path / "x.jsonl", [{"id": 1, "q": ["\u00e9t\u00e9"], "a": "NaN"}])
    (row,) = read_rows(path, summaries=True, columns=Columns("q", "a"))
    assert (row.dialogue, row.summary) == ('["\u00e9t\u00e9"]', "NaN")
    path = written(tmp_path / "y.jsonl", [{"messages": MESSAGES}])
    with pytest.raises(DataError) as caught:
        list(read_rows(path, summaries=True))
    assert "--set chat=true --set prompt_column=messages" in str(caught.value.hint)
    columns = Columns("messages", id="name", has_messages=True)
    with pytest.raises(DataError, match="no column 'name'") as caught:
        list(read_rows(path, summaries=False, columns=columns))
    assert "--set id_column=NAME; an empty id_column numbers" in str(caught.value.hint)


ASKING, ANSWER, WORSE = MESSAGES[:4], MESSAGES[4:], [{"role": "assistant", "content": "Yes."}]


@pytest.mark.parametrize("said", [ASKING, ASKING[3]["content"], None], ids=["list", "text", "none"])
def test_prompts_and_completions_may_be_lists_of_messages(
    folder: Path, tmp_path: Path, said: object
) -> None:
    """As TRL has them; completions that are whole conversations, too, beside their question."""
    columns = Columns("prompt", "chosen", None, rejected="rejected")
    whole = [] if said is ASKING else ASKING
    row = {"prompt": said, "chosen": [*whole, *ANSWER], "rejected": [*whole, *WORSE]}
    row = {name: value for name, value in row.items() if value is not None}
    (read,) = read_rows(written(tmp_path / "x.jsonl", [row]), summaries=True, columns=columns)
    assert (json.loads(read.dialogue), read.summary) == (ASKING, ANSWER[0]["content"])
    base = load_tokenizer(str(folder)).for_chat()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    def plain(text: str) -> str:
        return text.replace(" <|im_end|> Bob", "")

    asked = plain(theirs.apply_chat_template(ASKING, add_generation_prompt=True, tokenize=False))
    pair = PromptFormat(base, 200, PromptStyle(columns, chat=True)).example(read)
    alone = PromptFormat(base, 200, PromptStyle(replace(columns, rejected=None), chat=True))
    single = alone.example(read)
    assert single is not None and single.learned is None and pair is not None
    ends = ("No, Ann alone.<|im_end|>", "Yes.<|im_end|>")
    assert plain(theirs.decode(pair.tokens)) == "".join(asked + end for end in ends)
    assert theirs.decode(np.array(pair.tokens)[pair.learned]) == "".join(ends)
    assert plain(theirs.decode(single.tokens)) == asked + ends[0]
    assert theirs.decode(single.tokens[-single.targets :]) == ends[0]
    for style in (PromptStyle(columns), PromptStyle(columns, "{prompt}", chat=True)):
        with pytest.raises(DataError, match="Row 1: 'prompt' is a list of messages, which"):
            PromptFormat(base, 200, style).example(read)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": ASKING, "completion": [*ASKING, *ANSWER]}, "'completion': not one message"),
        ({"prompt": "Who?", "completion": ASKING}, "'completion': not one message"),
        ({"prompt": [*ASKING, *ANSWER], "completion": ANSWER}, "'prompt': the assistant's message"),
        ({"prompt": [{"from": "human", "value": "Who?"}], "completion": "Ann"}, "not a list of"),
        ({"prompt": ASKING, "completion": ANSWER, "tools": [{"name": "x"}]}, "'tools': the chat"),
        ({"prompt": "Who?", "completion": [*ASKING[:2], *ANSWER]}, "not one message"),
    ],
)  # fmt: skip
def test_lists_of_messages_that_are_not_read_are_refused(
    tmp_path: Path, row: dict[str, object], said: str
) -> None:
    columns = Columns("prompt", "completion", None)
    path = written(tmp_path / "x.jsonl", [row])
    with pytest.raises(DataError, match=f"row 1 .*{said}"):
        list(read_rows(path, summaries=True, columns=columns))
    written(path, [{"prompt": ASKING, "completion": ANSWER, "tools": []}])
    assert len(list(read_rows(path, summaries=True, columns=columns))) == 1


def test_settings_that_do_not_go_together(tokenizer) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"must hold \{dialogue\}"):
        SummarizeTask(template="Sum up: {text}")
    with pytest.raises(ConfigError, match="conversations have none"):
        SummarizeTask(template="Sum up: {messages}", prompt_column="messages", chat=True)
    named = SummarizeTask(template='{my column}, {a-b}: {"k": {dialogue}}').settings.style.columns
    assert named.further == ("my column", "a-b")
    with pytest.raises(ConfigError, match="no chat template"):
        PromptFormat(tokenizer, 64, PromptStyle(chat=True))


def test_a_template_that_writes_no_plain_text_is_refused(tmp_path: Path) -> None:
    """Of images: it wants lists of parts."""
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    write_tokenizer(tmp_path, chat=parts + "<|im_end|>{% endfor %}")
    with pytest.raises(ConfigError, match="writes no messages of plain text"):
        PromptFormat(load_tokenizer(str(tmp_path)).for_chat(), 64, PromptStyle(chat=True))
