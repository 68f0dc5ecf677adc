"""Generated reviews: a set to try with, in the layout of a competition.

Row `i` of a part is a function of (seed, part, i) alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar

from tpukit.io.ranges import LARGEST_BATCH, SEED, Range, require_in_range, setting
from tpukit.io.tables import write_csv

if TYPE_CHECKING:
    from tpukit.io.progress import Progress

WORDS = {
    "bad": ("awful", "broken", "late", "rude", "noisy"),
    "fair": ("average", "plain", "ordinary", "passable", "usable"),
    "good": ("excellent", "friendly", "quick", "reliable", "lovely"),
}
"""Label -> what is said."""
THINGS = ("hotel", "phone", "meal", "train", "book", "camera", "room", "service", "battery")
FILLERS = (
    "I bought it in spring.", "My sister came along.", "It rained the whole day.",
    "We had waited for weeks.", "The price was as agreed.", "I would think about it again.",
)  # fmt: skip
PARTS = {"train": 0.9, "test": 0.1}


def write_review(seed: int, part: str, index: int) -> tuple[str, str]:
    """Review `index` of a part, the same on every machine, and its label."""
    rng = random.Random(f"{seed}/{part}/{index}")
    labels = [*WORDS]
    label = labels[index % len(labels)]
    opinion = [
        f"The {rng.choice(THINGS)} was {rng.choice(WORDS[label])}."
        for _ in range(rng.randint(1, 3))
    ]
    others = [rng.choice(FILLERS) for _ in range(int(rng.expovariate(0.25)))]
    sentences = opinion + others
    rng.shuffle(sentences)
    return " ".join(sentences), label


@dataclass(frozen=True)
class Reviews:
    """Generate reviews that are good, fair or bad, to classify."""

    marks: ClassVar[tuple[str, ...]] = ("test_answers.csv",)
    n: int = setting(2000, Range(30, LARGEST_BATCH))
    """Number of reviews: 90 % training, 10 % test."""
    seed: int = setting(0, SEED)
    """Seed of the set."""

    def __post_init__(self) -> None:
        require_in_range(self, "A set has at least 30 reviews.")

    def write(self, out: Path, progress: Progress, log: Callable[[str], None]) -> dict[str, Any]:
        """train.csv, test.csv, test_answers.csv and sample_submission.csv."""
        counts = {part: round(share * self.n) for part, share in PARTS.items()}
        rows: dict[str, list[tuple[str, str, str]]] = {part: [] for part in PARTS}
        for part, count in counts.items():
            for index in range(count):
                rows[part].append((f"{part}{index:06}", *write_review(self.seed, part, index)))
                progress.advance()
        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / "train.csv", [("id", "text", "label"), *rows["train"]])
        write_csv(out / "test.csv", [("id", "text"), *(row[:2] for row in rows["test"])])
        answers = [(name, label) for name, _, label in rows["test"]]
        write_csv(out / "test_answers.csv", [("id", "label"), *answers])
        first = next(iter(WORDS))
        sample = [(name, first) for name, _ in answers]
        write_csv(out / "sample_submission.csv", [("id", "label"), *sample])
        log(f"{counts['train']:,} training and {counts['test']:,} test reviews in {out}")
        way = "tpukit train --preset quick --data-path"
        log(f"Train on them: {way} {quote(str(out))}")
        return counts
