"""A sample as the model sees it: the prompt of a row, its completion, the end token."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.llm.data.rows import DIALOGUES, Columns, Row
from tpukit.tasks.llm.data.tokenizer import ANSWERED, ASKED, PLACE, WRITTEN, ChatPieces, Tokenizer

BEFORE_DIALOGUE = "\n\n### DIALOGUE:\n"
BEFORE_SUMMARY = "\n\n### SUMMARY:\n"
LONGEST_SUMMARY_SHARE = 0.3
"""A summary that needs more of the context than this leaves too little to the dialogue."""
SYSTEM = ("system", "developer")
EMPTY_THOUGHT = re.compile(r"\s*<(\w+)>\s*</\1>\s*")
"""What some chat templates write before an answer without a thought."""


class Example(NamedTuple):
    """The tokens of one sample."""

    tokens: list[int]
    targets: int
    """How many of the last tokens are learned, or with `learned` how many of them all."""
    learned: list[bool] | None = None
    """Which tokens are learned, where they are not the last ones."""


@dataclass(frozen=True)
class PromptStyle:
    """How a row becomes a prompt."""

    columns: Columns = DIALOGUES
    template: str | None = None
    """Text with `{column}`s; None: the markers of dialogue summaries, or in a chat nothing."""
    chat: bool = False
    """The chat template of the tokenizer goes around it."""

    def check(self) -> None:
        """Raises `ConfigError` for a template without the prompt's column, or beside messages."""
        if self.columns.has_messages and self.template is not None:
            raise ConfigError(
                "template: conversations have none beside the chat template.",
                "Leave it out, or name a prompt_column of plain text.",
            )
        name = f"{{{self.columns.prompt}}}"
        if self.template is not None and self.template.count(name) != 1:
            raise ConfigError(
                f"template {self.template!r} must hold {name} once.",
                "It is the column that is cut in long prompts; `prompt_column` names it.",
            )

    def too_long(self, block_size: int) -> str:
        """What the rows have that are left out."""
        if self.columns.has_messages:
            return f"conversations of more than {block_size} tokens"
        if self == SUMMARIES:
            return f"completions of over {LONGEST_SUMMARY_SHARE:.0%} of {block_size} tokens"
        return f"completions of over half of {block_size} tokens that do not fit with their prompts"

    @cached_property
    def around(self) -> tuple[str, str]:
        """Texts before and after the prompt's column."""
        if self.template is None:
            return ("", "") if self.chat else (BEFORE_DIALOGUE, BEFORE_SUMMARY)
        before, _, after = self.template.partition(f"{{{self.columns.prompt}}}")
        return before, after

    @cached_property
    def places(self) -> re.Pattern[str]:
        """Where a template holds a further column; its group is the name."""
        return re.compile(f"{{({'|'.join(map(re.escape, self.columns.further)) or '(?!)'})}}")


SUMMARIES = PromptStyle()
"""Style of dialogue summaries."""


class PromptFormat:
    """Builds prompts that fit; what is too long is cut from the end of the prompt's column."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        block_size: int,
        style: PromptStyle = SUMMARIES,
    ) -> None:
        self._pieces = lru_cache(4096)(tokenizer.chat_pieces)
        if style.chat:
            _ = self._pieces(ASKED, asks=True)  # a tokenizer without a chat template ends here
            if not {0, 1} <= {*self._pieces(ANSWERED).order}:
                raise ConfigError(
                    f"chat: the chat template of {tokenizer.source} writes no messages of plain"
                    " text.",
                    "Give weights whose template does: those of images want lists of parts.",
                )
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.style = style

    def prompt(self, row: Row, room_after: int) -> list[int]:
        """The prompt of a row, leaving `room_after` tokens of the context free.

        The tokens are those of the whole text, as transformers makes them.
        """
        if row.has_messages or self.style.columns.has_messages:
            self._check_messages(row)
            room = max(self.block_size - room_after, 1)
            while (excess := len(tokens := self._conversation(row)[0]) - room) > 0:
                row = _without_oldest_turn(row) or self._cut(row, excess)
            return tokens
        room = self.block_size - room_after - len(self.tokenizer.prefix)
        before, text, after = self._parts(row)
        encode = self.tokenizer.encode_parts
        tokens = first_tokens(lambda text: encode([*before, text, *after]), text, max(room, 0) + 1)
        if len(tokens) > room:
            end, column = self._following("x", after), self.style.columns.prompt
            kept = room - len(end)
            if kept < (least := len(encode(before))):
                raise DataError(
                    f"Row {row.number}: without {column!r} the prompt has {least + len(end)}"
                    f" tokens; {room} of the context of {self.block_size} are left for it.",
                    "Raise --block-size, shorten the template, or name the longest of its columns"
                    " with --prompt-column: it is cut.",
                )
            tokens = first_tokens(lambda text: encode([*before, text]), text, kept) + end
        return [*self.tokenizer.prefix, *tokens]

    def _check_messages(self, row: Row) -> None:
        if not self.style.chat or self.style.template is not None:
            raise DataError(
                f"Row {row.number}: {self.style.columns.prompt!r} is a list of messages, which the"
                " chat template alone writes.",
                "Give --set chat=true and no template, or plain text.",
            )

    def _parts(self, row: Row) -> tuple[list[str], str, list[str]]:
        """The prompt's column, and what is before and after it: texts of the template and of
        further columns in turn."""
        before, after = (self.style.places.split(part) for part in self.style.around)
        for part in (before, after):
            part[1::2] = [row.further[name] for name in part[1::2]]
        parts = [*before, row.dialogue, *after]
        if self.style.chat:
            pieces = self._pieces(ASKED, asks=True)
            parts = _stripped(parts, *pieces.trimmed[0])
            parts[0], parts[-1] = pieces.texts[0] + parts[0], parts[-1] + pieces.texts[1]
        return parts[: len(before)], parts[len(before)], parts[len(before) + 1 :]

    def example(self, row: Row) -> Example | None:
        """Prompt, completion and end token, and the same of a rejected completion after them; None
        where they are too long to learn from.

        Of a conversation the assistant's messages are learned, of a pair the completions alone. The
        last message follows what asks for it, as in generation; some templates (Qwen3's) write
        another beginning before a last message that is known.
        """
        columns = self.style.columns
        said = [row.summary] if columns.rejected is None else [row.summary, row.rejected]
        if self.style.chat:
            trimmed = self._pieces(ANSWERED).trimmed[1]
            said = [text for each in said for text in _stripped([each], *trimmed)]
        answers = [[*first_tokens(self._answer, text, self.block_size), self.tokenizer.end]
                   for text in said]  # fmt: skip
        longest = max(map(len, answers))
        if columns.has_messages:
            prompt, learned = self._conversation(row)
        else:
            prompt = self.prompt(row, min(longest, self.block_size // 2))
            learned = [False] * len(prompt)
        fits = len(prompt) + longest <= self.block_size
        if self.style == SUMMARIES:
            fits = longest - 1 <= int(self.block_size * LONGEST_SUMMARY_SHARE)
        if not fits:
            return None
        tokens = [token for answer in answers for token in (*prompt, *answer)]
        if not columns.flags_learned:
            return Example(tokens, longest)
        if columns.rejected:
            learned = [False] * len(prompt)
        flags = [flag for answer in answers for flag in (*learned, *[True] * len(answer))]
        return Example(tokens, sum(flags), flags)

    def _answer(self, said: str) -> list[int]:
        """The tokens of an answer as they follow those of the prompt in the whole text."""
        asks, gap, tag = self._lead
        if tag:
            said = re.sub(rf"^\s*<{tag}>\n?", "", said)
            gap = "" if f"</{tag}>" in said else gap
        return self._following(asks, [gap, said])

    def _following(self, text: str, parts: Sequence[str]) -> list[int]:
        """The tokens of parts, of the template and of data in turn, as they follow a text.

        Alone they would begin with the blank that some tokenizers write before every text.
        """
        encode = self.tokenizer.encode_parts
        before, tokens = encode([text]), encode([text + parts[0], *parts[1:]])
        follows = text and tokens[: len(before)] == before
        return tokens[len(before) :] if follows else encode(parts)

    def written(self, tokens: Iterable[int]) -> str:
        """The text of an answer's tokens, as a row has it."""
        asks, gap, tag = self._lead
        first, made = self._following(asks, [gap.rstrip()]), [*map(int, tokens)]
        text = self.tokenizer.decode(made[len(first) if made[: len(first)] == first else 0 :])
        return f"<{tag}>\n{text}".strip() if tag and f"</{tag}>" in text else text.strip()

    @cached_property
    def _lead(self) -> tuple[str, str, str]:
        """The end of a prompt, what is learned before an answer, and the tag of a thought that the
        prompt begins: an answer without a thought ends it."""
        if not self.style.chat:
            return self.style.places.split(self.style.around[1])[-1], "", ""
        asks = self._pieces(ASKED, asks=True).texts[-1]
        known = self._pieces(ANSWERED).texts[1]
        gap = known.removeprefix(asks) if known.startswith(asks) else ""
        # An empty thought that the prompt does not begin (Qwen3's) is not learned.
        gap = "" if EMPTY_THOUGHT.fullmatch(gap) else gap
        begun = re.search(r"<(\w+)>\s*$", asks)
        if begun is None:
            return asks, gap, ""
        return asks, gap or f"\n</{begun[1]}>\n\n", begun[1]

    def _conversation(self, row: Row) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation before its last answer, and which of them the assistant
        says."""
        messages, data, edges = self._placed(row)
        pieces = self._rendered(row, messages)
        written = {data[place][1] for place in pieces.order}
        roles = enumerate((role for role, _ in messages), 1)
        silent = {n for n, role in roles if role == "assistant" and n not in written}
        if silent:
            marked = self._placed(row, silent)
            found = self._rendered(row, marked[0])
            # A template may ask whether a message is empty.
            if _filled(found, marked[1]) == _filled(pieces, data):
                (messages, data, edges), pieces = marked, found
        said = [0, *(data[place][1] for place in pieces.order), 0]
        parts: list[tuple[str, int]] = []
        for n, piece in enumerate(pieces.texts):
            # Before a place whose blanks stay, blanks are the message's own.
            stay = n < len(pieces.order) and not pieces.trimmed[n][0]
            parts += _by_message(piece, (said[n], said[n + 1]), edges, blanks=stay)
            if n < len(pieces.order):
                place, trimmed = pieces.order[n], pieces.trimmed[n]
                parts += [(text, said[n + 1]) for text in _stripped([data[place][0]], *trimmed)]
        tokens, first, last = self.tokenizer.encode_spans([text for text, _ in parts])
        numbers = np.array([number for _, number in parts])
        own = np.array([False, *(role == "assistant" for role, _ in messages)])[numbers]
        learned = own[first] | own[last]
        # So is the first end token after what the assistant says, which may be nothing.
        latest = np.maximum.accumulate(np.where(numbers > 0, np.arange(len(numbers)), -1))
        ends = np.flatnonzero(np.array(tokens) == self.tokenizer.end)
        said_last = np.append(-1, latest)[first[ends]]
        learned[ends] |= (np.diff(said_last, prepend=-1) > 0) & own[said_last]
        return tokens, learned.tolist()

    def _placed(
        self, row: Row, silent: Collection[int] = ()
    ) -> tuple[list[tuple[str, str]], list[tuple[str, int]], list[tuple[str, str]]]:
        """Messages with places for data, the data with their messages' numbers, and what the
        messages begin and end with beside them; silent: messages that get a place in any case."""
        messages: list[tuple[str, str]] = []
        data: list[tuple[str, int]] = []
        edges = [("", "")]
        for number, message in enumerate(json.loads(row.dialogue), 1):
            text = message["content"]
            seen, rest = self.tokenizer.with_places(text, len(data))
            if number in silent:
                is_blank = not text.strip()
                seen = seen * (not is_blank) + PLACE.format(len(data) + len(rest))
                rest = [*rest, text * is_blank]
            messages.append((message["role"], seen))
            data += [(part, number) for part in rest]
            around = WRITTEN.split(seen)
            edges.append((around[0], around[-1]))
        return messages, data, edges

    def _rendered(self, row: Row, messages: Sequence[tuple[str, str]]) -> ChatPieces:
        try:
            return self._pieces(tuple(messages), asks=True)
        except DataError as error:
            raise DataError(f"Row {row.number}: {error.message}", error.hint) from error

    def _cut(self, row: Row, excess: int) -> Row:
        """A conversation whose longest message but the system's loses as many characters."""
        messages = json.loads(row.dialogue)
        longest = max(messages, key=lambda m: (m["role"] not in SYSTEM, len(m["content"])))
        if not longest["content"]:
            raise DataError(
                f"Row {row.number}: without its question the conversation is {excess} tokens longer"
                f" than what the context of {self.block_size} leaves for it.",
                "Raise --block-size or shorten the system's message.",
            )
        longest["content"] = longest["content"][:-excess]
        return replace(row, dialogue=json.dumps(messages))


def first_tokens(encode: Callable[[str], list[int]], text: str, limit: int) -> list[int]:
    """The first `limit` tokens of `text`, without reading much further (fields of 10 MB)."""
    characters = limit * 8
    while True:
        tokens = encode(text[:characters])
        if len(tokens) > limit or characters >= len(text):
            return tokens[:limit]
        characters *= 4


def _stripped(texts: list[str], at_start: bool, at_end: bool) -> list[str]:
    """Without the blanks at the ends of them all."""
    places = range(len(texts))
    ways = [(places, str.lstrip)] * at_start + [(places[::-1], str.rstrip)] * at_end
    for order, strip in ways:
        for place in order:
            texts[place] = strip(texts[place])
            if texts[place]:
                break
    return texts


def _filled(pieces: ChatPieces, data: Sequence[tuple[str, int]]) -> str:
    """What a chat template wrote, with the data in their places."""
    texts = [pieces.texts[0]]
    for place, trimmed, text in zip(pieces.order, pieces.trimmed, pieces.texts[1:], strict=True):
        texts += [*_stripped([data[place][0]], *trimmed), text]
    return "".join(texts)


def _by_message(
    piece: str, said: tuple[int, int], edges: Sequence[tuple[str, str]], *, blanks: bool
) -> list[tuple[str, int]]:
    """What a template wrote between places of two messages, each part with the message that it is
    of, 0 for none: messages may end and begin with what the template looks for.

    blanks: the second begins with them, where it does; else they may be the template's.
    """
    before, after = said
    if before == after:
        return [(piece, before)]
    end, start = edges[before][1], edges[after][0]
    end = next((text for text in (end, end.rstrip()) if piece.startswith(text)), "")
    rest = piece.removeprefix(end)
    ways = (start, start.lstrip())
    start = next((t for t in ways if (blanks or t.strip()) and rest.endswith(t)), "")
    # Texts of the template and data take turns.
    parts = [(end, before), ("", 0)] * bool(end) + [(rest.removesuffix(start), 0)]
    return parts + [("", 0), (start, after)] * bool(start)


def _without_oldest_turn(row: Row) -> Row | None:
    """A conversation without what precedes its second question but the system's message, as chats
    go on; None where there is one question."""
    messages = json.loads(row.dialogue)
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if len(asked) < 2:
        return None
    first = [message for message in messages[:1] if message["role"] in SYSTEM]
    return replace(row, dialogue=json.dumps([*first, *messages[asked[1] :]]))
