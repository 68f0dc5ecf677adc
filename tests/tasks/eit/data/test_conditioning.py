import numpy as np
import torch

from tpukit.tasks.eit.data.conditioning import enlarge, map_voltages, measured_pairs, voltage_map


def test_pairs_rise_and_leave_out_those_that_touch_the_drive():
    pairs = measured_pairs()
    assert pairs.shape == (16, 13)
    assert pairs[0].tolist() == list(range(2, 15))
    assert pairs[5].tolist() == [0, 1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert pairs[15].tolist() == list(range(1, 14))


def test_map_has_zeros_around_the_diagonal_and_the_voltages_in_order():
    ys = np.arange(1, 209, dtype=np.float32)[:, None]
    image = voltage_map(ys, np.zeros((1, 16, 13)), np.ones((1, 16, 13)))
    assert image.dtype == np.float32
    for i in range(16):
        assert np.flatnonzero(image[i] == 0).tolist() == sorted((i + k) % 16 for k in (-1, 0, 1))
        assert image[i][image[i] != 0].tolist() == ys[13 * i : 13 * i + 13, 0].tolist()


def test_map_normalises_each_channel_and_can_be_undone():
    rng = np.random.default_rng(0)
    ys, mean, std = rng.normal(size=(5, 208)), rng.normal(size=208), rng.uniform(1, 2, 208)
    maps = voltage_map(ys, mean, std)
    assert maps.shape == (5, 16, 16)
    np.testing.assert_allclose(map_voltages(maps, mean, std), ys, atol=1e-6)
    assert maps[2, 0, 2] == np.float32((ys[2, 0] - mean[0]) / std[0])


def test_enlarging_equals_torch_upsample():
    maps = np.random.default_rng(0).normal(size=(2, 1, 16, 16))
    expected = torch.nn.Upsample(scale_factor=8)(torch.from_numpy(maps)).numpy()
    np.testing.assert_array_equal(enlarge(maps), expected)
