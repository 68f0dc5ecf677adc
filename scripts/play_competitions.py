"""Small made-up competitions, as they are attached to a notebook, and their commands.

`python scripts/play_competitions.py FOLDER` writes them; `--play` also trains and predicts each by
its two commands.
"""

import argparse
import csv
import random
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tpukit.tasks.images.generate import CLASSES, draw_shape

SMALL = (
    "--set model=test_convnext --set image_size=32 --global-batch-size 16 --max-steps 8 --hw cpu"
)
WORDS = ["plot", "voice", "scene", "tone", "pace", "theme", "detail", "order", "proof", "claim"]


@dataclass(frozen=True)
class Competition:
    """A competition's folder and the options of its training command."""

    name: str
    train: str

    def commands(self, folder: Path, runs: Path) -> list[list[str]]:
        """The two commands to a submission."""
        data, run = folder / self.name, runs / self.name
        sample = data / "sample_submission.csv"
        return [
            ["train", *shlex.split(self.train), "--data-path", str(data),
             "--results-dir", str(run)],
            ["predict", "--run", str(run), "--data-path", str(data), "--sample-submission",
             str(sample), "--out", str(run / "submission.csv"), "--hw", "cpu"],
        ]  # fmt: skip


COMPETITIONS = (
    Competition("species", f"--task images --folds 3 --metric macro_f1 {SMALL}"),
    Competition(
        "findings", f"--task images --folds 2 --set group_column=PatientID --metric auc {SMALL}"
    ),
    Competition("appeal", f"--task images --folds 2 --set features=all --metric rmse {SMALL}"),
    Competition(
        "essays",
        "--task text --folds 2 --metric qwk --set model=scratch --max-steps 8 --hw cpu"
        " --global-batch-size 8",
    ),
    Competition(
        "replies",
        "--task llm --model 1x1x16 --tokenizer train --hw cpu --max-steps 4 --block-size 64"
        " --global-batch-size 4 --set vocabulary_size=300 --set score_samples=0"
        " --set prompt_column=prompt --set completion_column=completion",
    ),
)


def write_competitions(folder: Path, rows: int = 48) -> None:
    """Writes the folders of all competitions, the same bytes each time."""
    write_species(folder / "species", rows)
    write_findings(folder / "findings", rows)
    write_appeal(folder / "appeal", rows)
    write_essays(folder / "essays", rows)
    write_replies(folder / "replies", rows)


def write_species(folder: Path, rows: int) -> None:
    """One class of a long tail."""
    shares, rng = {"circle": 0.6, "cross": 0.25, "star": 0.15}, random.Random("species")
    for part, count in (("train", rows), ("test", rows // 3)):
        kinds = [rng.choices([*shares], [*shares.values()])[0] for _ in range(count)]
        kinds[:3] = [*shares]
        ids = _images(folder, part, kinds)
        if part == "train":
            _table(folder / "train.csv", ["image_id", "species"], zip(ids, kinds, strict=True))
        else:
            sample = [[name, "circle"] for name in reversed(ids)]
            _table(folder / "sample_submission.csv", ["image_id", "species"], sample)


def write_findings(folder: Path, rows: int) -> None:
    """Several labels an image, beside the patient."""
    rng, labels = random.Random("findings"), ["ETT", "NGT", "CVC"]
    for part, count in (("train", rows), ("test", rows // 3)):
        truth = [[rng.randint(0, 1) for _ in labels] for _ in range(count)]
        ids = _images(folder, part, [CLASSES[sum(row) * 2] for row in truth])
        if part == "train":
            table = [[name, *row, f"p{i // 2}"] for i, (name, row) in
                     enumerate(zip(ids, truth, strict=True))]  # fmt: skip
            _table(folder / "train.csv", ["StudyInstanceUID", *labels, "PatientID"], table)
        else:
            sample = [[name, *[0] * len(labels)] for name in ids]
            _table(folder / "sample_submission.csv", ["StudyInstanceUID", *labels], sample)


def write_appeal(folder: Path, rows: int) -> None:
    """A number of each image, last in a table of flags and a kind."""
    rng = random.Random("appeal")
    for part, count in (("train", rows), ("test", rows // 3)):
        table = [
            [rng.randint(0, 1), rng.randint(0, 1), rng.choice(["cat", "dog"])] for _ in range(count)
        ]
        scores = [1 + int(50 * a + 25 * b + 20 * rng.random()) for a, b, _ in table]
        ids = _images(folder, part, [CLASSES[a * 3 + b] for a, b, _ in table])
        columns = ["Id", "Subject Focus", "Eyes", "Kind"]
        if part == "train":
            lines = [[n, *r, s] for n, r, s in zip(ids, table, scores, strict=True)]
            _table(folder / "train.csv", [*columns, "Pawpularity"], lines)
        else:
            lines = [[n, *r] for n, r in zip(ids, table, strict=True)]
            _table(folder / "test.csv", columns, lines)
            sample = [[name, 40.5 + i] for i, name in enumerate(ids)]
            _table(folder / "sample_submission.csv", ["Id", "Pawpularity"], sample)


def write_essays(folder: Path, rows: int) -> None:
    """Texts with whole scores from 1 to 6."""
    rng = random.Random("essays")
    for part, count in (("train", rows), ("test", rows // 3)):
        scores = [1 + i % 6 for i in range(count)]
        texts = [
            " ".join(rng.choice(WORDS[: 2 * score]) for _ in range(8 * score)) for score in scores
        ]
        ids = [f"{part}{i:04}" for i in range(count)]
        if part == "train":
            lines = zip(ids, texts, scores, strict=True)
            _table(folder / "train.csv", ["essay_id", "full_text", "score"], lines)
        else:
            _table(folder / "test.csv", ["essay_id", "full_text"], zip(ids, texts, strict=True))
            _table(folder / "sample_submission.csv", ["essay_id", "score"], [[n, 3] for n in ids])


def write_replies(folder: Path, rows: int) -> None:
    """Prompts and completions."""
    rng = random.Random("replies")
    for part, count in (("train", rows), ("test", rows // 6)):
        prompts = [" ".join(rng.choices(WORDS, k=6)) for _ in range(count)]
        ids = [f"{part}{i}" for i in range(count)]
        if part == "train":
            lines = [[n, p, p.split()[0]] for n, p in zip(ids, prompts, strict=True)]
            _table(folder / "train.csv", ["id", "prompt", "completion"], lines)
        else:
            _table(folder / "test.csv", ["id", "prompt"], zip(ids, prompts, strict=True))
            sample = [[name, ""] for name in ids]
            _table(folder / "sample_submission.csv", ["id", "completion"], sample)


def _images(folder: Path, part: str, kinds: Sequence[str]) -> list[str]:
    """Images of shapes; their ids."""
    place = folder / f"{part}_images"
    place.mkdir(parents=True, exist_ok=True)
    ids = []
    for index, kind in enumerate(kinds):
        name = f"{part}{index:04}"
        number = index * len(CLASSES) + CLASSES.index(kind)
        image: Image.Image = draw_shape(0, folder.name + part, number, 40)[0]
        image.save(place / f"{name}.png")
        ids.append(name)
    return ids


def _table(path: Path, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--play", nargs="*", metavar="NAME", help="train and predict (all, or these)"
    )
    given = parser.parse_args()
    write_competitions(given.folder)
    for competition in COMPETITIONS if given.play is not None else ():
        if not given.play or competition.name in given.play:
            for words in competition.commands(given.folder, given.folder / "runs"):
                print("tpukit", shlex.join(words), flush=True)
                subprocess.run([sys.executable, "-m", "tpukit", *words], check=True)


if __name__ == "__main__":
    main()
