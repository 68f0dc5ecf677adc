"""What an image classifier learns from, and how: any timm model on folders or tables of images."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.errors import CheckpointError, ConfigError
from tpukit.hardware.backend import Batch, ModelOps, ParameterGroup
from tpukit.io.process import is_first_rank
from tpukit.tasks.images.data import augmentation, listing
from tpukit.tasks.images.data.depth import SIXTEEN_BITS, ValueRange
from tpukit.tasks.images.data.files import ImageFiles, find_range
from tpukit.tasks.images.model import classifier
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.train.features import TableFeatures
from tpukit.train.target import Target
from tpukit.train.target_loss import TargetLoss, balanced_weights
from tpukit.train.task import (
    Datasets,
    MicroBatch,
    PlanSettings,
    Sample,
    Task,
    seeded_generators,
    stack_samples,
)

TARGET_FILE = "target.json"
CLASSES_FILE = "classes.json"
RANGE_FILE, FEATURES_FILE = "value_range.json", "features.json"
CONFIG_FILE = "data_config.json"
"""timm's data configuration of the evaluation."""
ELSEWHERE = (
    "data_path", "table", "folder", "id_column", "columns", "target", "sample_submission", "tta",
    "force_tta", "probabilities", "damaged", "damaged_row", "classes", "pretrained", "value_range",
    "pseudo",
)  # fmt: skip
"""Settings that do not decide the arithmetic of a run that goes on."""


class ImageTraining(Task):
    """Learns what a `Target` says of an image.

    A sample is a decoded image and its label; `draw` crops and augments it. A batch has `image`
    (rows, 3, side, side) uint8, `label` (see `Target.values`), and mixup's `share` (rows,) and
    `box` (rows, 4).
    """

    settings: ImagesConfig

    def __init__(
        self, *, predicts: str | None = None, beside: str | None = None,
        values: ValueRange = SIXTEEN_BITS, **settings: Any,
    ) -> None:  # fmt: skip
        """Settings are the fields of `ImagesConfig`.

        predicts: what a run has learned, beside: what its model sees beside the image, both as
        JSON; None: what the data decides.
        values: a run's scale of images of more than 8 bits.
        """
        super().__init__(**settings)
        given = self.settings.value_range
        self.values = values if given is None else ValueRange.parse(given)
        classifier.require_model(self.settings.model)
        self.predicts = None if predicts is None else Target.from_json(predicts)
        self.beside = None if beside is None else TableFeatures.from_json(beside)

    @property
    def criterion(self) -> TargetLoss:
        """The loss of what is learned; where no data is opened, of `classes` classes."""
        names = tuple(map(str, range(self.settings.classes)))
        return TargetLoss(self.predicts or Target("class", ("label",), names), self.settings.loss)

    @cached_property
    def input(self) -> classifier.InputFormat:
        """The format of the model's images."""
        return classifier.input_format(self.settings)

    @cached_property
    def transforms(self) -> dict[bool, augmentation.Transform]:
        """PIL image -> pixels, by whether it is augmented."""
        return augmentation.transforms(self.input, self.settings)

    # -- data ------------------------------------------------------------------------------------
    def datasets(self) -> Datasets:
        """The images of the data path, and their classes."""
        _ = self.transforms  # a wrong setting of theirs ends here
        train, valid = listing.find_training_images(self.settings, self.predicts)
        goes_on = self.predicts is not None
        says = not goes_on and is_first_rank()
        for remark in listing.remarks(self.settings, train) if says else ():
            print(remark, file=sys.stderr, flush=True)
        self.predicts = self.predicts or train.target.fitted(train.values)
        identity = {"data": f"{train.digest()}{valid.digest()}"}
        if self.settings.pseudo is not None:
            train = listing.with_predicted(train, self.settings)
            identity["pseudo"] = train.digest()
        is_known = self.settings.value_range is not None or goes_on
        self.values = find_range(
            train.files, valid.files, known=self.values if is_known else None,
            skip=self.settings.damaged == "skip",
        )  # fmt: skip
        if self.beside is None and train.texts:
            self.beside = TableFeatures.fitted(train.texts)
            if is_first_rank():
                print(f"Beside the image: {self.beside}.", file=sys.stderr, flush=True)
        if self.beside is not None:
            self.beside.require([*train.texts, *valid.texts])
        _ = self.criterion  # a loss that does not fit ends here
        return Datasets(
            self.samples(train, augment=True),
            self.samples(valid) if len(valid) else None,
            artifacts={
                TARGET_FILE: self.predicts.to_json(),
                CLASSES_FILE: json.dumps(self.predicts.predicted).encode(),
                CONFIG_FILE: self.input.to_json(),
                RANGE_FILE: self.values.to_json(),
                **({} if self.beside is None else {FEATURES_FILE: self.beside.to_json()}),
            },
            identity=identity,
            ids=valid.names,
        )

    def samples(self, images: listing.LabelledImages, *, augment: bool = False) -> ImageFiles:
        """A data set of these images."""
        skip = self.settings.damaged == "skip"
        return ImageFiles(
            images, self.input.side, augment=augment, skip_damaged=skip, values=self.values,
            features=self.beside,
        )  # fmt: skip

    def identity(self) -> dict[str, Any]:
        values = {n: value for n, value in asdict(self.settings).items() if n not in ELSEWHERE}
        return {**values, "value_range": str(self.values)}

    def restore(self, artifacts: Mapping[str, bytes]) -> Self:
        for name in (TARGET_FILE, RANGE_FILE, CONFIG_FILE):
            if name not in artifacts:
                raise CheckpointError(
                    f"The checkpoint holds no {name}.", "Is it a run of the images task?"
                )
        learned, beside = artifacts[TARGET_FILE].decode(), artifacts.get(FEATURES_FILE)
        return type(self)(
            predicts=learned, beside=None if beside is None else beside.decode(),
            values=ValueRange.from_json(artifacts[RANGE_FILE]), **asdict(self.settings),
        )  # fmt: skip

    def draw(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """The pixels of a decoded image, with the draws of mixup and cutmix."""
        if sample["augment"]:
            seed = int(rng.integers(2**32))
            with seeded_generators(seed, seed, seed):
                pixels = self.transforms[True](sample["image"])
            mixed = augmentation.draw_mix(rng, self.settings, self.input.side)
        else:
            # Without the generators, which another thread may be training with.
            pixels = self.transforms[False](sample["image"])
            mixed = augmentation.not_mixed()
        weight = self._weight(sample["label"] if sample["augment"] else None)
        readable = sample.get("readable", np.float32(1))
        kept = {name: sample[name] for name in ("label", "features") if name in sample}
        return {"image": pixels, "readable": readable, **kept, **mixed, **weight}

    def _weight(self, label: NDArray[Any] | None) -> dict[str, Any]:
        """A training sample's `weight` by its class, or weights of its labels, where classes have
        weights; else 1."""
        if self.settings.class_weights == "none":
            return {}
        target = self.criterion.target
        name = "label_weight" if target.kind == "labels" else "weight"
        if label is None:
            shape = (len(target.predicted),) if target.kind == "labels" else ()
            return {name: np.ones(shape, np.float32)}
        return {name: balanced_weights(target, np.asarray(label)[None])[0]}

    def collate(self, samples: Sequence[Sample], micro: MicroBatch) -> Batch:
        batch = augmentation.share_draws(stack_samples(samples, micro.rows), len(samples))
        batch["mask"] = batch["mask"] * batch.pop("readable")
        return batch

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        side = self.input.side
        image = torch.zeros(3, side, side, dtype=torch.uint8)
        label = self.criterion.target.blank(soft=self.settings.pseudo is not None)
        sample = {"image": image, "label": label, **augmentation.not_mixed(), **self._weight(None)}
        if self.beside is not None:
            sample["features"] = np.zeros(len(self.beside.columns), np.float32)
        return [stack_samples([sample] * settings.micro_rows, settings.micro_rows)]

    def count_samples(self) -> int:
        train = listing.find_training_images(self.settings, self.predicts)[0]
        return len(listing.with_predicted(train, self.settings))

    # -- model -----------------------------------------------------------------------------------
    def build_model(self, ops: ModelOps) -> nn.Module:
        return classifier.build_classifier(self.settings, self.criterion.outputs, self.beside)

    def initialize(self, model: nn.Module, data: Datasets) -> None:
        if self.settings.pretrained != "none":
            classifier.load_pretrained(model, self.settings)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        return list(classifier.layer_groups(model, weight_decay, self.settings.layer_decay))

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Each row's loss; while training with label smoothing, mixed pairs and weights of the
        classes or labels."""
        image, label = self.input.normalised(batch["image"]), batch["label"]
        mixes = model.training and (self.settings.mixup > 0 or self.settings.cutmix > 0)
        smoothing = self.settings.smoothing if model.training else 0.0
        weight = batch.get("weight") if model.training else None
        labels = batch.get("label_weight") if model.training else None
        if mixes:
            image = augmentation.mix(image, batch["share"], batch["box"])
        scores = self._scores(model, image, batch)
        losses = self.criterion.losses
        loss = losses(scores, label, smoothing=smoothing, weights=labels)
        if mixes:
            others = None if labels is None else augmentation.partners(labels)
            partner = augmentation.partners(label)
            other = losses(scores, partner, smoothing=smoothing, weights=others)
            parts = batch["share"], 1 - batch["share"]
            if weight is not None:
                parts = parts[0] * weight, parts[1] * augmentation.partners(weight)
                weight = parts[0] + parts[1]
                parts = parts[0] / weight, parts[1] / weight
            loss = parts[0] * loss + parts[1] * other
        found = {"loss": loss, **self._right(scores, label)}
        return found | ({} if weight is None else {"weight": weight})

    def _right(self, scores: Tensor, label: Tensor) -> dict[str, Tensor]:
        """(rows,) whether a row's class, or the share of its labels, is found."""
        kind = self.criterion.target.kind
        if kind == "labels":
            return {"accuracy": ((scores > 0) == (label > 0.5)).float().mean(1)}
        if kind != "class":
            return {}
        target = label.argmax(1, keepdim=True) if label.ndim == 2 else label[:, None]
        own, classes = scores.gather(1, target), torch.arange(scores.shape[1], device=label.device)
        # Of equal scores the first class counts as the best, as for `argmax`; NaN is never right.
        better = (~(scores <= own) | ((scores == own) & (classes < target))).sum(1)
        right = {"accuracy": (better < 1).float()}
        if scores.shape[1] > 5:
            right["top5_accuracy"] = (better < 5).float()
        return right

    def validation_rows(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """What is true and what is predicted, for metrics by name."""
        predicted = self._predicted(model, self.input.normalised(batch["image"]), batch)
        is_score = self.criterion.target.kind == "score"
        return {"target": batch["label"], "prediction": predicted[:, 0] if is_score else predicted}

    def require_seen_views(self, run: object) -> None:
        """Raises ConfigError where test-time augmentation shows what the training of a run has
        not."""
        unseen = [] if self.settings.force_tta else [*self.settings.unseen_views()]
        if unseen:
            raise ConfigError(
                f"tta: {run} was trained without {', '.join(unseen)}.",
                "Leave it out, or average all the same: --set force_tta=true",
            )

    def predictions(self, model: nn.Module, batch: Batch) -> Tensor:
        """(rows, predicted) of each row's image; with test-time augmentation their mean. A row
        without an image is NaN."""
        image = self.input.normalised(batch["image"])
        shown = [*augmentation.views(image, self.settings.views)]
        found = self._predicted(model, shown[0], batch)
        for view in shown[1:]:
            found = found + self._predicted(model, view, batch)
        found = found / len(shown)
        return torch.where(batch["mask"][:, None] > 0, found, torch.nan)

    def _predicted(self, model: nn.Module, image: Tensor, batch: Batch) -> Tensor:
        return self.criterion.predictions(self._scores(model, image, batch))

    def _scores(self, model: nn.Module, image: Tensor, batch: Batch) -> Tensor:
        """(rows, outputs) of the images, with the features beside them."""
        features = [batch["features"]] if "features" in batch else []
        scores: Tensor = model(image, *features)
        return scores.float()
