"""Small made-up competitions, as they are attached to a notebook: the same bytes each time."""

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tpukit.tasks.images.generate import CLASSES, draw_shape

SHARES = {"circle": 0.5, "cross": 0.3, "star": 0.2}
"""Classes of the image competition, and how many of the images are of each."""
SIDES = (24, 64)


@dataclass(frozen=True)
class ImageCompetition:
    """What lies in a competition's folder."""

    folder: Path
    labels: dict[str, str]
    """Id -> class of the training images."""
    answers: dict[str, str]
    """Id -> class of the test images, in the order of the sample submission."""
    damaged: tuple[str, ...]
    """Ids that cannot be read: of training a text and a cut image, of the test a cut image."""

    @property
    def sample(self) -> Path:
        return self.folder / "sample_submission.csv"


def image_competition(folder: Path, images: int = 500) -> ImageCompetition:
    """train.csv (image_id, label, fold, patient), train_images/, test_images/ and a sample with a
    column for each class.

    Images of several sizes, a third of them grey, JPEG and PNG; three files are damaged.
    """
    rng = random.Random(0)
    ids = [f"{rng.getrandbits(40):010x}" for _ in range(images)]
    test = ids[: images // 5]
    names = {name: rng.choices([*SHARES], [*SHARES.values()])[0] for name in ids}
    files = {}
    for index, name in enumerate(ids):
        part = "test_images" if index < len(test) else "train_images"
        files[name] = _write_image(folder / part / name, names[name], index, rng)
    damaged = (ids[-3], ids[-7], test[3])
    files[damaged[0]].write_text("<html>not found</html>")
    for name in damaged[1:]:
        files[name].write_bytes(files[name].read_bytes()[:-300])
    labels = {name: names[name] for name in ids[len(test) :]}
    rows = [[n, c, i % 5, f"p{i // 4}"] for i, (n, c) in enumerate(labels.items())]
    _write_csv(folder / "train.csv", ["image_id", "label", "fold", "patient"], rows)
    columns = sorted(SHARES, reverse=True)
    rows = [[name, *[0.3] * len(columns)] for name in sorted(test)]
    _write_csv(folder / "sample_submission.csv", ["image_id", *columns], rows)
    return ImageCompetition(folder, labels, {n: names[n] for n in sorted(test)}, damaged)


def _write_image(path: Path, name: str, index: int, rng: random.Random) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = (rng.randint(*SIDES) for _ in range(2))
    number = index * len(CLASSES) + CLASSES.index(name)
    image = draw_shape(0, "competition", number, 48)[0].resize((width, height), Image.BILINEAR)
    if index % 3 == 0:
        image = image.convert("L")
    file = path.with_suffix(".png" if index % 2 else ".jpg")
    image.save(file)
    return file


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
