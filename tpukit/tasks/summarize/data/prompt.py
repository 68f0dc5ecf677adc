"""A dialogue as the model sees it: markers around it, the summary and the end token after it."""

from __future__ import annotations

from typing import NamedTuple

from tpukit.tasks.summarize.data.tokenizer import Tokenizer

BEFORE_DIALOGUE = "\n\n### DIALOGUE:\n"
BEFORE_SUMMARY = "\n\n### SUMMARY:\n"
LONGEST_SUMMARY_SHARE = 0.3
"""A summary that needs more of the context than this leaves too little to the dialogue."""


class Example(NamedTuple):
    """The tokens of one sample; the last `targets` of them are what is learned."""

    tokens: list[int]
    targets: int


class PromptFormat:
    """Builds prompts that fit; what is too long is cut from the end of the dialogue."""

    def __init__(self, tokenizer: Tokenizer, block_size: int) -> None:
        self.tokenizer = tokenizer
        self.block_size = block_size
        self._before = tokenizer.encode(BEFORE_DIALOGUE)
        self._between = tokenizer.encode(BEFORE_SUMMARY)

    def prompt(self, dialogue: str, room_after: int) -> list[int]:
        """The prompt of a dialogue, leaving `room_after` tokens of the context free."""
        room = self.block_size - room_after - len(self._before) - len(self._between)
        dialogue_tokens = self.tokenizer.encode_start(dialogue, max(room, 0))
        return [*self._before, *dialogue_tokens, *self._between]

    def example(self, dialogue: str, summary: str) -> Example | None:
        """Prompt, summary and end token; None where the summary is too long to learn from."""
        longest = self.longest_summary
        targets = [*self.tokenizer.encode_start(summary, longest + 1), self.tokenizer.end]
        if len(targets) - 1 > longest:
            return None
        return Example([*self.prompt(dialogue, len(targets)), *targets], len(targets))

    @property
    def longest_summary(self) -> int:
        """Most tokens of a summary, its end token not counted."""
        return int(self.block_size * LONGEST_SUMMARY_SHARE)
