"""A sample's random draws are its own; pairs are mixed as their draws say."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from tpukit.errors import ConfigError
from tpukit.tasks.images.data.augmentation import mix, partners, views
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.tasks.images.task import ImagesTask
from tpukit.train.target import Target
from tpukit.train.task import MicroBatch, PlanSettings, SampleKey, sample_rng

SIDE = 32


def make_task(**settings):
    defaults = {"model": "test_convnext", "image_size": SIDE, "classes": 4}
    return ImagesTask(**{**defaults, **settings})


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 50, 3), np.uint8)
    return Image.fromarray(pixels)


def test_draws_depend_on_the_sample_alone():
    task = make_task(auto_augment="rand-m9-mstd0.5-inc1", mixup=0.8, cutmix=1.0)
    sample = {"image": picture(0), "label": 1, "augment": True}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = task.draw(sample, sample_rng(0, 3, 7))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    again = task.draw(sample, sample_rng(0, 3, 7))
    other = task.draw(sample, sample_rng(0, 4, 7))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["image"], other["image"])
    assert first["image"].shape == (3, SIDE, SIDE)
    assert first["image"].dtype == torch.uint8


@pytest.mark.parametrize("policy", ["foo", "rand-q9", "augmix-mx2", 3])
def test_an_unknown_policy_is_named_before_the_data_is_read(policy):
    with pytest.raises(ConfigError, match=f"auto_augment '?{policy}'? is not a policy of timm"):
        make_task(auto_augment=policy, data_path="nowhere").datasets()


def test_validation_images_are_resized_and_cropped_alone():
    task = make_task(mixup=0.8)
    sample = {"image": picture(0), "label": 1, "augment": False}
    drawn = [task.draw(sample, sample_rng(0, 0, i)) for i in range(2)]
    assert torch.equal(drawn[0]["image"], drawn[1]["image"])
    assert drawn[0]["share"] == 1.0


def test_a_pair_shares_its_draws_and_a_row_without_a_partner_has_none():
    task = make_task(cutmix=1.0)
    samples = [
        task.draw({"image": picture(i), "label": i, "augment": True}, sample_rng(0, 0, i))
        for i in range(3)
    ]
    keys = tuple(SampleKey(0, i) for i in range(3))
    batch = task.collate(samples, MicroBatch(keys, 4))
    assert batch["share"][0] == batch["share"][1] == samples[0]["share"]
    assert batch["share"][2:].tolist() == [1.0, 1.0]
    assert batch["box"][2:].sum() == 0
    assert batch["mask"].tolist() == [1, 1, 1, 0]


def test_mixup_and_cutmix_mix_pixels_and_labels_in_the_same_share():
    images = torch.rand(5, 3, 8, 8)
    share = torch.tensor([0.3, 0.3, 0.75, 0.75, 1.0])
    box = torch.zeros(5, 4, dtype=torch.int32)
    box[2:4] = torch.tensor([2, 6, 0, 4])
    mixed = mix(images, share, box)
    torch.testing.assert_close(mixed[0], 0.3 * images[0] + 0.7 * images[1])
    torch.testing.assert_close(mixed[1], 0.3 * images[1] + 0.7 * images[0])
    cut = images[2].clone()
    cut[:, 2:6, 0:4] = images[3][:, 2:6, 0:4]
    torch.testing.assert_close(mixed[2], cut)
    torch.testing.assert_close(mixed[4], images[4])
    assert partners(torch.arange(5)).tolist() == [1, 0, 3, 2, 4]


def test_views_are_the_image_mirrored_and_its_parts_enlarged():
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 16, 16, generator=rng)
    whole, mirrored, upside, middle, *corners = views(images, ["flip", "vflip", "scale", "crops"])
    torch.testing.assert_close(whole, images)
    torch.testing.assert_close(mirrored.flip(3), images)
    torch.testing.assert_close(upside.flip(2), images)
    resized = torch.nn.functional.interpolate(images[..., 1:15, 1:15], (16, 16), mode="bilinear")
    torch.testing.assert_close(middle, resized)
    assert len(corners) == 4 and all(corner.shape == images.shape for corner in corners)
    found = ImagesConfig(tta="vflip,crops", smallest_crop=0.9).unseen_views()
    assert [*found] == ["vflip (vflip=0)", "crops (smallest_crop=0.9)"]
    assert not [*ImagesConfig(tta="flip,scale").unseen_views()]


def test_the_share_of_cutmix_is_the_area_that_stays():
    task = make_task(cutmix=1.0)
    for i in range(20):
        drawn = task.draw({"image": picture(0), "label": 0, "augment": True}, sample_rng(0, 0, i))
        top, bottom, left, right = drawn["box"]
        assert drawn["share"] == pytest.approx(1 - (bottom - top) * (right - left) / SIDE**2)
        assert 0 <= top <= bottom <= SIDE


def test_the_loss_of_mixed_rows_is_that_of_soft_targets():
    """timm's own soft-target loss on the same mixed images (fp32)."""
    from timm.loss import SoftTargetCrossEntropy

    task = make_task(mixup=1.0, smoothing=0.1)
    task.predicts = Target("class", ("label",), tuple("abcd"))
    torch.manual_seed(0)
    model = task.build_model(None).train()
    labels, share = torch.tensor([0, 3]), torch.tensor([0.25, 0.25])
    batch = {
        "image": torch.randint(0, 255, (2, 3, SIDE, SIDE), dtype=torch.uint8),
        "label": labels, "share": share, "box": torch.zeros(2, 4, dtype=torch.int32),
        "mask": torch.ones(2),
    }  # fmt: skip
    ours = task.loss(model, batch)["loss"].mean()
    image = mix(task.input.normalised(batch["image"]), share, batch["box"])
    smooth = torch.nn.functional.one_hot(labels, 4) * 0.9 + 0.1 / 4
    soft = share[:, None] * smooth + (1 - share[:, None]) * smooth.flip(0)
    torch.testing.assert_close(ours, SoftTargetCrossEntropy()(model(image), soft))


@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_balanced_weights_are_those_of_cross_entropy(mixup):
    """Over micro-batches, as `CrossEntropyLoss(weight)` of the whole batch; mixed targets too."""
    counts = (20, 5, 10, 5)
    task = make_task(class_weights="balanced", mixup=mixup, smoothing=0.0)
    task.predicts = Target("class", ("label",), tuple("abcd"), counts=counts)
    torch.manual_seed(0)
    model = task.build_model(None).train()
    samples = [
        task.draw({"image": picture(i), "label": label, "augment": True}, sample_rng(0, 0, i))
        for i, label in enumerate((0, 1, 3, 0, 2, 0))
    ]
    parts, sums = [samples[:2], samples[2:]], torch.zeros(2)
    wanted = torch.zeros(2)
    weights = torch.tensor([40 / (4 * count) for count in counts])
    for part in parts:
        keys = tuple(SampleKey(0, i) for i in range(len(part)))
        batch = task.collate(part, MicroBatch(keys, len(part)))
        outputs = task.loss(model, batch)
        sums += torch.stack([(outputs["loss"] * outputs["weight"]).sum(), outputs["weight"].sum()])
        image = mix(task.input.normalised(batch["image"]), batch["share"], batch["box"])
        one = torch.nn.functional.one_hot(batch["label"], 4).float()
        soft = batch["share"][:, None] * one + (1 - batch["share"])[:, None] * partners(one)
        rows = -(soft * weights * model(image).log_softmax(1)).sum()
        wanted += torch.stack([rows, (soft * weights).sum()])
        if mixup == 0:
            theirs = torch.nn.functional.cross_entropy(model(image), batch["label"], weights)
            torch.testing.assert_close(rows / (soft * weights).sum(), theirs)
    torch.testing.assert_close(sums[0] / sums[1], wanted[0] / wanted[1])
    # What is validated is not weighted.
    assert "weight" not in task.loss(model.eval(), batch)
    assert task.probe_batches(PlanSettings(2, 2, 1, 0))[0].keys() == batch.keys()
