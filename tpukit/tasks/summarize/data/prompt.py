"""A sample as the model sees it: the prompt of a row, its completion, the end token."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from tpukit.errors import ConfigError
from tpukit.tasks.summarize.data.csv_file import DIALOGUES, Columns, Row
from tpukit.tasks.summarize.data.hub_tokenizer import HubTokenizer
from tpukit.tasks.summarize.data.tokenizer import Tokenizer, first_tokens

BEFORE_DIALOGUE = "\n\n### DIALOGUE:\n"
BEFORE_SUMMARY = "\n\n### SUMMARY:\n"
LONGEST_SUMMARY_SHARE = 0.3
"""A completion that needs more of the context than this leaves too little to the prompt."""


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
        return f"completions of over {LONGEST_SUMMARY_SHARE:.0%} of {block_size} tokens"

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
        tokenizer: Tokenizer | HubTokenizer,
        block_size: int,
        style: PromptStyle = SUMMARIES,
    ) -> None:
        if style.chat and not isinstance(tokenizer, HubTokenizer):
            raise ConfigError(
                "chat: this tokenizer has no chat template.", "Give --init DIR of a chat model."
            )
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.style = style
        self._encode_marked = getattr(tokenizer, "encode_marked", tokenizer.encode)
        self._marked = cache(self._encode_marked)
        self._pieces = cache(getattr(tokenizer, "chat_pieces", lambda *_, **__: ["", ""]))
        self._prefix = getattr(tokenizer, "prefix", [])

    def prompt(self, row: Row, room_after: int) -> list[int]:
        """The prompt of a row, leaving `room_after` tokens of the context free."""
        if self.style.columns.has_messages:
            roles, texts = _messages(row.dialogue)
            tokens = self._conversation(self._pieces(roles, asks=True), roles, texts)[0]
            return tokens[-max(self.block_size - room_after, 1) :]
        before, after = self.style.around
        if self.style.chat:
            first, last = self._pieces(("user",), asks=True)
            before, after = first + before, after + last
        start = [*self._prefix, *self._filled(before, row.further)]
        end = self._filled(after, row.further)
        room = self.block_size - room_after - len(start) - len(end)
        return [*start, *first_tokens(self.tokenizer.encode, row.dialogue, max(room, 0)), *end]

    def _filled(self, template: str, further: Mapping[str, str]) -> list[int]:
        """The tokens of a part of the template; special tokens are those of the template alone."""
        parts = self.style.places.split(template)
        parts[1::2] = [further[name] for name in parts[1::2]]
        encode = self.tokenizer.encode
        if len(parts) == 1:
            return list(self._marked(template))
        if all(encode(text) == self._encode_marked(text) for text in parts[1::2]):
            return list(self._encode_marked("".join(parts)))
        tokens = [encode(text) if n % 2 else self._marked(text) for n, text in enumerate(parts)]
        return [token for part in tokens for token in part]

    def example(self, row: Row) -> Example | None:
        """Prompt, completion and end token; None where they are too long to learn from."""
        if self.style.columns.has_messages:
            return self._example_of_messages(row)
        longest = int(self.block_size * LONGEST_SUMMARY_SHARE)
        targets = [
            *first_tokens(self.tokenizer.encode, row.summary, longest + 1),
            self.tokenizer.end,
        ]
        if len(targets) - 1 > longest:
            return None
        return Example([*self.prompt(row, len(targets)), *targets], len(targets))

    def _example_of_messages(self, row: Row) -> Example | None:
        """A conversation, of which the assistant's messages are learned.

        The last one follows what asks for it, as in generation; some templates (Qwen3's) write
        another beginning before a last message that is known.
        """
        roles, texts = _messages(row.dialogue)
        tokens, learned = self._conversation(self._pieces(roles, asks=True), roles, texts)
        said = [*self.tokenizer.encode(row.summary), self.tokenizer.end]
        if len(tokens) + len(said) > self.block_size:
            return None
        learned += [True] * len(said)
        return Example(tokens + said, sum(learned), learned)

    def _conversation(
        self, pieces: list[str], roles: tuple[str, ...], texts: tuple[str, ...]
    ) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and which of them the assistant says."""
        tokens = list(self._marked(pieces[0]))
        learned = [False] * len(tokens)
        for role, text, piece in zip(roles, texts, pieces[1:], strict=True):
            said, after = self.tokenizer.encode(text), self._marked(piece)
            own = role == "assistant"
            tokens += [*said, *after]
            ends = own and after[:1] == [self.tokenizer.end]
            learned += [own] * len(said) + [ends] * min(1, len(after)) + [False] * (len(after) - 1)
        return tokens, learned


def _messages(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Roles and texts of a conversation."""
    messages = json.loads(text)
    return tuple(m["role"] for m in messages), tuple(m["content"] for m in messages)
