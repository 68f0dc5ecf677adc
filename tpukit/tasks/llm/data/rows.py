"""Rows of prompts and completions, in a stream; every mistake is named by file, row, column."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpukit.errors import DataError
from tpukit.io.tables import column_place, is_table_name, open_table, plain_name, table_file

UNREAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of messages that chat templates write beside the content."""
NO_MESSAGES = (
    "not a list of messages of a role and a text.",
    'Expected [{"role": "user", "content": "..."}, ...]; what calls tools, and reasoning,'
    " is written into the content; a weight of 0 is not read.",
)
SAID_BY = {"role", "from"}
"""Fields by which an object in a list is a message, of ShareGPT's form too."""
BESIDE = ("tools", "chat_template_kwargs")
"""Columns of TRL that chat templates take beside the messages."""
NOTHING = (None, "", "[]", "{}")


@dataclass(frozen=True)
class Columns:
    """What the columns of a file are called."""

    prompt: str = "dialogue"
    completion: str = "summary"
    id: str | None = "id"
    """None: rows are known by their numbers."""
    further: tuple[str, ...] = ()
    """Columns that a template names."""
    has_messages: bool = False
    """The prompt's column holds messages (JSON), of which the last of the assistant is learned."""
    rejected: str | None = None
    """The column of completions that are to become less likely than the others."""

    @property
    def flags_learned(self) -> bool:
        """Whether what is learned is not the end of a sample."""
        return self.has_messages or self.rejected is not None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, the id first."""
        rejected = filter(None, [self.rejected])
        return (*filter(None, [self.id]), self.prompt, self.completion, *rejected, *self.further)


DIALOGUES = Columns()
"""Columns of dialogue summaries."""


@dataclass(frozen=True)
class Row:
    """One row; `number` counts data rows from 1, as a spreadsheet without its header would."""

    number: int
    id: str
    dialogue: str
    """The prompt's column."""
    summary: str
    """The completion's column; empty where the file has none."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Other columns of a template."""
    rejected: str = ""
    """The rejected completion; empty where there is none."""
    has_messages: bool = False
    """The dialogue is a list of messages (JSON)."""


def read_rows(
    path: Path, *, summaries: bool, dialogues: bool = True, pairs: bool = False,
    columns: Columns = DIALOGUES,
) -> Iterator[Row]:  # fmt: skip
    """The rows of a table with the id's column and, as asked for, prompts and completions; pairs:
    with rejected completions, where there is a column of them.

    Raises `DataError` at the first thing it cannot take: what `open_table` cannot, a missing
    column, an empty or repeated id, an empty field, or no rows at all.
    """
    has_messages, learned = dialogues and columns.has_messages, summaries
    summaries = summaries and not has_messages
    asked = {columns.prompt: dialogues, columns.completion: summaries, columns.rejected: pairs}
    texts = tuple(name for name, wanted in asked.items() if wanted and name)
    seen: dict[str, int] = {}
    table = open_table(path)
    needed = (*filter(None, [columns.id]), *texts, *(columns.further if dialogues else ()))
    missing = [name for name in needed if column_place(table.columns, name) is None]
    hint = _naming(table.columns, missing, columns)
    # Completions may be whole conversations.
    is_whole = missing == [columns.prompt] and columns.completion in table.columns
    if is_whole:
        needed, texts = (tuple(n for n in names if n not in missing) for names in (needed, texts))
    places = table.places(needed, hint)
    beside = BESIDE if dialogues else ()
    known = {name: column_place(table.columns, name) for name in (*columns.names, *beside)}
    places |= {name: place for name, place in known.items() if place is not None}
    row = None
    for record in table.records:
        where = table.where(record)
        values = {name: record.fields[at] for name, at in places.items()}
        row = _row(record.number, values, columns)
        _check_id(where, row, seen, columns.id)
        _check_texts(where, row, {name: values[name] for name in texts})
        if has_messages:
            row = _of_messages(where, row, columns.prompt, learned=learned)
        else:
            row = _of_lists(where, row, columns)
            if is_whole and not row.has_messages:
                table.places(missing, hint)
        for name in beside if row.has_messages else ():
            if values.get(name) not in NOTHING:
                raise DataError(
                    f"{where}, column {name!r}: the chat template is given messages alone.",
                    "Write what it says into the system's message, and remove the column.",
                )
        yield row
    if row is None:
        table.places(missing, hint)
        raise DataError(
            f"{path} has no rows below its header.", "Give a file with at least one dialogue."
        )


def _naming(there: Sequence[str], missing: Sequence[str], columns: Columns) -> str | None:
    """How to name the columns that are missing."""
    if {"messages", "conversations"}.intersection(there) and columns.prompt in missing:
        return (
            "Conversations need --set chat=true --set prompt_column=messages, a column of"
            ' [{"role": "user", "content": "..."}, ...].'
        )
    kinds = {columns.id: "id", columns.prompt: "prompt", columns.completion: "completion",
             columns.rejected: "rejected"}  # fmt: skip
    options = [f"--set {kinds[name]}_column=NAME" for name in missing if name in kinds]
    if options and "rejected" in there and columns.rejected is None:
        options.append("--set rejected_column=rejected")
    numbered = "; an empty id_column numbers the rows" if columns.id in missing else ""
    return f"Name what it has: {' '.join(options)}{numbered}." if options else None


def training_file(data: Path) -> Path:
    """The table of a data path: the file itself, or a folder's train.csv."""
    return data if is_table_name(data) or data.is_file() else table_file(data, "train")


def extra_columns(path: Path, columns: Columns = DIALOGUES) -> list[str]:
    """Columns that nothing reads, each with the known name it resembles, for a warning."""
    names = {plain_name(name) for name in columns.names}
    others = (name for name in open_table(path).columns if plain_name(name) not in names)
    return [name + _did_you_mean(name, columns.names) for name in others]


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.strip().lower(), known, 1, 0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _row(number: int, values: Mapping[str, str], columns: Columns) -> Row:
    return Row(
        number,
        str(number) if columns.id is None else values.get(columns.id, "").strip(),
        values.get(columns.prompt, ""),
        values.get(columns.completion, ""),
        {name: values.get(name, "") for name in columns.further},
        values.get(columns.rejected or "", ""),
    )


def _of_messages(where: str, row: Row, column: str, *, learned: bool) -> Row:
    """The messages before the assistant's last one, which is the completion; what follows it in a
    conversation that is learned is left out."""
    messages = _listed(where, column, row.dialogue)
    where = f"{where}, column {column!r}"
    if messages is None:
        raise DataError(f"{where}: {NO_MESSAGES[0]}", NO_MESSAGES[1])
    if learned and not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: the assistant says nothing.", "Remove the row.")
    while learned and messages[-1]["role"] != "assistant":
        messages.pop()
    said = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
    if not messages:
        raise DataError(f"{where}: nothing precedes the assistant's message.", "Remove the row.")
    dialogue = json.dumps(messages, ensure_ascii=False)
    return replace(row, dialogue=dialogue, summary=said, has_messages=True)


def _of_lists(where: str, row: Row, columns: Columns) -> Row:
    """A row whose prompt or completions are lists of messages, as TRL has them.

    A completion is the assistant's message. One that is a whole conversation says what comes
    before: a prompt of plain text is its question then.
    """
    asked = _listed(where, columns.prompt, row.dialogue)
    names = (columns.completion, columns.rejected or "")
    said = [_listed(where, name, text)
            for name, text in zip(names, (row.summary, row.rejected), strict=True)]  # fmt: skip
    if asked is None and said == [None, None]:
        return row
    texts, before = [row.summary, row.rejected], []
    for number, (name, messages) in enumerate(zip(names, said, strict=True)):
        if messages is None:
            continue
        *first, last = messages
        known = [m["content"].strip() for m in first if m["role"] == "user"]
        is_whole = asked is None and row.dialogue.strip() in ("", *known)
        if last["role"] != "assistant" or (first and not is_whole):
            raise DataError(
                f"{where}, column {name!r}: not one message of the assistant.",
                f"Put what comes before it into {columns.prompt!r}, as a list of messages.",
            )
        texts[number] = last["content"]
        before.append(first)
    if any(first != before[0] for first in before):
        raise DataError(
            f"{where}: {names[0]!r} and {names[1]!r} differ before their last messages.",
            "Both must answer the same question.",
        )
    row = replace(row, summary=texts[0], rejected=texts[1])
    messages = asked or next(filter(None, before), None)
    if messages is None:
        return row
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}, column {columns.prompt!r}: the assistant's message is the last one.",
            "Put it into the completion.",
        )
    return replace(row, dialogue=json.dumps(messages, ensure_ascii=False), has_messages=True)


def _listed(where: str, column: str, text: str) -> list[dict[str, Any]] | None:
    """The messages that a field lists; None where it is plain text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        messages: list[dict[str, Any]] = json.loads(text)
    except (ValueError, RecursionError):
        return None
    kinds = [part.keys() & SAID_BY if isinstance(part, dict) else None for part in messages]
    if not messages or not all(kinds):
        return None
    texts = (message.get(name) for message in messages for name in ("role", "content"))
    # More than a role and a text, or what is not to be learned.
    more = any(message.get("weight") == 0 or any(map(message.get, UNREAD)) for message in messages)
    if more or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}, column {column!r}: {NO_MESSAGES[0]}", NO_MESSAGES[1])
    return messages


def _check_texts(where: str, row: Row, texts: Mapping[str, str]) -> None:
    for column, text in texts.items():
        if not text.strip():
            raise DataError(
                f"{where}, column {column!r} is empty (id {row.id!r}).",
                "Remove the row or fill it in.",
            )


def _check_id(where: str, row: Row, seen: dict[str, int], column: str | None) -> None:
    if column is None:
        return
    if not row.id:
        raise DataError(
            f"{where}, column {column!r} is empty.", "Every row needs an id of its own."
        )
    if row.id in seen:
        raise DataError(
            f"{where}, column {column!r}: {row.id!r} was row {seen[row.id]}'s already.",
            "Ids must be unique.",
        )
    seen[row.id] = row.number
