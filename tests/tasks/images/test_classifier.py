"""Any timm model by name: inputs, weights and groups as timm has them."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config

from tpukit.errors import CheckpointError, ConfigError, DataError
from tpukit.tasks.images.evaluate import accuracies
from tpukit.tasks.images.model.classifier import input_format, layer_groups, load_pretrained
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.tasks.images.task import ImagesTask
from tpukit.train.task import sample_rng


def make_task(**settings):
    return ImagesTask(**{"model": "test_vit", "classes": 4, **settings})


@pytest.mark.parametrize(
    ("model", "side"),
    [("test_vit", None), ("test_vit", 160), ("convnext_tiny.in12k_ft_in1k_384", None)],
)
def test_images_reach_the_model_as_timm_would_give_them(model, side):
    """Their middle, or (by `crop_mode`) distorted into a square."""
    task = make_task(model=model, image_size=side)
    pixels = np.random.default_rng(0).integers(0, 255, (170, 200, 3), np.uint8)
    image = Image.fromarray(pixels)
    drawn = task.draw({"image": image, "label": 0, "augment": False}, sample_rng(0, 0, 0))
    ours = task.input.normalised(drawn["image"][None])
    data = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(model).to_dict())
    torch.testing.assert_close(ours[0], create_transform(**data)(image), atol=2e-6, rtol=1e-6)


def test_a_model_that_timm_lacks_is_refused_with_what_is_near():
    with pytest.raises(ConfigError, match="'convnext_tinny'") as caught:
        make_task(model="convnext_tinny")
    assert "convnext_tiny" in caught.value.hint


def test_a_model_with_a_fixed_input_is_built_for_the_image_size():
    task = make_task(image_size=64)
    assert task.build_model(None)(torch.zeros(1, 3, 64, 64)).shape == (1, 4)
    assert input_format(ImagesConfig(model="test_vit")).side == 160


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_weights_from_a_file_with_another_head(tmp_path, suffix):
    torch.manual_seed(0)
    source = timm.create_model("test_vit", num_classes=10).state_dict()
    path = tmp_path / f"weights.{suffix}"
    save_file(source, path) if suffix == "safetensors" else torch.save({"model": source}, path)
    task = make_task(pretrained=str(path))
    model = task.build_model(None)
    head = model.head.weight.detach().clone()
    load_pretrained(model, task.settings)
    assert torch.equal(model.blocks[0].mlp.fc1.weight, source["blocks.0.mlp.fc1.weight"])
    assert torch.equal(model.head.weight, head)


@pytest.mark.parametrize("prefix", ["", "visual.trunk."])
def test_weights_from_a_file_are_made_for_the_image_size_as_timm_does(tmp_path, prefix):
    """Also those with the names of another project, here OpenCLIP."""
    source = timm.create_model("test_vit").state_dict()
    path = tmp_path / "weights.safetensors"
    save_file({f"{prefix}{name}": weight for name, weight in source.items()}, path)
    task = make_task(pretrained=str(path), image_size=224)
    ours = task.build_model(None)
    load_pretrained(ours, task.settings)
    theirs = timm.create_model(
        "test_vit", pretrained=True, pretrained_cfg_overlay={"file": str(path)}, img_size=224
    )
    for name, weight in theirs.state_dict().items():
        assert name.startswith("head.") or torch.equal(ours.state_dict()[name], weight)


def test_weights_of_another_model_are_refused(tmp_path):
    save_file(timm.create_model("test_convnext").state_dict(), tmp_path / "other.safetensors")
    task = make_task(pretrained=str(tmp_path / "other.safetensors"))
    with pytest.raises(DataError, match="not weights of test_vit"):
        load_pretrained(task.build_model(None), task.settings)
    (tmp_path / "text.pth").write_text("no weights")
    for name, says in {"gone.pth": "no such file", "text.pth": "not a file of weights"}.items():
        task = make_task(pretrained=str(tmp_path / name))
        with pytest.raises(DataError, match=says):
            load_pretrained(task.build_model(None), task.settings)


def test_equal_scores_and_nan_are_no_right_answers():
    """As `test` counts them: of equal scores the first class is the predicted one."""
    scores = torch.zeros(4, 8)
    scores[2, 3], scores[3] = 1.0, torch.nan
    labels, pixels = torch.tensor([0, 6, 3, 0]), torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    found = make_task().loss(lambda_module(scores), {"image": pixels, "label": labels})
    assert found["accuracy"].tolist() == [1, 0, 1, 0]
    assert found["top5_accuracy"].tolist() == [1, 0, 1, 0]
    probabilities = scores.softmax(1).numpy()
    kept = accuracies(probabilities[:3], labels[:3].numpy())
    assert kept["accuracy"] == kept["top5_accuracy"] == pytest.approx(2 / 3)


def lambda_module(scores):
    """A module in eval mode that gives these scores."""
    module = torch.nn.Module()
    module.forward = lambda images: scores
    return module.eval()


def test_groups_are_timms():
    from timm.optim import param_groups_layer_decay

    model = make_task().build_model(None)
    ours = layer_groups(model, 0.05, 0.75)
    theirs = param_groups_layer_decay(
        model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.75
    )
    assert [(g.weight_decay, g.lr_scale, len(g.parameters)) for g in ours] == [
        (g["weight_decay"], g["lr_scale"], len(g["params"])) for g in theirs
    ]
    assert {g.lr_scale for g in layer_groups(model, 0.05, 1.0)} == {1.0}


@pytest.mark.parametrize("missing", ["target.json", "value_range.json", "data_config.json"])
def test_what_prepares_images_must_be_in_a_checkpoint(missing):
    """Other values, classes or crops would be predictions of other images."""
    kept = dict.fromkeys(("target.json", "value_range.json", "data_config.json"), b"{}")
    del kept[missing]
    with pytest.raises(CheckpointError, match=f"holds no {missing}"):
        make_task().restore(kept)
