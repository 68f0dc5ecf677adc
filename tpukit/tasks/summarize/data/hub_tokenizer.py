"""The tokenizer of a Hugging Face directory: its special tokens and its chat template."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.summarize.data.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json",
         "generation_config.json", "special_tokens_map.json")  # fmt: skip
DATE = date(2024, 7, 26)
"""Today for templates that ask, the default of Llama 3's: the same tokens each day."""
PLACE = "\u2009\u2042{}\u2042\u2009"
"""Text that stands for a message while the template is rendered, between thin spaces."""
WRITTEN = re.compile("(\u2009?)\u2042(\\d+)\u2042(\u2009?)")
"""The place of a message as the template wrote it: blank or nothing, number, blank or nothing."""


class ChatPieces(NamedTuple):
    """What a chat template writes around the messages of some roles."""

    texts: tuple[str, ...]
    """Before, between and after the messages."""
    order: tuple[int, ...]
    """The messages as they are written in turn; some templates move or drop a system's."""
    trimmed: tuple[bool, ...]
    """Whether the blanks at the ends of each of these go."""


@dataclass(frozen=True)
class HubTokenizer:
    """The files of a tokenizer as they are, and what ends a completion."""

    files: dict[str, str]
    source: str
    chat: bool = False
    """A completion ends where the chat template ends the assistant's message."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises `DataError` where there is no tokenizer, or not all of its parts."""
        try:
            files = {
                name: (folder / name).read_text(encoding="utf-8")
                for name in FILES
                if (folder / name).is_file()
            }
            made = cls(files, str(folder))
            _ = made._whole, made._settings
        except Exception as error:  # the tokenizers library raises plain ones
            raise DataError(
                f"Cannot read the tokenizer of {folder}: {error}.",
                "Give a directory with tokenizer.json and tokenizer_config.json.",
            ) from error
        return made

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """What `to_bytes` made."""
        return cls(**json.loads(content))

    def to_bytes(self) -> bytes:
        kept = {"files": self.files, "source": self.source, "chat": self.chat}
        return json.dumps(kept, sort_keys=True).encode()

    @cached_property
    def fingerprint(self) -> str:
        """Changes with anything that changes the tokens."""
        return hashlib.sha256(json.dumps([self.files, self.chat], sort_keys=True).encode()
                              ).hexdigest()  # fmt: skip

    def for_chat(self) -> Self:
        """The same, ending completions as the chat template does."""
        return replace(self, chat=True)

    @cached_property
    def _whole(self) -> Any:
        from tokenizers import Tokenizer

        whole = Tokenizer.from_str(self.files["tokenizer.json"])
        whole.no_padding()
        whole.no_truncation()
        return whole

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The fields of the files, those of the tokenizer before the model's."""
        found: dict[str, Any] = {}
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            found |= json.loads(self.files.get(name, "{}"))
        return found

    @property
    def vocabulary_size(self) -> int:
        """Tokens, special ones included."""
        return int(max(self._whole.get_vocab(with_added_tokens=True).values())) + 1

    @property
    def text_size(self) -> int:
        """Tokens of texts: special ones may lie beyond what a model has (Gemma's of images)."""
        return int(self._whole.get_vocab_size(with_added_tokens=False))

    @cached_property
    def prefix(self) -> list[int]:
        """Tokens that every text begins with."""
        return [] if self.chat else list(self._whole.encode("").ids)

    @cached_property
    def end(self) -> int:
        """The token that ends a completion. Raises `DataError` where the files name none."""
        if self.chat:
            after = self.chat_pieces(("user", "assistant")).texts[-1]
            tokens = self.encode_parts([after.strip()])
            if tokens:
                return tokens[0]
        named = self._settings.get("eos_token") or self._settings.get("eos_token_id")
        named = named[0] if isinstance(named, list) else named
        text = named["content"] if isinstance(named, dict) else named
        found = self._whole.token_to_id(text) if isinstance(text, str) else text
        if found is None:
            raise DataError(
                f"{self.source} names no end token.",
                "Add eos_token to tokenizer_config.json.",
            )
        return int(found)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; special tokens are never among them, whatever the text says."""
        return list(self._encode(text, plain=True).ids)

    def encode_parts(self, texts: Sequence[str]) -> list[int]:
        """The tokens of the texts together, which a template, whose special tokens are meant, and
        its data have written in turn."""
        return self.encode_spans(texts)[0]

    def encode_spans(self, texts: Sequence[str]) -> tuple[list[int], Array, Array]:
        """As `encode_parts`; and in which of the texts each token begins and ends."""
        if any(self._special.search(text) for text in texts[1::2]):
            parts = [self._encode(text, plain=n % 2 == 1).ids for n, text in enumerate(texts)]
            each = np.repeat(np.arange(len(texts)), [len(part) for part in parts])
            return [token for part in parts for token in part], each, each
        whole = self._encode("".join(texts), plain=False)
        ends = np.cumsum([len(text) for text in texts])
        offsets = np.array(whole.offsets, np.int64).reshape(-1, 2)
        first = np.searchsorted(ends, offsets[:, 0], side="right").clip(max=len(texts) - 1)
        return list(whole.ids), first, np.searchsorted(ends, offsets[:, 1])

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """The texts of special tokens."""
        added = json.loads(self.files["tokenizer.json"]).get("added_tokens") or []
        texts = [re.escape(token["content"]) for token in added if token.get("special")]
        return re.compile("|".join(texts) or "(?!)")

    def _encode(self, text: str, *, plain: bool) -> Any:
        self._whole.encode_special_tokens = plain
        return self._whole.encode(text, add_special_tokens=False)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text up to the end token, without special tokens."""
        kept = takewhile(lambda token: token != self.end, map(int, tokens))
        text: str = self._whole.decode([*kept])
        return text

    def chat_pieces(self, roles: Sequence[str], *, asks: bool = False) -> ChatPieces:
        """What the chat template writes before, between and after the messages of these roles.

        asks: whether the assistant's next message follows.
        """
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        places = [PLACE.format(number) for number in range(len(roles))]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals |= {"raise_exception": refuse, "strftime_now": DATE.strftime}
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        tokens = {n: v["content"] if isinstance(v, dict) else v
                  for n, v in self._settings.items() if n.endswith("_token")}  # fmt: skip
        messages = [{"role": r, "content": p} for r, p in zip(roles, places, strict=True)]
        try:
            text = environment.from_string(self._template()).render(
                messages=messages, add_generation_prompt=asks, **tokens
            )
        except TemplateError as error:
            raise DataError(
                f"{self.source}: its chat template refuses {', '.join(roles)}: {error}.",
                "Order the messages as the template wants them.",
            ) from error
        pieces = WRITTEN.split(text)
        blanks = zip(pieces[1::4], pieces[3::4], strict=True)
        return ChatPieces(
            tuple(pieces[::4]), tuple(map(int, pieces[2::4])), tuple(not all(b) for b in blanks)
        )

    def _template(self) -> str:
        template = self.files.get("chat_template.jinja") or self._settings.get("chat_template")
        if isinstance(template, list):
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        if not template:
            raise ConfigError(
                f"chat: {self.source} has no chat template.",
                "Leave `chat` out, or give weights that were trained to chat.",
            )
        return str(template)


def tokenizer_from_bytes(content: bytes, source: str) -> Tokenizer | HubTokenizer:
    """What `to_bytes` of either kind of tokenizer made."""
    if content.startswith(b"{"):
        return HubTokenizer.from_bytes(content)
    return Tokenizer.from_bytes(content, source)
