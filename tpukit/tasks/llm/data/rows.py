"""Rows of prompts and completions, in a stream; every mistake is named by file, row, column."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.tables import column_place, is_table_name, open_table, plain_name, table_file

UNREAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of messages that chat templates write beside the content."""


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
    conversations = "Conversations need --set chat=true --set prompt_column=messages."
    places = table.places(needed, conversations if "messages" in table.columns else None)
    known = {name: column_place(table.columns, name) for name in columns.names}
    places |= {name: place for name, place in known.items() if place is not None}
    row = None
    for record in table.records:
        where = table.where(record)
        values = {name: record.fields[at] for name, at in places.items()}
        row = _row(record.number, values, columns)
        _check_id(where, row, seen, columns.id)
        _check_texts(where, row, {name: values[name] for name in texts})
        yield _of_messages(where, row, columns.prompt, learned=learned) if has_messages else row
    if row is None:
        raise DataError(
            f"{path} has no rows below its header.", "Give a file with at least one dialogue."
        )


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
    where = f"{where}, column {column!r}"
    try:
        messages = json.loads(row.dialogue)
        if any(message.get(name) for message in messages for name in UNREAD):
            raise ValueError
        if learned and not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{where}: the assistant says nothing.", "Remove the row.")
        while learned and messages[-1]["role"] != "assistant":
            messages.pop()
        last = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        texts = [last, *(m[name] for m in messages for name in ("role", "content"))]
        if not messages or not all(isinstance(text, str) for text in texts):
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{where}: not a list of messages of a role and a text.",
            'Expected [{"role": "user", "content": "..."}, ...]; what calls tools, and reasoning,'
            " is written into the content.",
        ) from error
    return replace(row, dialogue=json.dumps(messages, ensure_ascii=False), summary=last)


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
