"""Image files of every kind become RGB, and damaged ones are named."""

import numpy as np
import pytest
from PIL import Image

from tpukit.errors import DataError
from tpukit.tasks.images.data.files import ImageFiles, check_headers, decode
from tpukit.tasks.images.data.listing import LabelledImages
from tpukit.train.target import Target

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)


def decoded(tmp_path, image, name="image.png", side=64, **options):
    image.save(tmp_path / name, **options)
    found = decode(str(tmp_path / name), side)
    assert found.mode == "RGB"
    return np.asarray(found)


def test_grey_and_deep_images_keep_their_range(tmp_path):
    assert (decoded(tmp_path, Image.fromarray(RAMP)) == RAMP[..., None]).all()
    deep = decoded(tmp_path, Image.fromarray(RAMP.astype(np.uint16) * 257))
    assert (np.abs(deep.astype(int) - RAMP[..., None]) <= 1).all()


def test_cmyk_palettes_and_transparency(tmp_path):
    red = decoded(tmp_path, Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "image.jpg")
    assert red[..., 0].min() > 200
    assert red[..., 1:].max() < 60
    see_through = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert (decoded(tmp_path, see_through) == 255).all()
    palette = Image.new("RGB", (4, 4), (0, 128, 0)).quantize(4)
    assert (decoded(tmp_path, palette, "image.gif") == (0, 128, 0)).all()


def test_a_very_large_photograph_is_decoded_at_a_smaller_scale(tmp_path):
    large = decoded(tmp_path, Image.new("L", (10_000, 10_000), 128), "large.jpg", side=64)
    assert large.shape[:2] == (1250, 1250)


def test_damaged_files_are_named(tmp_path):
    whole = tmp_path / "whole.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(whole)
    for name, content in {
        "empty.png": b"", "text.jpg": b"<html>not found</html>",
        "cut.png": whole.read_bytes()[:2000],
        "huge.png": whole.read_bytes()[:16] + b"\x00\x0f\x00\x00\x00\x0f\x00\x00"
        + whole.read_bytes()[24:],
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: not an image that can be read") as caught:
            decode(str(tmp_path / name), 64)
        assert "\n" not in caught.value.message
    with pytest.raises(DataError, match="gone"):
        decode(str(tmp_path / "gone.png"), 64)


def test_damaged_files_may_be_skipped(tmp_path):
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "1.png")
    (tmp_path / "0.png").write_bytes(b"x")
    files = tuple(str(tmp_path / f"{i}.png") for i in range(2))
    images = LabelledImages(files, (0, 1), Target("class", ("label",), ("a", "b")))
    skipping = ImageFiles(images, 4, augment=True, skip_damaged=True)
    assert [skipping[i]["label"] for i in range(2)] == [1, 1]
    # Not while testing: another image's prediction would stand in the damaged one's row.
    evaluated = ImageFiles(images, 4, augment=False, skip_damaged=True)
    assert [evaluated[i]["readable"] for i in range(2)] == [0, 1]
    with pytest.raises(DataError):
        ImageFiles(images, 4, augment=False)[0]
    (tmp_path / "1.png").write_bytes(b"x")
    with pytest.raises(DataError):
        skipping[0]


def test_damaged_headers_are_listed_at_once(tmp_path, capsys, monkeypatch):
    good = tmp_path / "good.png"
    Image.new("L", (4, 4)).save(good)
    files = [tmp_path / "a" / f"{i:02}.jpg" for i in range(12)]
    (tmp_path / "a").mkdir()
    for file in files:
        file.write_bytes(b"")
    paths = [*map(str, files)]
    with pytest.raises(DataError) as caught:
        check_headers([str(good), *paths[:6]], paths[6:])
    listed = ", ".join(f"{i:02}.jpg" for i in range(10))
    told = f"12 of 13 images cannot be read: {listed}, and 2 more in {tmp_path / 'a'} (the first: "
    assert told in caught.value.message
    assert "--set damaged=skip" in caught.value.hint
    check_headers([str(good), *paths], skip=True)
    assert "12 of 13 images cannot be read: 00.jpg" in capsys.readouterr().err
    with pytest.raises(DataError):
        check_headers([str(good)], paths, skip=True)
    monkeypatch.setenv("RANK", "1")
    check_headers(paths)
