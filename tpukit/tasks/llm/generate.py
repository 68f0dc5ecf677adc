"""Generated dialogues with summaries that follow from them: a set to try with, of any size.

Row `i` of a part is a function of (seed, part, i) alone. The test part's people, towns, topics and
ways of putting things do not occur in the training part; how a summary is worded does, since that
is what there is to learn.
"""

from __future__ import annotations

import hashlib
import random
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tpukit.io.files import writing_errors
from tpukit.io.ranges import LARGEST_BATCH, SEED, Range, require_in_range, setting
from tpukit.io.tables import write_csv

if TYPE_CHECKING:
    from tpukit.io.progress import Progress

Part = Literal["train", "test"]

TEST_SHARE = 10
"""One in this many invented names belongs to the test part."""
OPENER_SHARE = 0.4
ASIDE_SHARE = 0.5
OTHER = "other_"
"""Slots with this prefix are beside the point: talked about, and not in the summary."""


@dataclass(frozen=True)
class Dialogue:
    """One generated sample."""

    dialogue: str
    """Lines `Name: text`, separated by CR LF as in SAMSum."""
    summary: str
    names: tuple[str, ...] = field(default=())
    """The invented names (people, towns) that the summary mentions."""


@cache
def dialogue_parts() -> dict[str, Any]:
    """The words, phrases and scenarios of `dialogue_parts.toml`."""
    source = files("tpukit.tasks.llm.data") / "dialogue_parts.toml"
    return tomllib.loads(source.read_text(encoding="utf-8"))


def make_dialogue(seed: int, part: Part, index: int) -> Dialogue:
    """Sample `index` of a part, the same on every machine."""
    rng = random.Random(f"{seed}/{part}/{index}")
    scenario = rng.choice(dialogue_parts()["scenario"])
    end, phrases = rng.choice(scenario["ending"])
    slots = _fill_slots(rng, part)
    say = _Speaker(rng, part, slots)
    lines = _chat(say, {"a": scenario["opening"], "b": phrases})
    summary = f"{scenario['summary']} {end}"
    names = tuple(slots[s] for s in ("a", "b", "c", "d", "town") if f"{{{s}}}" in summary)
    return Dialogue("\r\n".join(lines), _with_articles(summary.format(**slots)), names)


@dataclass(frozen=True)
class _Speaker:
    """Turns phrases of the parts into lines of a chat."""

    rng: random.Random
    part: Part
    slots: dict[str, str]

    def turn(self, who: str, phrases: list[str], *, opener: bool = False) -> str:
        """`Name: text`, one phrase of this part with its alternatives chosen."""
        said = self._phrase(phrases)
        if opener and self.rng.random() < OPENER_SHARE:
            before = self._phrase(dialogue_parts()["phrases"]["opener"])
            said = before + (said if re.match(r"I\b|\{", said) else said[0].lower() + said[1:])
        return f"{self.slots[who]}: {_with_articles(said.format(**self.slots))}"

    def _phrase(self, phrases: list[str]) -> str:
        phrase = phrases[-1] if self.part == "test" else self.rng.choice(phrases[:-1])
        return re.sub(r"\[([^]]*)\]", lambda m: self.rng.choice(m[1].split("|")), phrase)

    def chatter(self, who: str, kind: str) -> str:
        return self.turn(who, dialogue_parts()["phrases"][kind])


def _chat(say: _Speaker, said: dict[str, list[str]]) -> list[str]:
    lines = []
    if say.rng.random() < 0.7:
        lines.append(say.chatter("a", "greeting"))
        if say.rng.random() < 0.6:
            lines.append(say.chatter("b", "answer"))
    for who, phrases in said.items():
        if say.rng.random() < ASIDE_SHARE:
            lines.append(say.chatter(say.rng.choice("ab"), "aside"))
        lines.append(say.turn(who, phrases, opener=True))
    if say.rng.random() < 0.6:
        lines.append(say.chatter("a", "closing"))
    return lines


def _fill_slots(rng: random.Random, part: Part) -> dict[str, str]:
    words = dialogue_parts()["words"]
    slots = {
        f"{prefix}{name}": " ".join(rng.choice(words) for words in lists.get("all") or lists[part])
        for prefix in ("", OTHER)
        for name, lists in words.items()
    }
    slots["day2"] = rng.choice([day for day in words["day"]["all"][0] if day != slots["day"]])
    slots["time"] = f"{rng.randint(7, 11)} {rng.choice(['am', 'pm'])}"
    slots["price"] = str(rng.choice(range(5, 95, 5)))
    people: list[str] = []
    while len(people) < 4:
        name = _put_together(rng, part, dialogue_parts()["syllables"]["names"])
        if name not in people:
            people.append(name)
    town = _put_together(rng, part, dialogue_parts()["syllables"]["towns"])
    return {**slots, **dict(zip("abcd", people, strict=True)), "town": town}


def _put_together(rng: random.Random, part: Part, parts: list[list[str]]) -> str:
    """A name of syllables; it belongs to one part only."""
    while True:
        word = "".join(rng.choice(syllables) for syllables in parts)
        in_test = hashlib.sha256(word.encode()).digest()[0] % TEST_SHARE == 0
        if in_test == (part == "test"):
            return word


def _with_articles(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


@dataclass(frozen=True)
class GeneratedDialogues:
    """Generate dialogues and their summaries; the test part's names and topics are its own."""

    n: int = setting(20_000, Range(2, LARGEST_BATCH))
    """Rows; a tenth (at most 5000) for testing."""
    seed: int = setting(0, SEED)
    """Seed; a row depends on it and its index."""
    marks: ClassVar[tuple[str, ...]] = ("test_references.csv",)

    def __post_init__(self) -> None:
        require_in_range(self, "At least one dialogue to train, one to test.")

    def write(self, out: Path, progress: Progress, log: Callable[[str], None]) -> dict[str, Any]:
        """Writes `train.csv`, `test.csv` and `test_references.csv`; their JSON fields."""
        written = write_dialogues(out, self.n, self.seed, progress.advance)
        log(f"{written['train_rows']:,} rows in {written['train']}")
        log(f"{written['test_rows']:,} rows in {written['test']}, their summaries beside it")
        command = f"tpukit summarize-train --preset quick --data-path {quote(str(out))}"
        log(f"Train on them: {command}")
        return written


def write_dialogues(
    out: Path, n: int, seed: int, made: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Writes `train.csv`, `test.csv` and `test_references.csv` into `out`, in constant memory; the
    JSON fields of it.

    n: rows in all, at least 2; a tenth of them, at most 5000, are the test part. `made` is called
    after each dialogue. Raises `DataError` where `out` cannot be written.
    """
    test_rows = min(max(n // 10, 1), 5000)
    train_rows = n - test_rows
    paths = [out / name for name in ("train.csv", "test.csv", "test_references.csv")]
    names = ("id", "dialogue", "summary")
    with writing_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        write_csv(paths[0], chain([names], _rows(seed, "train", train_rows, made)))
        tests = [names, *_rows(seed, "test", test_rows, made)]
        write_csv(paths[1], ((row[0], row[1]) for row in tests))
        write_csv(paths[2], ((row[0], row[2]) for row in tests))
    files = dict(zip(("train", "test", "references"), map(str, paths), strict=True))
    return files | {"train_rows": train_rows, "test_rows": test_rows}


def _rows(
    seed: int, part: Part, count: int, made: Callable[[], object]
) -> Iterator[tuple[str, str, str]]:
    for index in range(count):
        sample = make_dialogue(seed, part, index)
        made()
        yield f"{part}-{seed}-{index:07d}", sample.dialogue, sample.summary
