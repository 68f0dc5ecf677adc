import numpy as np

from tpukit.tasks.eit.data.conditioning import measured_pairs, voltage_map


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


def test_map_normalises_each_channel():
    rng = np.random.default_rng(0)
    ys, mean, std = rng.normal(size=(5, 208)), rng.normal(size=208), rng.uniform(1, 2, 208)
    maps = voltage_map(ys, mean, std)
    assert maps.shape == (5, 16, 16)
    drives = np.arange(16)[:, None]
    kept = maps[:, drives, measured_pairs()].reshape(5, 208)
    np.testing.assert_allclose(kept * std + mean, ys, atol=1e-6)
    assert maps[2, 0, 2] == np.float32((ys[2, 0] - mean[0]) / std[0])
