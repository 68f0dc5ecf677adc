"""What an image classifier learns from, and how: any timm model on folders or tables of images."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpukit.errors import CheckpointError
from tpukit.hardware.backend import Batch, ModelOps, ParameterGroup
from tpukit.io.process import is_first_rank
from tpukit.tasks.images.data import augmentation, listing
from tpukit.tasks.images.data.depth import (
    SHALLOW_SUFFIXES,
    SIXTEEN_BITS,
    KeptRange,
    ValueRange,
    range_of,
)
from tpukit.tasks.images.data.files import NO_IMAGE, ImageFiles, check_headers
from tpukit.tasks.images.model import classifier
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.train.task import Datasets, MicroBatch, Sample, Task, stack_samples

CLASSES_FILE = "classes.json"
COUNTS_FILE = "class_counts.json"
RANGE_FILE = "value_range.json"
COLUMNS_FILE = "table_columns.json"
ELSEWHERE = (
    "data_path", "table", "folder", "id_column", "label_column", "sample_submission", "tta",
    "probabilities", "damaged", "damaged_row", "classes", "pretrained", "value_range",
)  # fmt: skip
"""Settings that do not decide the arithmetic of a run that goes on."""
ADDED = ("fold", "fold_column", "group_column", "class_weights")
"""Settings that are recorded where they are used."""


class ImageTraining(Task):
    """Learns the class of an image.

    A sample is a decoded image and its label; `draw` crops and augments it. A batch has `image`
    (rows, 3, side, side) uint8, `label` (rows,), and mixup's `share` (rows,) and `box` (rows, 4).
    """

    def __init__(
        self,
        *,
        class_names: Sequence[str] | None = None,
        class_counts: Sequence[int] | None = None,
        values: ValueRange | None = SIXTEEN_BITS,
        table_columns: Mapping[str, Sequence[str]] | None = None,
        **settings: Any,
    ) -> None:
        """Settings are the fields of `ImagesConfig`.

        class_names, class_counts: a run's classes and their training images; None: the data's.
        values: a run's scale of images of more than 8 bits; None: each has its own.
        table_columns: those that a run has `learned` from its table, and the `others`.
        """
        self.config = ImagesConfig(**settings)
        given = self.config.value_range
        self.values = values if given is None else ValueRange.parse(given)
        classifier.require_model(self.config.model)
        self.class_names = None if class_names is None else tuple(class_names)
        self.class_counts = None if class_counts is None else tuple(class_counts)
        self.table_columns = table_columns

    @cached_property
    def input(self) -> classifier.InputFormat:
        """The format of the model's images."""
        return classifier.input_format(self.config)

    @cached_property
    def transforms(self) -> dict[bool, augmentation.Transform]:
        """PIL image -> pixels, by whether it is augmented."""
        return augmentation.transforms(self.input, self.config)

    # -- data ------------------------------------------------------------------------------------
    def datasets(self) -> Datasets:
        """The images of the data path, and their classes."""
        _ = self.transforms  # a wrong setting of theirs ends here
        train, valid = listing.find_training_images(self.config, self.class_names)
        for remark in listing.remarks(self.config, train) if is_first_rank() else ():
            print(remark, file=sys.stderr, flush=True)
        self._find_range(train.files, valid.files)
        self.class_names, self.class_counts = train.classes, train.class_counts()
        self.table_columns = listing.table_columns(self.config, self.class_names)
        return Datasets(
            self.samples(train, augment=True),
            self.samples(valid) if len(valid) else None,
            artifacts={
                CLASSES_FILE: json.dumps(list(train.classes)).encode(),
                COUNTS_FILE: json.dumps(list(self.class_counts)).encode(),
                **({} if self.values is None else {RANGE_FILE: self.values.to_json()}),
                COLUMNS_FILE: json.dumps(self.table_columns).encode(),
            },
            identity={"data": f"{train.digest()}{valid.digest()}"},
        )

    def _find_range(self, *parts: Sequence[str]) -> None:
        """Finds damaged files, and the scale of those of more than 8 bits unless a run has one.

        The first rank looks at the files, before the others, which find what it found.
        """
        is_known = self.config.value_range is not None or self.class_names is not None
        kept = KeptRange([file for part in parts for file in part])
        if not is_first_rank() and (is_known or (found := kept.read())):
            self.values = self.values if is_known else found
            return
        kinds = check_headers(*parts, skip=self.config.damaged == "skip")
        if is_known:
            return
        unread = [f for f in kept.files if not (f in kinds or f.lower().endswith(SHALLOW_SUFFIXES))]
        self.values, line = range_of(kinds, unread)
        kept.write(self.values)
        if line is not None and is_first_rank():
            print(line, file=sys.stderr, flush=True)

    def samples(self, images: listing.LabelledImages, *, augment: bool = False) -> ImageFiles:
        """A data set of these images."""
        skip = self.config.damaged == "skip"
        return ImageFiles(
            images, self.input.side, augment=augment, skip_damaged=skip, values=self.values
        )

    def identity(self) -> dict[str, Any]:
        values = {n: value for n, value in asdict(self.config).items() if n not in ELSEWHERE}
        if self.values not in (None, SIXTEEN_BITS):
            values["value_range"] = str(self.values)
        # Older runs do not record them.
        return {n: v for n, v in values.items() if n not in ADDED or v != getattr(ImagesConfig, n)}

    def restore(self, artifacts: Mapping[str, bytes]) -> Self:
        if CLASSES_FILE not in artifacts:
            raise CheckpointError(
                f"The checkpoint holds no {CLASSES_FILE}.", "Is it a run of the images task?"
            )
        # Older runs kept no counts, no columns and no scale.
        names, counts, columns = (
            json.loads(artifacts.get(name, b"null"))
            for name in (CLASSES_FILE, COUNTS_FILE, COLUMNS_FILE)
        )
        kept = artifacts.get(RANGE_FILE)
        values = None if kept is None else ValueRange.from_json(kept)
        return type(self)(
            class_names=names,
            class_counts=counts,
            table_columns=columns,
            values=values,
            **asdict(self.config),
        )

    def draw(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """The pixels of a decoded image, with the draws of mixup and cutmix."""
        if sample["augment"]:
            with augmentation.global_generators(int(rng.integers(2**32))):
                pixels = self.transforms[True](sample["image"])
            mixed = augmentation.draw_mix(rng, self.config, self.input.side)
        else:
            # Without the generators, which another thread may be training with.
            pixels = self.transforms[False](sample["image"])
            mixed = augmentation.not_mixed()
        weight = self._weight(sample["label"] if sample["augment"] else None)
        return {"image": pixels, "label": sample["label"], **mixed, **weight}

    def _weight(self, label: int | None) -> dict[str, np.float32]:
        """A training sample's `weight` by its class, where classes have weights; else 1."""
        if self.config.class_weights == "none":
            return {}
        counts = self.class_counts
        if label is None or counts is None:
            return {"weight": np.float32(1.0)}
        return {"weight": np.float32(sum(counts) / (len(counts) * counts[label]))}

    def collate(self, samples: Sequence[Sample], micro: MicroBatch) -> Batch:
        batch = augmentation.share_draws(stack_samples(samples, micro.rows), len(samples))
        unreadable = batch["label"] == NO_IMAGE
        batch["mask"][unreadable] = 0.0
        batch["label"][unreadable] = 0
        return batch

    def example_batches(self, rows: int) -> list[Batch]:
        side = self.input.side
        image = torch.zeros(3, side, side, dtype=torch.uint8)
        sample = {"image": image, "label": 0, **augmentation.not_mixed(), **self._weight(None)}
        return [stack_samples([sample] * rows, rows)]

    def count_samples(self) -> int:
        return len(listing.find_training_images(self.config, self.class_names)[0])

    # -- model -----------------------------------------------------------------------------------
    def build_model(self, ops: ModelOps) -> nn.Module:
        classes = self.config.classes if self.class_names is None else len(self.class_names)
        return classifier.build_classifier(self.config, classes)

    def initialize(self, model: nn.Module, data: Datasets) -> None:
        if self.config.pretrained != "none":
            classifier.load_pretrained(model, self.config)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        return list(classifier.layer_groups(model, weight_decay, self.config.layer_decay))

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Each row's cross-entropy; while training with label smoothing, mixed pairs and weights
        of the classes."""
        image, label = self.input.normalised(batch["image"]), batch["label"]
        mixes = model.training and (self.config.mixup > 0 or self.config.cutmix > 0)
        smoothing = self.config.smoothing if model.training else 0.0
        weight = batch.get("weight") if model.training else None
        if mixes:
            image = augmentation.mix(image, batch["share"], batch["box"])
        scores = model(image).float()
        loss = F.cross_entropy(scores, label, reduction="none", label_smoothing=smoothing)
        if mixes:
            other = F.cross_entropy(
                scores, augmentation.partners(label), reduction="none", label_smoothing=smoothing
            )
            parts = batch["share"], 1 - batch["share"]
            if weight is not None:
                parts = parts[0] * weight, parts[1] * augmentation.partners(weight)
                weight = parts[0] + parts[1]
                parts = parts[0] / weight, parts[1] / weight
            loss = parts[0] * loss + parts[1] * other
        target = label[:, None]
        own, classes = scores.gather(1, target), torch.arange(scores.shape[1], device=label.device)
        # Of equal scores the first class counts as the best, as for `argmax`; NaN is never right.
        better = (~(scores <= own) | ((scores == own) & (classes < target))).sum(1)
        right = {"accuracy": (better < 1).float()}
        if scores.shape[1] > 5:
            right["top5_accuracy"] = (better < 5).float()
        return {"loss": loss, **right} | ({} if weight is None else {"weight": weight})

    def validation_rows(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The classes and their probabilities, for metrics by name."""
        image = self.input.normalised(batch["image"])
        return {"target": batch["label"], "prediction": model(image).float().softmax(1)}

    def tta_warnings(self, run: object) -> Iterator[str]:
        """A line where test-time augmentation shows what the training of a run has not."""
        if self.config.tta == "flip" and self.config.hflip == 0:
            yield (
                f"Warning: tta=flip averages with mirrored images, and {run} was trained without"
                " (hflip=0)."
            )

    def probabilities(self, model: nn.Module, batch: Batch) -> Tensor:
        """(rows, classes) of each row's image; with test-time augmentation their mean."""
        image = self.input.normalised(batch["image"])
        scores: Tensor = model(image).float().softmax(1)
        if self.config.tta == "flip":
            scores = (scores + model(image.flip(3)).float().softmax(1)) / 2
        return scores
