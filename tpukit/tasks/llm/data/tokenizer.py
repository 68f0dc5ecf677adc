"""Tokenizers as files of Hugging Face: special tokens, the chat template, plain text."""

import base64
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
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json",
         "generation_config.json", "special_tokens_map.json")  # fmt: skip
NO_TEXT = "\U0010ffff"
"""No character: no text has it."""
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

    def encode_spans(self, texts: Sequence[str]) -> tuple[list[int], Array, Array]:
        """As `encode_parts`; and in which of the texts each token begins and ends."""
        if any(self._special.search(text) for text in texts[1::2]):
            return self._encode_each(texts)
        whole = self._encode("".join(texts), plain=False)
        ends = np.cumsum([len(text) for text in texts])
        offsets = np.array(whole.offsets, np.int64).reshape(-1, 2)
        first = np.searchsorted(ends, offsets[:, 0], side="right").clip(max=len(texts) - 1)
        last = np.searchsorted(ends, offsets[:, 1])
        # Normal forms of data may be special tokens.
        if np.isin(whole.ids, self._special_ids)[(first % 2 == 1) & (last % 2 == 1)].any():
            return self._encode_each(texts)
        return list(whole.ids), first, last

    def _encode_each(self, texts: Sequence[str]) -> tuple[list[int], Array, Array]:
        parts = [self._encode(text, plain=n % 2 == 1).ids for n, text in enumerate(texts)]
        each = np.repeat(np.arange(len(texts)), [len(part) for part in parts])
        return [token for part in parts for token in part], each, each

    @cached_property
    def _specials(self) -> dict[str, bool]:
        """The texts of special tokens, and whether each is of unknown text."""
        made = json.loads(self.files["tokenizer.json"])
        model = made["model"]
        unknown, number = model.get("unk_token"), model.get("unk_id")
        unknown = unknown if number is None else model["vocab"][number][0]
        texts = [t["content"] for t in made.get("added_tokens") or [] if t.get("special")]
        return {text: text == unknown for text in texts}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """The texts of special tokens."""
        return re.compile("|".join(map(re.escape, self._specials)) or "(?!)")

    @cached_property
    def _special_ids(self) -> Array:
        """The special tokens, but for that of unknown text."""
        texts = (text for text, is_unknown in self._specials.items() if not is_unknown)
        return np.array([self._whole.token_to_id(text) for text in texts], np.int64)

    def _encode(self, text: str, *, plain: bool) -> Any:
        self._whole.encode_special_tokens = plain
        made = self._whole.encode(text, add_special_tokens=False)
        has_special = plain and np.isin(made.ids, self._special_ids).any()
        if has_special or (plain and self._special.search(text)):
            return self._plain.encode(text, add_special_tokens=False)
        return made

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer whose special tokens have texts that are in no data: models with whole
        words (Unigram, WordLevel, WordPiece) would find them in their vocabulary."""
        from tokenizers import Tokenizer as Whole

        made = json.loads(self.files["tokenizer.json"])
        hidden = {text: f"{NO_TEXT}{text}{NO_TEXT}" for text in self._specials}
        for token in made["added_tokens"]:
            token["content"] = hidden.get(token["content"], token["content"])
        model = made["model"]
        words = model["vocab"]
        model["vocab"] = (
            {hidden.get(word, word): number for word, number in words.items()}
            if isinstance(words, dict)
            else [[hidden.get(word, word), score] for word, score in words]
        )
        if "unk_token" in model:
            model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            pairs = (one.split(" ", 1) if isinstance(one, str) else one for one in model["merges"])
            model["merges"] = [pair for pair in pairs if not hidden.keys() & {*pair, "".join(pair)}]
        whole = Whole.from_str(json.dumps(made))
        whole.no_padding()
        whole.no_truncation()
        whole.encode_special_tokens = True
        return whole

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


# -- of no model ---------------------------------------------------------------------------------
def of_no_model(text: str, source: str) -> Tokenizer:
    """Of the text of a tokenizer.json."""
    return Tokenizer({"tokenizer.json": text}, source, of_no_model=True)


def tokenizer_of_ranks(content: bytes, source: str) -> Tokenizer:
    """Of a `.tiktoken` file with GPT-2's rules: lines of a base64 token and its rank. An end token
    that is not there comes after the last rank."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = np.uint32(int(rank)).item()
        except (ValueError, OverflowError) as error:
            raise DataError(
                f"{source}, line {number}: expected a base64 token and its rank.",
                "Give a .tiktoken file or a tokenizer.json.",
            ) from error
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise DataError(
            f"{source}: {missing} of the 256 single bytes have no token.",
            "tpukit needs a byte-level BPE such as GPT-2's: it must take any text.",
        )
    ranks.setdefault(END_OF_TEXT.encode(), max(ranks.values()) + 1)
    converter = TikTokenConverter(pattern=GPT2_PATTERN, extra_special_tokens=[END_OF_TEXT])
    converter.load_tiktoken_bpe = lambda _: ranks
    return of_no_model(converter.converted().to_str(), source)


def tokenizer_from_bytes(content: bytes, source: str) -> Tokenizer:
    """What `to_bytes` made, or a run of version 0.1."""
    if content.startswith(b"{"):
        return Tokenizer(**json.loads(content))
    return tokenizer_of_ranks(content, source)
