"""A network that starts from ridge regression of images on voltages."""

import numpy as np
import torch
from fake_backend import FakeBackend

from tpukit.tasks.eit.model.network import shrunk
from tpukit.tasks.eit.task import EITTask
from tpukit.train.task import Datasets


def samples(count):
    """Images that depend linearly on the voltages."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((128 * 128, 256)).astype(np.float32) / 16
    voltages = rng.standard_normal((count, 1, 16, 16), dtype=np.float32)
    images = (voltages.reshape(count, 256) @ mixing.T + 0.5).reshape(count, 1, 128, 128)
    return [{"voltages": v, "image": x} for v, x in zip(voltages, images, strict=True)]


def test_shrinking_averages_cells():
    image = np.arange(16.0).reshape(4, 4)
    assert shrunk(image, 2).tolist() == [[2.5, 4.5], [10.5, 12.5]]


def test_a_fresh_network_predicts_the_linear_image():
    data = samples(300)
    task = EITTask(size="tiny")
    side = task.settings.network.learned_side
    model = task.build_model(FakeBackend())
    task.initialize(model, Datasets(data, None))
    maps = torch.from_numpy(data[3]["voltages"])[None]
    with torch.no_grad():
        image = model(torch.randn(1, 1, 128, 128), torch.tensor([999.0]), maps)
    expected = shrunk(data[3]["image"][0], side)
    found = shrunk(image[0, 0].numpy(), side)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.95
