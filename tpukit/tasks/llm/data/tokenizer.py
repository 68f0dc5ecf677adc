"""Tokenizers as files of Hugging Face: special tokens, the chat template, plain text."""

import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.hub import OTHER_FILES

Array = np.ndarray[Any, Any]
END_OF_TEXT = "<|endoftext|>"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json",
         "generation_config.json", "special_tokens_map.json")  # fmt: skip
JOINER = "\u2060"
"""An invisible character without a width: a special token's text with it is no special token."""
DATE = date(2024, 7, 26)
"""Today for templates that ask, the default of Llama 3's: the same tokens each day."""
PLACE = "\u2009\u2042{}\u2042\u2009"
"""Text that stands for data while the template is rendered, between thin spaces."""
ASKED = (("user", PLACE.format(0)),)
ANSWERED = (*ASKED, ("assistant", PLACE.format(1)))
WRITTEN = re.compile("(\u2009?)\u2042(\\d+)\u2042(\u2009?)")
"""A place as the template wrote it: blank or nothing, number, blank or nothing."""


class ChatPieces(NamedTuple):
    """What a chat template writes around the places of some messages."""

    texts: tuple[str, ...]
    """Before, between and after the places."""
    order: tuple[int, ...]
    """The places as they are written in turn; some templates move or drop a system's."""
    trimmed: tuple[tuple[bool, bool], ...]
    """Whether the blanks go at the beginning and at the end of each of these."""


@dataclass(frozen=True)
class Tokenizer:
    """The files of a tokenizer as they are, and what ends a completion."""

    files: dict[str, str]
    source: str
    chat: bool = False
    """A completion ends where the chat template ends the assistant's message."""
    of_no_model: bool = False
    """It is GPT-2's or one like it, whatever the model: `END_OF_TEXT` is its one special token."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """A tokenizer.json with what lies beside it, or a directory of any tokenizer that
        transformers reads. Raises `DataError` where there is none, or not all of its parts."""
        folder = path if path.is_dir() else path.parent
        try:
            files = _texts(folder)
            if path != folder:
                files["tokenizer.json"] = path.read_text(encoding="utf-8")
            elif "tokenizer.json" not in files:
                files |= _converted(folder)
            made = cls(files, str(folder))
            _ = made._whole, made._settings
        except Exception as error:  # the tokenizers library raises plain ones
            cause = str(error).partition("\n")[0].rstrip(".")
            raise DataError(
                f"Cannot read the tokenizer of {path}: {cause}.",
                "Give a .tiktoken or tokenizer.json file, or the directory of a model.",
            ) from error
        return made

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """What `to_bytes` made."""
        return cls(**json.loads(content))

    def to_bytes(self) -> bytes:
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(kept, sort_keys=True).encode()

    def for_chat(self) -> Self:
        """The same, ending completions as the chat template does."""
        return replace(self, chat=True)

    @cached_property
    def _whole(self) -> Any:
        from tokenizers import Tokenizer as Whole

        whole = Whole.from_str(self.files["tokenizer.json"])
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
        """Tokens of texts and prompts: others may lie beyond what a model has (Gemma's images)."""
        around = "".join(self.chat_pieces(ANSWERED).texts) if self.chat else ""
        plain = [token for text, token in self._whole.get_vocab(with_added_tokens=True).items()
                 if not self._special.fullmatch(text)]  # fmt: skip
        return int(max(*plain, *self.prefix, *self.encode_parts([around]), self.end)) + 1

    @cached_property
    def prefix(self) -> list[int]:
        """Tokens that every text begins with."""
        whole = self._whole.encode("a")
        return [] if self.chat else list(whole.ids[: whole.special_tokens_mask.index(0)])

    @cached_property
    def end(self) -> int:
        """The token that ends a completion. Raises `DataError` where the files name none."""
        if self.chat:
            after = self.chat_pieces(ANSWERED).texts[-1]
            tokens = self.encode_parts([after.strip()])
            # Of an end in plain text, the first token may be in any answer.
            if tokens and tokens[0] in self._whole.get_added_tokens_decoder():
                return tokens[0]
        named = self._settings.get("eos_token") or self._settings.get("eos_token_id")
        named = named[0] if isinstance(named, list) else named
        text = named["content"] if isinstance(named, dict) else named
        found = self._whole.token_to_id(text or END_OF_TEXT) if not isinstance(text, int) else text
        if found is None:
            raise DataError(
                f"{self.source} names no end token.",
                "Add eos_token to tokenizer_config.json.",
            )
        return int(found)

    @property
    def end_text(self) -> str:
        return str(self._whole.id_to_token(self.end))

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer: `end`, and those that the files list for generation."""
        texts = (self.files.get(name, "{}") for name in ("generation_config.json", "config.json"))
        named = [json.loads(text).get("eos_token_id") for text in texts]
        known: Any = next((ids for ids in named if ids is not None), [])
        return frozenset([self.end, *(known if isinstance(known, list) else [known])])

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; special tokens are never among them, whatever the text says."""
        return list(self._encode(text, plain=True).ids)

    def encode_parts(self, texts: Sequence[str]) -> list[int]:
        """The tokens of the texts together, which a template, whose special tokens are meant, and
        its data have written in turn."""
        return self.encode_spans(texts)[0]

    def encode_spans(self, texts: Sequence[str]) -> tuple[list[int], Array]:
        """As `encode_parts`; and where in the joined text each token begins and ends, (tokens, 2).

        Where data hold the text of a special token, each of the texts is encoded alone.
        """
        data = [*texts[1::2], *map(self._normal, texts[1::2])]
        if not any(map(self._special.search, data)):
            whole = self._encode("".join(texts), plain=False)
            return list(whole.ids), np.array(whole.offsets, np.int64).reshape(-1, 2)
        tokens, spans, start = [], [], 0
        for n, text in enumerate(texts):
            part = self._encode(text, plain=n % 2 == 1)
            tokens += part.ids
            offsets = np.array(part.offsets, np.int64).reshape(-1, 2)
            spans.append(start + offsets.clip(max=len(text)))  # a joiner is no text
            start += len(text)
        return tokens, np.concatenate(spans)

    @cached_property
    def _specials(self) -> dict[int, str]:
        """Special tokens and their texts."""
        added = self._whole.get_added_tokens_decoder().items()
        return {number: token.content for number, token in added if token.special}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """The texts of special tokens."""
        return re.compile("|".join(map(re.escape, self._specials.values())) or "(?!)")

    def _normal(self, text: str) -> str:
        """The form that is encoded: of full-width letters it may be a special token."""
        form = self._whole.normalizer
        return text if form is None else str(form.normalize_str(text))

    def _encode(self, text: str, *, plain: bool) -> Any:
        self._whole.encode_special_tokens = plain
        made = self._whole.encode(text, add_special_tokens=False)
        if plain and not self._specials.keys().isdisjoint(made.ids):
            # Models of whole words have special tokens in their vocabulary.
            text = self._special.sub(lambda found: JOINER.join(found[0]), self._normal(text))
            made = self._whole.encode(text, add_special_tokens=False)
        return made

    def decode(self, tokens: Iterable[int]) -> str:
        """Text up to the first end token, without special tokens."""
        kept = takewhile(lambda token: token not in self.ends, map(int, tokens))
        text: str = self._whole.decode([*kept])
        return text

    def with_places(self, text: str, first: int) -> tuple[str, list[str]]:
        """A message as the template sees it: what the template may look for (`</think>`), and
        places, numbered from `first`, for the rest, which comes second."""
        parts = self._sought.split(text)
        rest, numbers = [part for part in parts[::2] if part], count(first)
        parts[::2] = [part and PLACE.format(next(numbers)) for part in parts[::2]]
        return "".join(parts), rest

    def chat_pieces(self, messages: Sequence[tuple[str, str]], *, asks: bool = False) -> ChatPieces:
        """What the chat template writes around the places in messages (role, text).

        asks: whether the assistant's next message follows.
        """
        from jinja2 import TemplateError

        tokens = {n: v["content"] if isinstance(v, dict) else v
                  for n, v in self._settings.items() if n.endswith("_token")}  # fmt: skip
        try:
            text = self._template.render(
                messages=[{"role": role, "content": text} for role, text in messages],
                add_generation_prompt=asks, tools=None, documents=None,
                strftime_now=DATE.strftime, **tokens,
            )  # fmt: skip
        except TemplateError as error:
            raise DataError(
                f"{self.source}: its chat template refuses"
                f" {', '.join(role for role, _ in messages)}: {error}.",
                "Order the messages as the template wants them.",
            ) from error
        pieces = WRITTEN.split(text)
        blanks = zip(pieces[1::4], pieces[3::4], strict=True)
        return ChatPieces(
            tuple(pieces[::4]), tuple(map(int, pieces[2::4])),
            tuple((not before, not after) for before, after in blanks),
        )  # fmt: skip

    @cached_property
    def _template(self) -> Any:
        """The chat template as transformers renders it."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return _compile_jinja_template(self._template_text)

    @cached_property
    def _sought(self) -> re.Pattern[str]:
        """What the template may look for in a message, with the blanks around it, which it may
        strip; special tokens of texts mean nothing."""
        from jinja2 import nodes

        found = self._template.environment.parse(self._template_text).find_all(nodes.Const)
        texts = {one.value.strip() for one in found if isinstance(one.value, str)}
        marks = [re.escape(text) for text in sorted(texts, key=len, reverse=True)
                 if len(text) > 2 and not text.isalpha()
                 and not self._special.search(text)]  # fmt: skip
        return re.compile(rf"(^\s+|(?:(?<!\s)\s+)?(?:{'|'.join(marks) or '(?!)'})\s*)")

    @cached_property
    def _template_text(self) -> str:
        template = self.files.get("chat_template.jinja") or self._settings.get("chat_template")
        if isinstance(template, list):
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        if not template:
            raise ConfigError(
                f"chat: {self.source} has no chat template.",
                "Leave `chat` out, or give weights that were trained to chat.",
            )
        return str(template)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", *OTHER_FILES))


def _texts(folder: Path) -> dict[str, str]:
    there = [name for name in FILES if (folder / name).is_file()]
    return {name: (folder / name).read_text(encoding="utf-8") for name in there}


def _converted(folder: Path) -> dict[str, str]:
    """The files of a tokenizer that has no tokenizer.json, as transformers converts it."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as made:
        AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(made)
        return _texts(Path(made))
